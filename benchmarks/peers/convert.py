"""The off-grid checkpoint (common/off_grid.py) in the other systems' formats.

llama.cpp: a GGUF file in F16, from the published one with its matrices replaced, and what llama.cpp
quantises it to. OpenVINO: what `optimum-cli export openvino` makes of the folder.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.common.gguf_model import checkpoint_name, paired_rows

# llama.cpp's file types; OpenVINO's flags, those of its documentation for each format.
LLAMA_CPP = {"F16": 1, "q8_0": 7, "q4_0": 2, "Q4_K_M": 15}
OPENVINO = {
    "fp32": ["--weight-format", "fp32"],
    "int8": ["--weight-format", "int8"],
    "int4, groups of 64": ["--weight-format", "int4", "--group-size", "64", "--ratio", "1.0"],
    "int4, groups of 32": ["--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"],
}


def write_gguf(published: Path, folder: Path, out: Path) -> None:
    """The GGUF file `out` in F16: all that `published` says, with the weights of `folder`."""
    import gguf

    reader, weights = gguf.GGUFReader(published), load_file(folder / "model.safetensors")
    writer = _writer_with(reader, out, {"general.file_type": LLAMA_CPP["F16"]})
    heads = {
        "attn_q": reader.fields["llama.attention.head_count"].contents(),
        "attn_k": reader.fields["llama.attention.head_count_kv"].contents(),
    }
    for tensor in reader.tensors:
        known = checkpoint_name(tensor.name)
        values = weights[known if known in weights else "model.embed_tokens.weight"].float()
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = torch.from_numpy(paired_rows(values.numpy(), heads[part]))
        dtype = np.float16 if values.ndim == 2 else np.float32
        writer.add_tensor(tensor.name, np.ascontiguousarray(values.numpy().astype(dtype)))
    _write(writer)


def write_layers(published: Path, num_layers: int, context: int, kind: str, out: Path) -> None:
    """The GGUF file `out` with the first `num_layers` layers of `published`, embedding and head.

    context: tokens that it says to be made for; kind: F16 or Q8_0, of the matrices.
    """
    import gguf

    reader, is_f16 = gguf.GGUFReader(published), kind == "F16"
    said = {"llama.block_count": num_layers, "llama.context_length": context}
    writer = _writer_with(reader, out, said | {"general.file_type": 1 if is_f16 else 7})
    for tensor in reader.tensors:
        place = tensor.name.split(".")
        if place[0] == "blk" and int(place[1]) >= num_layers:
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        elif is_f16:
            writer.add_tensor(tensor.name, values.astype(np.float16))
        else:
            of = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, of), raw_dtype=of)
    _write(writer)


def _writer_with(reader: Any, out: Path, said: dict[str, Any]) -> Any:
    """Of a file that says what that of `reader` says, but for what `said` has."""
    import gguf

    writer = gguf.GGUFWriter(out, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, said.get(name, field.contents()), kind, inner)
    return writer


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize_gguf(python: str, source: Path, out: Path, kind: str, threads: int) -> None:
    """By llama.cpp's own quantiser, in the environment of `python`."""
    program = (
        "import ctypes, llama_cpp, sys\n"
        "params = llama_cpp.llama_model_quantize_default_params()\n"
        "params.ftype, params.nthread = int(sys.argv[3]), int(sys.argv[4])\n"
        "sys.exit(llama_cpp.llama_model_quantize("
        "sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))\n"
    )
    run([python, "-c", program, str(source), str(out), str(LLAMA_CPP[kind]), str(threads)])


def export_openvino(python: str, folder: Path, out: Path, kind: str) -> None:
    """With optimum-intel, in the environment of `python`."""
    tool = str(Path(python).with_name("optimum-cli"))
    task = ["--task", "text-generation-with-past", "--disable-convert-tokenizer"]
    run([tool, "export", "openvino", "--model", str(folder), *task, *OPENVINO[kind], str(out)])


def run(command: list[str]) -> None:
    """Raises RuntimeError, with what it said, where it fails."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{command[:3]} failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-3000:]}")


def gguf_size(file: Path) -> tuple[float, float]:
    """Bits of a weight in the layers' matrices, and MiB of all tensors."""
    import gguf

    tensors = gguf.GGUFReader(file).tensors
    linears = [each for each in tensors if len(each.shape) == 2 and each.name.startswith("blk.")]
    bits = 8 * sum(each.n_bytes for each in linears) / sum(each.n_elements for each in linears)
    return float(bits), float(sum(each.n_bytes for each in tensors)) / 2**20


def openvino_size(python: str, folder: Path, vocab: int) -> tuple[float, float]:
    """The same of the constants of an OpenVINO model: those of compressed matrices that are not the
    embedding's or the head's, their scales and zero points among them."""
    program = (
        "import json, openvino, sys\n"
        "found = [[c.get_element_type().get_type_name(), list(c.shape), c.get_byte_size()]"
        " for c in openvino.Core().read_model(sys.argv[1]).get_ops()"
        " if c.get_type_name() == 'Constant']\n"
        "print(json.dumps(found))\n"
    )
    ran = subprocess.run(
        [python, "-c", program, str(folder / "openvino_model.xml")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    constants = json.loads(ran.stdout.splitlines()[-1])
    inside = [each for each in constants if len(each[1]) >= 2 and vocab not in each[1][:1]]
    codes = [each for each in inside if each[0] in ("i8", "u8", "i4", "u4") and each[2] > 2**12]
    rows = {each[1][0] for each in codes}
    extra = [each for each in inside if each not in codes and each[1][0] in rows]
    num = sum(int(np.prod(each[1])) for each in codes if each[1][-1] > 1)
    bits = 8 * sum(each[2] for each in (*codes, *extra)) / max(1, num)
    return float(bits), float(sum(each[2] for each in constants)) / 2**20
