"""Published quantised checkpoints: each layout gives the ids of the weights that it encodes.

The packers here follow the formats' public documentation, word by word and without a line of the
code under test; the oracle is transformers' own model over the dequantised weights, in fp32.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.deployments.config import config_from
from penstock.deployments.preflight import check_before_start
from penstock.kernels.quant import NF4_VALUES
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.model_config import ModelConfig, read_limits
from penstock.workers.models.layers import Mlp
from penstock.workers.models.loader import load_model
from penstock.workers.planning.hardware import DEVICES
from penstock.workers.planning.kept import stored_cost
from penstock.workers.planning.roofline import Roofline
from tests.workers.checkpoints import ALL, make_checkpoint, random_model, random_prompt
from tests.workers.models.test_decoder import PagedDecoder

GROUP = 32
NUM_NEW = 24
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = ("w1", "w2", "w3")


def words_of(nibbles: list[int]) -> list[int]:
    """Eight codes a word of 32 bits, the first in the lowest four; as signed numbers."""
    words = []
    for i in range(0, len(nibbles), 8):
        word = sum(code << (4 * place) for place, code in enumerate(nibbles[i : i + 8]))
        words.append(word - 2**32 if word >= 2**31 else word)
    return words


def packed_rows(codes: Tensor) -> Tensor:
    return torch.tensor([words_of(row) for row in codes.tolist()], dtype=torch.int32)


def rounded(weight: Tensor, group: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes 0-15 [N, K], scales and zero points [N, G] (zeros 1-14), and the weight they mean."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, width = weight.shape
    num_groups = -(-width // group)
    zeros = torch.randint(5, 12, (num_rows, num_groups), generator=generator)
    padded = torch.nn.functional.pad(weight, (0, num_groups * group - width))
    scales = (padded.view(num_rows, num_groups, group).abs().amax(-1) / 6).half().float()
    column = torch.arange(width) // group
    codes = (weight / scales[:, column] + zeros[:, column]).round().clamp(0, 15).long()
    return codes, scales, zeros, (codes - zeros[:, column]) * scales[:, column]


def as_awq(weight: Tensor, seed: int, group: int = GROUP) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, means = rounded(weight, group, seed)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def shuffled(rows: Tensor) -> Tensor:
        return rows.reshape(rows.shape[0], -1, 8)[:, :, order].reshape(rows.shape)

    return {
        "qweight": packed_rows(shuffled(codes.T)),
        "qzeros": packed_rows(shuffled(zeros.T)),
        "scales": scales.T.contiguous().half(),
    }, means


def as_gptq(weight: Tensor, seed: int, group: int = GROUP) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, means = rounded(weight, group, seed)
    return {
        "qweight": packed_rows(codes).T.contiguous(),
        "qzeros": packed_rows((zeros - 1).T),
        "scales": scales.T.contiguous().half(),
        "g_idx": (torch.arange(weight.shape[1]) // group).int(),
    }, means


def shuffled_groups(width: int, group: int) -> Tensor:
    """The group of each input, as act-order gives them: the same for all matrices of a width."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
    return (torch.arange(width) // group)[order]


def as_act_order(weight: Tensor, seed: int, bits: int = 4) -> tuple[dict[str, Tensor], Tensor]:
    """Input k has the scale and the zero point of group g_idx[k], in as many bits."""
    groups = shuffled_groups(weight.shape[1], GROUP)
    order = groups.argsort(stable=True)
    pack = as_gptq if bits == 4 else as_eight_bit_gptq
    tensors, means = pack(weight[:, order], seed)
    back = order.argsort()
    words = tensors["qweight"].T.contiguous().view(torch.uint8)
    if bits == 4:
        codes = torch.stack((words & 15, words >> 4), 2).flatten(1)[:, back]
        tensors["qweight"] = packed_rows(codes.long()).T.contiguous()
    else:
        tensors["qweight"] = words[:, back].contiguous().view(torch.int32).T.contiguous()
    return {**tensors, "g_idx": groups.int()}, means[:, back]


def as_eight_bit_gptq(weight: Tensor, seed: int, symmetric: bool = False):
    """Four codes a word, the first in the lowest byte; zero points one less than they mean."""
    num_rows, width = weight.shape
    column, num_groups = torch.arange(width) // GROUP, -(-width // GROUP)
    zeros = torch.full((num_rows, num_groups), 128)
    if not symmetric:
        made = torch.Generator().manual_seed(seed)
        zeros = torch.randint(100, 150, (num_rows, num_groups), generator=made)
    padded = torch.nn.functional.pad(weight, (0, -width % GROUP)).view(num_rows, -1, GROUP)
    scales = (padded.abs().amax(-1) / 100).half().float()
    codes = (weight / scales[:, column] + zeros[:, column]).round().clamp(0, 255).long()

    def words(rows: Tensor) -> Tensor:
        return rows.to(torch.uint8).contiguous().view(torch.int32)

    return {
        "qweight": words(codes).T.contiguous(),
        "qzeros": words((zeros - 1).T),
        "scales": scales.T.contiguous().half(),
        "g_idx": column.int(),
    }, (codes - zeros[:, column]) * scales[:, column]


def as_fp8_blocks(weight: Tensor, seed: int, block: tuple[int, int] = (24, 32)):
    """DeepSeek V3's: a scale for each block, which multiplies although it is called inverse."""
    (num_rows, width), (high, wide) = weight.shape, block
    shape = -(-num_rows // high), -(-width // wide)
    padded = torch.nn.functional.pad(weight, (0, -width % wide, 0, -num_rows % high))
    largest = padded.view(shape[0], high, shape[1], wide).abs().amax((1, 3))
    scales = largest / 448
    all_scales = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:num_rows, :width]
    codes = (weight / all_scales).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * all_scales


def as_symmetric_gptq(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """As GPTQModel and AutoGPTQ store symmetric weights: zero points 8, stored as 7."""
    codes, scales, _, _ = rounded(weight, GROUP, seed)
    tensors, _ = as_gptq(weight, seed)
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], 0x77777777)
    column = torch.arange(weight.shape[1]) // GROUP
    return tensors, (codes - 8) * scales[:, column]


def as_llm_compressor(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Asymmetric groups with scales in the model's 16 bits."""
    codes, scales, zeros, _ = rounded(weight, GROUP, seed)
    tensors, _ = as_packed(weight, seed, symmetric=False)
    tensors["weight_scale"] = scales.bfloat16()
    column = torch.arange(weight.shape[1]) // GROUP
    return tensors, (codes - zeros[:, column]) * scales.bfloat16().float()[:, column]


def as_packed(weight: Tensor, seed: int, symmetric: bool = True) -> tuple[dict, Tensor]:
    codes, scales, zeros, means = rounded(weight, GROUP, seed)
    tensors = {
        "weight_packed": packed_rows(codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if symmetric:
        column = torch.arange(weight.shape[1]) // GROUP
        return tensors, (codes - 8) * scales[:, column]
    return {**tensors, "weight_zero_point": packed_rows(zeros.T).T.contiguous()}, means


def as_int8(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def as_fp8(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    scale = (weight.abs().max() / 448).reshape(1)  # of the whole tensor
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def as_nf4(weight: Tensor, seed: int, nested: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """bitsandbytes: blocks of 64 of the flat weight, the first code of a byte in its high half."""
    flat, table = weight.flatten(), torch.tensor(NF4_VALUES)
    block = torch.arange(flat.numel()) // 64
    absmax = torch.stack([part.abs().max() for part in flat.split(64)])
    tensors = {"weight.quant_map": table}
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [*weight.shape]}
    if nested:
        code256 = torch.linspace(-1, 1, 256)
        offset = float(absmax.mean())
        outer = torch.stack([part.abs().max() for part in (absmax - offset).split(256)])
        at = torch.arange(absmax.numel()) // 256
        inner = ((absmax - offset) / outer[at]).sub(code256[:, None]).abs().argmin(0)
        absmax = code256[inner] * outer[at] + offset
        tensors |= {
            "weight.absmax": inner.to(torch.uint8),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": code256,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        tensors["weight.absmax"] = absmax
    codes = (flat / absmax[block])[:, None].sub(table).abs().argmin(1).tolist()
    pairs = [(high << 4) | low for high, low in zip(codes[0::2], codes[1::2])]
    text = json.dumps(state).encode()
    tensors["weight"] = torch.tensor(pairs, dtype=torch.uint8)[:, None]
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors, (table[torch.tensor(codes)] * absmax[block]).view(weight.shape)


def ct_config(bits: int, kind: str = "int", **weights) -> dict:
    """A compressed-tensors configuration of one group."""
    symmetric = weights.pop("symmetric", True)
    inputs = {"num_bits": bits, "type": kind, "strategy": "token", "dynamic": True,
              "symmetric": True}  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": bits, "type": kind, "symmetric": symmetric,
                            "strategy": "channel", **weights},
                "input_activations": None if bits == 4 else inputs,
            }
        },
        "ignore": ["lm_head", "re:.*layers.1.*up_proj"],
    }  # fmt: skip


GROUPED: dict[str, Any] = {"strategy": "group", "group_size": GROUP}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
# What GPTQModel adds to its own quantize_config, and llm-compressor to a recipe's scheme.
GPTQMODEL = {
    **GPTQ, "sym": True, "checkpoint_format": "gptq", "pack_dtype": "int32", "lm_head": False,
    "desc_act": True, "static_groups": True, "act_group_aware": False, "format": "gptq",
    "method": "gptq", "meta": {"quantizer": ["gptqmodel:5.0.0"], "damp_percent": 0.05,
                               "mse": 0.0, "true_sequential": True, "uri": "https://x.example"},
}  # fmt: skip
LLM_COMPRESSOR: dict[str, Any] = {
    "symmetric": False, "actorder": "static", "observer": "minmax", "observer_kwargs": {},
    "block_structure": None, "dynamic": False, "scale_dtype": None, "zp_dtype": "torch.int8",
}  # fmt: skip
ACT_ORDER = {**GPTQ, "desc_act": True}
FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [24, 32],
}  # fmt: skip
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
Packer = Callable[[Tensor, int], tuple[dict[str, Tensor], Tensor]]
LAYOUTS: dict[str, tuple[Packer, dict]] = {
    "awq": (as_awq, {**AWQ, "modules_to_not_convert": ["layers.1.mlp.up_proj"]}),
    "gptq": (as_gptq, GPTQ),
    "gptqmodel": (as_symmetric_gptq, GPTQMODEL),
    "gptq-act-order": (as_act_order, ACT_ORDER),
    "gptq-8": (as_eight_bit_gptq, {**GPTQ, "bits": 8}),
    "gptq-8-symmetric": (
        functools.partial(as_eight_bit_gptq, symmetric=True),
        {**GPTQ, "bits": 8, "sym": True},
    ),
    "gptq-8-act-order": (
        functools.partial(as_act_order, bits=8),
        {**ACT_ORDER, "bits": 8, "static_groups": False},
    ),
    "fp8-blocks": (
        as_fp8_blocks,
        {**FP8, "modules_to_not_convert": ["model.layers.1.mlp.up_proj"]},
    ),
    "fp8-blocks-128": (
        functools.partial(as_fp8_blocks, block=(128, 128)),
        {**FP8, "weight_block_size": [128, 128], "ignored_layers": ["layers.1.mlp.up_proj"]},
    ),
    "llm-compressor": (
        as_llm_compressor,
        {
            **ct_config(4, **{**GROUPED, **LLM_COMPRESSOR}),
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "version": "0.12.2",
            "sparsity_config": {},
            "transform_config": {},
            "global_compression_ratio": None,
        },
    ),
    "packed": (as_packed, ct_config(4, **GROUPED)),
    "packed-asymmetric": (
        functools.partial(as_packed, symmetric=False),
        ct_config(4, symmetric=False, **GROUPED),
    ),
    "int8": (as_int8, ct_config(8)),
    "fp8": (as_fp8, ct_config(8, "float", strategy="tensor")),
    "nf4": (as_nf4, {**BNB, "llm_int8_skip_modules": ["lm_head"]}),
    "nf4-nested": (functools.partial(as_nf4, nested=True), BNB),
}


def quantized_copy(folder: Path, source: Path, layout: str) -> dict[str, Tensor]:
    """Write `source` to `folder` in the layout -> its tensors as plain fp32 weights."""
    pack, config = LAYOUTS[layout]
    tensors, plain = {}, {}
    for i, (name, tensor) in enumerate(sorted(load_file(source / "model.safetensors").items())):
        module = name.removesuffix(".weight")
        plain[name] = tensor
        if module.split(".")[-1] not in (*LINEARS, *EXPERTS) or "layers.1.mlp.up_proj" in name:
            tensors[name] = tensor
            continue
        parts, plain[name] = pack(tensor, i)
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((source / "config.json").read_text())
    settings["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(settings))
    return plain


@torch.inference_mode()
def oracle_ids(name: str, plain: dict[str, Tensor], prompt: list[int]) -> list[int]:
    """transformers' greedy ids over these weights; plain loops, no cache."""
    model = random_model(*ALL[name])
    model.load_state_dict(plain_of(model, plain))
    ids = list(prompt)
    for _ in range(NUM_NEW):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def plain_of(model, plain: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as transformers' modules have them: there the experts of a layer are one tensor."""
    found = {key: value for key, value in plain.items() if ".experts." not in key}
    found = {key.replace("block_sparse_moe", "mlp"): value for key, value in found.items()}
    for key in model.state_dict():
        if key.endswith("experts.gate_up_proj"):
            block, (gate, up, down) = key.split(".experts.")[0], EXPERTS[:1] + EXPERTS[2:0:-1]
            if f"{block}.experts.0.gate_proj.weight" in plain:
                gate, up, down = LINEARS[4:]
            else:
                block = block.replace("mlp", "block_sparse_moe")
            experts = [f"{block}.experts.{e}" for e in range(len(model.state_dict()[key]))]
            found[key] = torch.stack(
                [torch.cat([plain[f"{e}.{p}.weight"] for p in (gate, up)]) for e in experts]
            )
            found[key.replace("gate_up_proj", "down_proj")] = torch.stack(
                [plain[f"{e}.{down}.weight"] for e in experts]
            )
    return found


@pytest.mark.parametrize(
    ("layout", "name"),
    [(layout, "llama") for layout in LAYOUTS if layout not in ("int8", "fp8")]
    + [
        (layout, "mixtral")
        for layout in ("packed-asymmetric", "gptq-act-order", "gptq-8-act-order", "fp8-blocks")
    ]
    # MiniMax M2 and GLM-4.5 as they are published.
    + [(layout, name) for layout in ("fp8-blocks", "gptq") for name in ("minimax_m2", "glm4_moe")],
)
def test_ids_are_those_of_the_weights_that_are_stored(layout: str, name: str, tmp_path: Path):
    """Weight-only formats: transformers' model with the same weights is the oracle."""
    folder = tmp_path / layout
    plain = quantized_copy(folder, make_checkpoint(name), layout)
    prompt = random_prompt(11)
    expected = oracle_ids(name, plain, prompt)
    decoder = load_model(folder, progress=False)
    assert decoder.weights.format == format_of(layout)
    assert PagedDecoder(decoder).greedy(prompt, NUM_NEW) == expected
    assert len(set(expected)) > 5
    opened = load_model(folder, weights="fp32", progress=False)
    assert opened.weights.format == "fp32"
    assert PagedDecoder(opened).greedy(prompt, NUM_NEW) == expected


def format_of(layout: str) -> str:
    if layout.startswith("fp8-blocks"):
        return "fp8g"
    return "nf4" if "nf4" in layout else "int8g" if "gptq-8" in layout else "int4"


@pytest.mark.parametrize("layout", ["fp8-blocks", "gptq-act-order", "gptq-8-act-order"])
def test_weights_that_an_expert_cache_moves(layout: str, tmp_path: Path):
    """Ids and bits are those without a cache, with room for three of fifteen experts."""
    folder, prompt = tmp_path / layout, random_prompt(11)
    quantized_copy(folder, make_checkpoint("mixtral"), layout)
    whole = load_model(folder, progress=False)
    settings = ExpertSettings(num_slots=3, folder=str(tmp_path))
    cached = load_model(folder, progress=False, experts=settings)
    try:
        ids = PagedDecoder(cached).greedy(prompt, NUM_NEW)
        assert ids == PagedDecoder(whole).greedy(prompt, NUM_NEW)
        assert cached.routed is not None and cached.routed.stats().num_misses > 3
    finally:
        cached.close()


@pytest.mark.parametrize(
    ("layout", "name"),
    [(layout, "llama") for layout in ("awq", "fp8-blocks", "fp8-blocks-128", "int8", "fp8")]
    + [
        (layout, "mixtral")
        for layout in ("awq", "gptq", "gptq-8", "gptq-8-symmetric", "fp8-blocks", "fp8-blocks-128")
    ],
)
def test_memory_is_as_planned(layout: str, name: str, tmp_path: Path):
    """By config.json alone, where it names the modules that are plain."""
    quantized_copy(tmp_path / layout, make_checkpoint(name), layout)
    held = load_model(tmp_path / layout, progress=False).weights.num_bytes
    model = replace(ModelConfig.from_pretrained(tmp_path / layout), dtype="fp32")
    bound = Roofline(model, DEVICES["cpu"], "auto", stored=stored_cost(model))
    assert bound.weight_bytes == pytest.approx(held, rel=0.02)


def test_parts_whose_inputs_have_orders_of_their_own_become_plain(tmp_path: Path):
    plain = quantized_copy(tmp_path / "model", make_checkpoint("llama"), "gptq-act-order")
    file, part = tmp_path / "model" / "model.safetensors", "model.layers.0.self_attn.q_proj"
    tensors = load_file(file)
    tensors[f"{part}.g_idx"] = tensors[f"{part}.g_idx"].flip(0).contiguous()
    codes = tensors[f"{part}.qweight"].T.contiguous().view(torch.uint8)
    codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1).flip(1)
    tensors[f"{part}.qweight"] = packed_rows(codes.long()).T.contiguous()
    plain[f"{part}.weight"] = plain[f"{part}.weight"].flip(1).contiguous()
    save_file(tensors, file)
    decoder, prompt = load_model(tmp_path / "model", progress=False), random_prompt(11)
    assert decoder.layers[0].attention.qkv.format == "fp32"
    assert decoder.layers[1].attention.qkv.format == "int4"
    assert PagedDecoder(decoder).greedy(prompt, NUM_NEW) == oracle_ids("llama", plain, prompt)


@pytest.mark.parametrize("layout", ["int8", "fp8"])
def test_eight_bit_weights_are_those_that_are_stored(layout: str, tmp_path: Path):
    """Opened as fp32 they are the oracle's; ids with 8-bit activations: test_quantized.py."""
    folder = tmp_path / layout
    plain = quantized_copy(folder, make_checkpoint("llama"), layout)
    prompt = random_prompt(11)
    opened = load_model(folder, weights="fp32", progress=False)
    assert PagedDecoder(opened).greedy(prompt, NUM_NEW) == oracle_ids("llama", plain, prompt)
    decoder = load_model(folder, progress=False)
    assert decoder.weights.format == layout
    ignored = decoder.layers[1].mlp
    assert isinstance(ignored, Mlp)  # its up_proj is plain, hence what it is fused with too
    assert ignored.gate_up.format == "fp32" and ignored.down.format == layout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    quantized_copy(tmp_path / "model", make_checkpoint("llama"), "gptq")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({**GPTQ, "bits": 3}, "3 bits"),
        ({**FP8, "fmt": "e5m2"}, "e5m2"),
        ({**FP8, "weight_block_size": None}, "without blocks"),
        ({**FP8, "weight_block_size": [128, 7]}, r"blocks of \[128, 7\]"),
        ({**FP8, "weight_block_size": 128}, "unusable"),
        ({**AWQ, "version": "gemv"}, "gemv"),
        ({**BNB, "bnb_4bit_quant_type": "fp4"}, "fp4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8-bit"),
        (ct_config(8, strategy="group", group_size=128), "'group'"),
        (ct_config(8, symmetric=False), "asymmetric"),
        (ct_config(4, actorder="group", **GROUPED), "actorder"),
        ({"quant_method": "hqq"}, "'hqq' is not supported"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "many"}, "unusable"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "groups of 0"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_before_weights_are_read(
    folder: Path, config: dict, why: str
):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    with pytest.raises(ConfigError, match=rf"{why}.*") as refused:
        load_model(folder, progress=False)
    assert str(folder) in str(refused.value)
    with pytest.raises(ConfigError, match=why):
        read_limits(folder)  # which is all that a server looks at before it starts


def test_damage_names_the_module(folder: Path):
    file = folder / "model.safetensors"
    whole = load_file(file)
    q_proj = "model.layers.0.self_attn.q_proj"
    for name, value, why in (
        (f"{q_proj}.g_idx", whole[f"{q_proj}.g_idx"].clamp(max=0), "g_idx does not give"),
        (f"{q_proj}.qzeros", whole[f"{q_proj}.qzeros"][:, 1:].contiguous(), "qzeros has shape"),
        (f"{q_proj}.scales", None, "scales' is missing"),
    ):
        changed = {key: kept for key, kept in whole.items() if key != name}
        save_file(changed if value is None else {**changed, name: value}, file)
        with pytest.raises(LoadError, match=why) as refused:
            load_model(folder, progress=False)
        assert q_proj in str(refused.value)


def test_another_format_than_the_stored_one_is_refused(folder: Path):
    with pytest.raises(ConfigError, match=r"quantised as int4 already.*weights auto"):
        load_model(folder, weights="int8", progress=False)
    assert load_model(folder, weights="int4", progress=False).weights.format == "int4"


def test_fused_parts_keep_their_zero_points(tmp_path: Path):
    """Only q has zero points of its own: k and v get the symmetric one."""
    source = make_checkpoint("llama")
    plain = quantized_copy(tmp_path / "model", source, "packed-asymmetric")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for part in ("k_proj", "v_proj"):
        module = f"model.layers.0.self_attn.{part}"
        words = tensors[f"{module}.weight_zero_point"]
        tensors[f"{module}.weight_zero_point"] = torch.full_like(words, -0x77777778)  # all eights
        weight = load_file(source / "model.safetensors")[f"{module}.weight"]
        seed = sorted(load_file(source / "model.safetensors")).index(f"{module}.weight")
        _, plain[f"{module}.weight"] = as_packed(weight, seed)
    save_file(tensors, file)
    prompt = random_prompt(11)
    decoder = load_model(tmp_path / "model", progress=False)
    assert decoder.layers[0].attention.qkv.format == "int4"
    assert PagedDecoder(decoder).greedy(prompt, NUM_NEW) == oracle_ids("llama", plain, prompt)


def test_the_folder_of_a_copy_is_whole(tmp_path: Path):
    """The layout without config.json's word is not taken for quantised, and says what is wrong."""
    quantized_copy(tmp_path / "model", make_checkpoint("llama"), "packed")
    shutil.copyfile(make_checkpoint("llama") / "config.json", tmp_path / "model" / "config.json")
    with pytest.raises(LoadError, match=r"q_proj.weight' is missing"):
        load_model(tmp_path / "model", progress=False)


def test_serve_says_so_before_it_starts(folder: Path):
    config = config_from(
        {
            "model": str(folder),
            "weights": "int8",
        }
    )
    with pytest.raises(ConfigError, match="weights auto"):
        check_before_start(config)
