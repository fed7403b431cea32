"""Quantises a checkpoint, tensor by tensor: `penstock quantize`.

Peak memory is one tensor and its quantised form. The new folder gets its name only when everything
is on the disk. quantized_layout.py defines the stored layouts.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from penstock.kernels.quant import HADAMARD_BLOCK
from penstock.kernels.rowwise import hadamard as transformed
from penstock.workers.errors import ConfigError, InvariantError, LoadError
from penstock.workers.families.table import FAMILIES, family_of, text_of
from penstock.workers.gguf.header import find_gguf
from penstock.workers.model_config import ModelConfig, read_json
from penstock.workers.quantization import QuantizedFormat, head_format
from penstock.workers.weights.checkpoint import (
    INDEX_NAME,
    SCORE_HEAD,
    StoredTensor,
    is_headless,
    open_checkpoint,
)
from penstock.workers.weights.grids import Grid, GridSpec, round_weight
from penstock.workers.weights.int4_layout import (
    GROUP,
    parts_for,
    spec_for,
    stated_config,
    stored_codes,
)
from penstock.workers.weights.quantized_layout import (
    DTYPE_NAMES,
    StoredPart,
    bytes_of,
    file_header,
    parts_of,
    quantization_config,
    tensors_of,
    transform_config,
)

log = logging.getLogger("penstock.quantize")

# The linear layers of all families; routers, embeddings and norms have other names.
_LINEAR = re.compile(
    r"\.(q_proj|k_proj|v_proj|qkv_proj|o_proj|gate_proj|up_proj|gate_up_proj|down_proj"
    r"|experts\.\d+\.w[123]|in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj)\.weight$"
)
_ALL_EXPERTS = re.compile(
    r"\.experts\.(gate_up_proj|down_proj)$|\.block_sparse_moe\.(in|out)put_linear\.weight$"
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
# What to write for a module or a tensor of that name; None: it is made of the source's.
Ready = Callable[[str], Sequence[Tensor] | None]


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the source: copied, or quantised into `parts` of the module `name`. `spec`: the
    grids of int4. `hadamard`: transformed before it is rounded."""

    stored: StoredTensor
    name: str
    parts: tuple[StoredPart, ...]
    format: QuantizedFormat | None = None
    spec: GridSpec | None = None
    hadamard: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to be written."""

    file: str
    entries: list[OutputTensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """What will be written; known from the headers alone."""

    source: Path
    format: QuantizedFormat
    dtype: str  # of activations, as config.json has it
    shards: tuple[Shard, ...]
    ignored: tuple[str, ...]  # linear modules that are not quantised
    stated: Mapping[str, Any]  # what config.json gets, quantization_config first

    @property
    def num_source_bytes(self) -> int:
        return sum(entry.stored.num_bytes for entry in self._entries())

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for entry in self._entries() for part in entry.parts)

    @property
    def num_quantized(self) -> int:
        return sum(entry.format is not None for entry in self._entries())

    @property
    def num_int8(self) -> int:
        """Of those, int8 ones beside another format."""
        return sum(e.format == "int8" for e in self._entries()) if self.format != "int8" else 0

    def _entries(self) -> Iterator[OutputTensor]:
        for shard in self.shards:
            yield from shard.entries


def plan_quantize(
    source: Path,
    format: QuantizedFormat,
    *,
    quantize_o: bool,
    quantize_lm_head: bool,
    group: int = GROUP,
    grid: Grid = "zero-points",
    hadamard: bool = False,
) -> QuantizePlan:
    """Read the headers of `source` and decide for each tensor whether it is copied or quantised.

    `group`, `grid`: of int4, see GridSpec. `hadamard`: transform the weights of int8 and of int4 in
    steps, whose widths are multiples of 64. Raises ConfigError for a checkpoint that cannot
    be quantised, LoadError for a damaged one.
    """
    if (gguf := find_gguf(source)) is not None:
        raise ConfigError(
            f"{gguf} is a GGUF file, which is read and quantised while it loads: serve it with "
            f"--weights {format}"
        )
    if hadamard and not (format == "int8" or (format == "int4" and grid == "steps")):
        raise InvariantError(f"{format} is not transformed")
    config = ModelConfig.from_pretrained(source)
    if config.stored_scheme is not None:
        raise ConfigError(
            f"{source} is already quantised ({' and '.join(config.stored_scheme.formats)}); give "
            "the original checkpoint"
        )
    tensors = open_checkpoint(source)
    has_head = config.tie_word_embeddings or SCORE_HEAD in tensors
    if is_headless(tensors) and not has_head:
        raise ConfigError(
            f"{source} was saved without an LM head, which a quantised checkpoint must have: serve "
            f"it with --weights {format}, which quantises it while it loads"
        )
    stated_dtype = _text_config(source).get("dtype")
    dtype = str(stated_dtype or "float32").removeprefix("torch.")
    shards: dict[str, Shard] = {}
    ignored: list[str] = []
    specs: dict[str, GridSpec] = {}
    wide: list[str] = []
    odd: list[str] = []  # not transformed
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].file, item[1].offset)):
        shard = shards.setdefault(stored.file.name, Shard(stored.file.name))
        if _ALL_EXPERTS.search(name):
            if FAMILIES[config.architecture].names.only_fused:  # transformers writes them so, too
                raise ConfigError(
                    f"{stored.file}: {name!r} holds all experts of a layer in one tensor, which no "
                    f"quantised format supports: serve the model with --weights {format}, which "
                    "quantises it while it loads"
                )
            raise ConfigError(
                f"{stored.file}: {name!r} holds all experts of a layer in one tensor, which no "
                "quantised format supports; save the model again with transformers, which writes "
                "one tensor per expert: AutoModelForCausalLM.from_pretrained(folder)"
                ".save_pretrained(new_folder)"
            )
        module = name.removesuffix(".weight")
        is_linear = bool(_LINEAR.search(name)) or name == "lm_head.weight"
        skips = (module.endswith((".o_proj", ".out_proj")) and not quantize_o) or (
            name == "lm_head.weight" and not quantize_lm_head
        )
        if is_linear and len(stored.shape) != 2:
            raise LoadError(f"{stored.file}: tensor {name!r} has shape {list(stored.shape)}, not 2")
        spec, kind = None, format
        if name == "lm_head.weight":
            kind = head_format(format)
        if is_linear and kind == "int4":
            spec = spec_for(stored.shape[1], group, grid, dtype)
            if spec is None:
                log.warning("%s is not quantised: no group divides %s", module, stored.shape[1])
        if not is_linear or skips or (kind == "int4" and spec is None):
            # The list of linear layers that are not quantised includes routers.
            if is_linear or name.endswith(("gate.weight", "shared_expert_gate.weight")):
                ignored.append(module)
            shard.entries.append(_copied(name, stored))
            continue
        num_rows, width = stored.shape
        turned = hadamard and width % HADAMARD_BLOCK == 0
        odd += [module] * (hadamard and not turned)
        if spec is None:
            parts = tuple(parts_of(kind, num_rows, width, dtype))
            wide += [module] * (kind != format)
        else:
            spec = replace(spec, hadamard=turned)
            parts, specs[module] = parts_for(num_rows, width, spec), spec
        shard.entries.append(OutputTensor(stored, module, parts, kind, spec, turned))
    if config.tie_word_embeddings and "lm_head.weight" not in tensors:
        if quantize_lm_head:
            raise ConfigError(
                "the head shares its table with the embedding, which is not quantised, so a "
                "checkpoint cannot store a quantised head: leave --quantize-lm-head out here, and "
                "give it to penstock serve, which quantises a copy of the table"
            )
        ignored.append("lm_head")
    ignored.sort()
    if format == "int4":
        stated = stated_config(specs, wide, ignored)
    else:
        stated = {"quantization_config": quantization_config(format, ignored, dtype)}
    if hadamard:
        stated["quantization_config"]["transform_config"] = transform_config([*ignored, *odd])
    return QuantizePlan(source, format, dtype, tuple(shards.values()), tuple(ignored), stated)


def write_quantized(
    plan: QuantizePlan,
    out: Path,
    on_bytes: Callable[[int], object],
    ready: Ready = lambda _: None,
) -> None:
    """Write the checkpoint of `plan` into the new folder `out`.

    `on_bytes` is called with the number of source bytes after each tensor. Raises ConfigError if
    `out` exists or the disk is too small; on any error, no partial output remains.
    """
    check_room(out, plan.num_bytes)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for shard in plan.shards:
            _write_shard(folder / shard.file, shard, plan.dtype, on_bytes, ready)
        _copy_others(plan.source, folder)
        _write_config(plan, folder)
        if (plan.source / INDEX_NAME).is_file():
            _write_index(plan, folder)
        folder.chmod(0o755)
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def check_room(out: Path, num_bytes: int) -> None:
    """Raise ConfigError if `out` exists or its disk has not `num_bytes` free."""
    if out.exists():
        raise ConfigError(f"{out} exists already; give another --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(out.parent).free) < num_bytes:
        raise ConfigError(
            f"{out.parent} has {free / 1e9:.1f} GB free; {num_bytes / 1e9:.1f} GB are needed"
        )


def _copied(name: str, stored: StoredTensor) -> OutputTensor:
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    if stored.dtype not in ("F32", "BF16", "F16"):
        raise LoadError(f"{stored.file}: tensor {stored.name!r} is {stored.dtype}, not a float one")
    return OutputTensor(stored, name, (StoredPart("", dtypes[stored.dtype], stored.shape),))


def _write_shard(
    path: Path, shard: Shard, dtype: str, on_bytes: Callable[[int], object], ready: Ready
) -> None:
    with path.open("wb") as file:
        file.write(_header(shard))
        for entry in shard.entries:
            _write_entry(file, entry, dtype, ready(entry.name))
            on_bytes(entry.stored.num_bytes)
        file.flush()
        os.fsync(file.fileno())


def _write_entry(
    file: BinaryIO, entry: OutputTensor, dtype: str, ready: Sequence[Tensor] | None
) -> None:
    tensors = _made(entry, dtype) if ready is None else ready
    for part, each in zip(entry.parts, tensors, strict=True):
        if tuple(each.shape) != part.shape or each.dtype != part.dtype:
            raise InvariantError(f"{entry.name}: {part} was announced in the header")
        file.write(bytes_of(each))


def _made(entry: OutputTensor, dtype: str) -> Sequence[Tensor]:
    tensor = entry.stored.read()
    if entry.format is None:
        return [tensor]
    if not bool(tensor.isfinite().all()):
        raise LoadError(f"{entry.stored.file}: tensor {entry.stored.name!r} holds NaN or inf")
    if entry.spec is not None:
        return stored_codes(round_weight(tensor.float(), None, entry.spec))
    return tensors_of(transformed(tensor) if entry.hadamard else tensor, entry.format, dtype)


def _header(shard: Shard) -> bytes:
    return file_header(
        (_full_name(entry, part), part.dtype, part.shape)
        for entry in shard.entries
        for part in entry.parts
    )


def _full_name(entry: OutputTensor, part: StoredPart) -> str:
    return f"{entry.name}.{part.name}" if part.name else entry.name


def _copy_others(source: Path, folder: Path) -> None:
    """Copy tokenizer, templates and licence: all files except weights, config and hidden files; and
    how an embedding is pooled, or a pair scored."""
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in WEIGHT_SUFFIXES or path.name == INDEX_NAME
        if path.is_file() and not is_weights and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
    for path in (*source.glob("*_Pooling/config.json"), *source.glob("*_LogitScore/config.json")):
        (folder / path.parent.name).mkdir()
        shutil.copyfile(path, folder / path.parent.name / path.name)


def _write_config(plan: QuantizePlan, folder: Path) -> None:
    config = {**_text_config(plan.source), **plan.stated}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _text_config(source: Path) -> dict[str, Any]:
    """What config.json says; of a model of several parts, as that of its language model, which is
    all that is written."""
    stated = read_json(source / "config.json")
    text = text_of(stated)
    if text is stated:
        return stated
    whole: dict[str, Any] = {key: stated[key] for key in ("dtype", "eos_token_id") if key in stated}
    return {**text, **whole, "architectures": [family_of(stated).architecture]}


def _write_index(plan: QuantizePlan, folder: Path) -> None:
    weight_map = {
        _full_name(entry, part): shard.file
        for shard in plan.shards
        for entry in shard.entries
        for part in entry.parts
    }
    index = {"metadata": {"total_size": plan.num_bytes}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
