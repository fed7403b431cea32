"""Models quantised at load: the naive model with the same codes, however a batch is cut; the tool.

The oracle is transformers' model in fp32 whose linear layers multiply dequantised weights, and for
int8 and fp8 activations that were rounded in groups and rows; each expert sees every token.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.deployments.cli.main import main
from penstock.kernels.matmul import linear
from penstock.kernels.quant import INT8_GROUP, dequantize_weight, quantize_weight
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import Mlp
from penstock.workers.models.loader import load_model
from penstock.workers.models.moe import MoeMlp
from penstock.workers.pooling.pooling import MEAN, Pooling, read_pooling
from penstock.workers.quantization import QUANTIZED_FORMATS, Int4Options, QuantizedFormat
from penstock.workers.request import Request, SamplingParams
from penstock.workers.weights.grids import GridSpec, round_weight
from penstock.workers.weights.int4_layout import spec_for
from penstock.workers.weights.quantize import plan_quantize, write_quantized
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import ALL, make_checkpoint, random_model, random_prompt

NUM_NEW = 12
NEAR_TIE = 1e-3  # of two logits
LINEARS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj",
           "gate_up_proj", "down_proj", "in_proj_qkv", "in_proj_z", "out_proj")  # fmt: skip
# One a placement of norms, scale, activation and layout.
DENSE = ("granite", "smollm3", "seed_oss-out-bias", "ministral3", "phi3", "olmo2", "olmo3", "glm4",
         "gemma2", "gemma3_text")  # fmt: skip
CASES = [(name, f) for name in ("llama", "mixtral") for f in QUANTIZED_FORMATS] + [
    ("qwen2", "int8"),
    *((n, f) for n in ("qwen2_moe", "qwen3_5_text", "qwen3_5_moe_text") for f in ("int8", "int4")),
    *((name, f) for name in DENSE for f in ("int8", "int4")),
    *((name, f) for name in ("olmo2", "glm4", "gemma2", "phi3") for f in ("nf4", "fp8")),
]


@functools.cache
def decoder_of(name: str, weights: str, int8_group: int | None = INT8_GROUP) -> Decoder:
    folder = make_checkpoint(name)
    return load_model(folder, weights=weights, int8_group=int8_group, progress=False)


def greedy(model: Decoder, prompts: list[list[int]], **settings) -> list[list[int]]:
    """What the engine answers to prompts that come at once."""
    engine = Engine(
        EngineConfig(num_blocks=64, block_size=4, prefix_cache=False, **settings), model
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    requests = [Request(f"r{i}", tuple(prompt), params) for i, prompt in enumerate(prompts)]
    return [ids_of(deltas) for deltas in answers(engine, requests).values()]


OF_FILE = 0


def turned(x: Tensor) -> Tensor:
    """Each whole block of 64 times Sylvester's matrix over 8, sums of neighbours first."""
    blocks, place = list(x.split(64, dim=-1)), torch.arange(64)
    for i, block in enumerate(blocks):
        if block.shape[-1] == 64:
            for bit in (1, 2, 4, 8, 16, 32):
                first, second = block[..., place & ~bit], block[..., place | bit]
                block = torch.where(place & bit != 0, first - second, first + second)
            blocks[i] = block / 8
    return torch.cat(blocks, dim=-1)


def is_turned(format: str, stored: bool) -> bool:
    """Weights that are rounded at load, where their activations are rounded to int8."""
    return format in ("int8", "int4") and not stored


def rounded_rows(
    x: Tensor, format: str, group: int | None = INT8_GROUP, stored: bool = False
) -> Tensor:
    """Each row, or of int8 each group, on the grid of its own scale, where the format rounds
    activations. `group` OF_FILE: 32 as the weights' group, or 64 where a row is one group."""
    if is_turned(format, stored):
        x = turned(x)
    if group == OF_FILE:
        group = 32 if x.shape[-1] % 32 == 0 else 64
    if format in ("int8", "int4"):
        parts = x.split(group or x.shape[-1], dim=-1)
        return torch.cat([on_grid(part, 127.0).round() * grid(part, 127.0) for part in parts], -1)
    if format == "fp8":
        return on_grid(x, 448.0).to(torch.float8_e4m3fn).float() * grid(x, 448.0)
    return x


def grid(x: Tensor, top: float) -> Tensor:
    return (x.abs().amax(-1, keepdim=True) / top).clamp(min=1e-7)


def on_grid(x: Tensor, top: float) -> Tensor:
    return (x / grid(x, top)).clamp(-top, top)


def rounded_weight(weight: Tensor, format: QuantizedFormat, stored: bool) -> Tensor:
    """As it is rounded at load, for turned rows where those are; or `stored` by the tool: int4 is
    another there."""
    if is_turned(format, stored):
        weight = turned(weight)
    if format == "int4" and stored:
        spec = spec_for(weight.shape[1], 32, "zero-points", "float32")
        assert spec is not None
        return round_weight(weight, None, spec).values()
    return dequantize_weight(quantize_weight(weight, format))


class NaiveExperts(torch.nn.Module):
    """A layer's routed experts: all of them for all tokens, weighted by the router's choice."""

    def __init__(
        self,
        block,
        top_k: int,
        format: QuantizedFormat,
        norm: bool,
        group: int | None,
        stored: bool,
    ):
        super().__init__()
        self.block, self.top_k, self.format, self.norm = block, top_k, format, norm
        self.group, self.stored = group, stored
        self.gate_ups = [rounded_weight(w, format, stored) for w in block.experts.gate_up_proj]
        self.downs = [rounded_weight(w, format, stored) for w in block.experts.down_proj]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        chances, ids = (rows @ self.block.gate.weight.T).softmax(-1).topk(self.top_k)
        if self.norm:
            chances = chances / chances.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        how = self.format, self.group, self.stored
        rounded = rounded_rows(rows, *how)
        for expert, (gate_up, down) in enumerate(zip(self.gate_ups, self.downs)):
            gate, up = (rounded @ gate_up.T).chunk(2, dim=1)
            inner = rounded_rows(torch.nn.functional.silu(gate) * up, *how)
            share = torch.where(ids == expert, chances, 0.0).sum(1, keepdim=True)
            out += share * (inner @ down.T)
        if hasattr(self.block, "shared_expert"):
            shared = torch.sigmoid(self.block.shared_expert_gate(rows))
            out += shared * self.block.shared_expert(rows)
        return out.view(x.shape)


@functools.cache
@torch.inference_mode()
def oracle(
    name: str,
    format: QuantizedFormat,
    prompt: tuple[int, ...],
    group: int | None = INT8_GROUP,
    stored: bool = False,
) -> list[int]:
    """Greedy ids of the naive model, the whole sequence computed anew for each.

    A near tie is decided by the last bit before an activation is rounded, and so by the processor:
    such a prompt tests nothing.
    """
    model = random_model(*ALL[name])
    facts = model.config
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and path.split(".")[-1] in LINEARS:
            module.weight.copy_(rounded_weight(module.weight, format, stored))
            module.register_forward_pre_hook(
                lambda _, given: (rounded_rows(given[0], format, group, stored),)
            )
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            norm = name == "mixtral" or getattr(facts, "norm_topk_prob", True)
            layer.mlp = NaiveExperts(
                layer.mlp, facts.num_experts_per_tok, format, norm, group, stored
            )
    ids = list(prompt)
    for _ in range(NUM_NEW):
        best, following = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        assert best[0] - best[1] > NEAR_TIE, f"take another prompt: {best} at {len(ids)}"
        ids.append(int(following[0]))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("name", "format"), CASES)
def test_ids_are_the_naive_models_however_the_batch_is_cut(name: str, format: QuantizedFormat):
    model = decoder_of(name, format)
    assert model.weights.format == format
    prompt = random_prompt(20)
    expected = oracle(name, format, tuple(prompt))
    assert len(set(expected)) > 4, "a test on constant ids would show little"
    for chunk in (1, 7, 64):
        alone = greedy(model, [prompt], max_num_seqs=1, max_num_batched_tokens=chunk)
        assert alone == [expected], chunk
    others = [random_prompt(length, seed=3) for length in (5, 21, 13)]
    together = greedy(
        model, [others[0], prompt, *others[1:]], max_num_seqs=4, max_num_batched_tokens=16
    )
    assert together[1] == expected


@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("name", ["llama", "qwen2_moe"])
def test_other_groups_of_int8_activations(name: str, group: int | None):
    prompt = random_prompt(19)
    model = decoder_of(name, "int8", group)
    assert model.layers[0].attention.row_form == (group, True)
    expected = oracle(name, "int8", tuple(prompt), group)
    assert greedy(model, [prompt], max_num_seqs=1, max_num_batched_tokens=7) == [expected]
    if name == "llama":
        assert expected != oracle(name, "int8", tuple(prompt)), "a group that makes no difference"


def test_formats_give_different_models():
    prompt = random_prompt(19)
    found = {f: oracle("llama", f, tuple(prompt)) for f in QUANTIZED_FORMATS}
    plain = greedy(decoder_of("llama", "fp32"), [prompt])[0]
    assert sum(ids != plain for ids in found.values()) >= 2


def test_what_is_quantised_and_what_is_not():
    model = decoder_of("mixtral", "int4")
    layer = model.layers[0]
    assert layer.attention.qkv.format == layer.attention.o.format == "int4"
    assert isinstance(layer.mlp, MoeMlp) and isinstance(layer.mlp.experts, Sequence)
    assert {p.format for pair in layer.mlp.experts for p in pair} == {"int4"}
    assert layer.mlp.router.format == model.lm_head.format == "fp32"
    careful = load_model(make_checkpoint("llama"), weights="int8", quantize_o=False, progress=False)
    assert careful.layers[0].attention.o.format == "fp32"
    assert careful.layers[0].attention.row_form and isinstance(careful.layers[0].mlp, Mlp)


@pytest.mark.parametrize(
    ("format", "expected"), [("int8", "int8"), ("int4", "int8"), ("nf4", "nf4"), ("fp8", "fp8")]
)
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_the_head_has_a_switch_and_never_the_embedding(name: str, format: str, expected: str):
    model = load_model(make_checkpoint(name), weights=format, quantize_lm_head=True, progress=False)
    assert model.lm_head.format == expected and model.weights.format == format
    assert model.embedding.dtype == torch.float32
    assert greedy(model, [random_prompt(9)]) != [[0] * NUM_NEW]


def test_bytes_are_counted_by_format():
    model, config = (
        decoder_of("llama", "int8"),
        ModelConfig.from_pretrained(make_checkpoint("llama")),
    )
    d, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows, weights = q + 2 * kv + d + 2 * inner + d, d * (q + 2 * kv + q) + 3 * d * inner
    assert model.weights.bytes_of["int8"] == config.num_layers * (weights + 4 * rows)
    norms = (2 * config.num_layers + 1) * d
    assert model.weights.bytes_of["fp32"] == 4 * (2 * config.vocab_size * d + norms)
    assert "int8" in str(model.weights)


def test_bf16_activations_stay_bf16(tmp_path: Path):
    folder = bf16_copy(make_checkpoint("llama"), tmp_path / "bf16")
    model = load_model(folder, weights="int8", progress=False)
    assert model.dtype == torch.bfloat16 and model.weights.format == "int8"
    assert len(greedy(model, [random_prompt(9)])[0]) == NUM_NEW


def bf16_copy(source: Path, folder: Path) -> Path:
    folder.mkdir()
    tensors = {k: v.bfloat16() for k, v in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return folder


class TestTool:
    """`penstock quantize`."""

    @pytest.mark.parametrize(
        ("name", "format"),
        [
            *(("llama", f) for f in QUANTIZED_FORMATS),
            *(
                ("mixtral", "int4"),
                ("qwen2_moe", "int8"),
                ("phi3", "int8"),
                ("phi3-longrope", "int4"),
            ),
            *(("glm4", "int8"), ("glm4", "fp8"), ("gemma2", "int4"), ("olmo2", "int8")),
        ],
    )
    def test_a_written_checkpoint_is_the_model_quantised_at_load(
        self, name: str, format: QuantizedFormat, tmp_path: Path
    ):
        source, out = make_checkpoint(name), tmp_path / "out"
        plan = plan_quantize(source, format, quantize_o=True, quantize_lm_head=False)
        seen: list[int] = []
        write_quantized(plan, out, seen.append)
        assert sum(seen) == plan.num_source_bytes
        model = load_model(out, int4=Int4Options(activations="int8"), progress=False)
        assert model.weights.format == format
        prompt = random_prompt(19, 1)
        if format == "nf4":  # its blocks run on over the ends of rows
            assert len(greedy(model, [prompt])[0]) == NUM_NEW
        else:
            group = OF_FILE if format == "int4" else INT8_GROUP
            expected = oracle(name, format, tuple(prompt), group, stored=True)
            assert greedy(model, [prompt]) == [expected]

    @pytest.mark.parametrize("format", QUANTIZED_FORMATS)
    def test_bytes_are_those_that_the_layouts_prescribe(
        self, format: QuantizedFormat, tmp_path: Path
    ):
        """Decoded by hand, word by word, from the published descriptions."""
        source, out = make_checkpoint("llama"), tmp_path / "out"
        plan = plan_quantize(source, format, quantize_o=False, quantize_lm_head=True)
        write_quantized(plan, out, lambda _: None)
        tensors, plain = (
            load_file(out / "model.safetensors"),
            load_file(source / "model.safetensors"),
        )
        down = "model.layers.2.mlp.down_proj"  # 112 columns: no whole group of 128, nor of 64
        decoded = by_hand(tensors, down, format, plain[f"{down}.weight"].shape)
        error = (decoded - plain[f"{down}.weight"]).abs()
        largest = plain[f"{down}.weight"].abs().max()
        steps = {"int8": 1 / 254, "fp8": 1 / 16, "int4": 1 / 10, "nf4": 0.16}
        assert error.max() <= steps[format] * largest
        o_proj = "model.layers.0.self_attn.o_proj"
        assert torch.equal(tensors[f"{o_proj}.weight"], plain[f"{o_proj}.weight"])
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        ignored = config.get("ignore", config.get("llm_int8_skip_modules"))
        assert o_proj in ignored and "lm_head" not in ignored
        assert "lm_head.weight" not in tensors or tensors["lm_head.weight"].dtype != torch.float32

    def test_int4_groups_are_whole_ones_or_there_are_none(self, tmp_path: Path):
        """Others refuse a short last group: rows of 192 get groups of 64, of 136 stay plain."""
        settings = {**ALL["llama"][1], "num_hidden_layers": 1}
        for inner, group in ((192, 64), (160, 32), (96, 32), (136, None)):
            source, out = tmp_path / f"source{inner}", tmp_path / f"out{inner}"
            random_model("llama", {**settings, "intermediate_size": inner}).save_pretrained(source)
            plan = plan_quantize(
                source, "int4", quantize_o=True, quantize_lm_head=False, group=64, grid="symmetric"
            )
            write_quantized(plan, out, lambda _: None)
            mlp = load_model(out, progress=False).layers[0].mlp
            assert isinstance(mlp, Mlp)
            assert mlp.down.format == ("fp32" if group is None else "int4")
            tensors, name = load_file(out / "model.safetensors"), "model.layers.0.mlp.down_proj"
            assert group is None or tensors[f"{name}.weight_scale"].shape == (64, inner // group)
            plain = load_file(source / "model.safetensors")[f"{name}.weight"]
            opened = load_model(out, weights="fp32", progress=False).layers[0].mlp
            assert isinstance(opened, Mlp)
            x = torch.eye(inner)
            expected = plain if group is None else in_groups(plain, group)
            torch.testing.assert_close(linear(x, opened.down).T, expected, atol=1e-6, rtol=1e-5)

    def test_shards_stay_shards_and_other_files_come_along(self, tmp_path: Path):
        source, out = tmp_path / "source", tmp_path / "out"
        random_model(*ALL["llama"]).save_pretrained(source, max_shard_size="60KB")
        (source / "tokenizer.json").write_text("{}")
        (source / "pytorch_model.bin").write_bytes(b"no")
        (source / "1_Pooling").mkdir()
        (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
        (source / "modules.json").write_text(
            '[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]'
        )
        plan = plan_quantize(source, "int8", quantize_o=True, quantize_lm_head=False)
        write_quantized(plan, out, lambda _: None)
        assert {p.name for p in out.glob("*.safetensors")} == {
            p.name for p in source.glob("*.safetensors")
        }
        assert (out / "tokenizer.json").exists() and not (out / "pytorch_model.bin").exists()
        assert read_pooling(out, "auto") == Pooling(MEAN)
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == plan.num_bytes
        prompt = random_prompt(19)
        expected = [oracle("llama", "int8", tuple(prompt), stored=True)]
        assert greedy(load_model(out, progress=False), [prompt]) == expected

    def test_it_refuses_to_overwrite_and_to_quantise_twice(self, tmp_path: Path, capsys):
        source, out = str(make_checkpoint("llama")), tmp_path / "out"
        assert main(["quantize", source, "--to", "fp8", "--out", str(out), "--no-progress"]) == 0
        assert "penstock serve" in capsys.readouterr().out
        before = sorted((p.name, p.stat().st_mtime_ns) for p in out.iterdir())
        assert main(["quantize", source, "--to", "fp8", "--out", str(out)]) == 2
        assert "exists already" in capsys.readouterr().err
        assert sorted((p.name, p.stat().st_mtime_ns) for p in out.iterdir()) == before
        again = str(tmp_path / "again")
        assert main(["quantize", str(out), "--to", "int4", "--out", again]) == 2
        assert "already quantised (fp8)" in capsys.readouterr().err
        assert [p.name for p in tmp_path.iterdir()] == ["out"]

    def test_a_failure_leaves_nothing_behind(self, tmp_path: Path):
        source = bf16_copy(make_checkpoint("llama"), tmp_path / "source")
        tensors = load_file(source / "model.safetensors")
        tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = float("nan")
        save_file(tensors, source / "model.safetensors")
        plan = plan_quantize(source, "int4", quantize_o=True, quantize_lm_head=False)
        with pytest.raises(RuntimeError, match=r"up_proj.*NaN"):
            write_quantized(plan, tmp_path / "out", lambda _: None)
        assert [p.name for p in tmp_path.iterdir()] == ["source"]

    def test_a_tied_head_cannot_be_written_quantised(self):
        with pytest.raises(ConfigError, match=r"shares its table.*--quantize-lm-head"):
            plan_quantize(
                make_checkpoint("llama-tied"), "int8", quantize_o=True, quantize_lm_head=True
            )


def in_groups(weight: Tensor, group: int) -> Tensor:
    return round_weight(weight, None, GridSpec(group, "symmetric", torch.float16)).values()


def by_hand(tensors: dict[str, Tensor], module: str, format: str, shape) -> Tensor:
    """The weight that the bytes mean, in plain loops."""
    num_rows, width = shape
    if format in ("int8", "fp8"):
        return tensors[f"{module}.weight"].float() * tensors[f"{module}.weight_scale"]
    if format == "int4":
        assert tensors[f"{module}.weight_shape"].tolist() == [num_rows, width]
        scales = tensors[f"{module}.weight_scale"]
        zeros = tensors[f"{module}.weight_zero_point"].tolist()
        rows = []
        for n, words in enumerate(tensors[f"{module}.weight_packed"].tolist()):
            codes = [((word & 0xFFFFFFFF) >> (4 * i)) & 15 for word in words for i in range(8)]
            assert scales.shape[1] == 1  # a row is one group
            zero = ((zeros[n // 8][0] & 0xFFFFFFFF) >> (4 * (n % 8))) & 15
            rows.append([(codes[k] - zero) * scales[n, 0].item() for k in range(width)])
        return torch.tensor(rows)
    table = tensors[f"{module}.weight.quant_map"].tolist()
    absmax = tensors[f"{module}.weight.absmax"].tolist()
    state = json.loads(bytes(tensors[f"{module}.weight.quant_state.bitsandbytes__nf4"].tolist()))
    assert state["shape"] == [num_rows, width] and state["blocksize"] == 64
    halves = [h for b in tensors[f"{module}.weight"].flatten().tolist() for h in (b >> 4, b & 15)]
    flat = [table[code] * absmax[i // 64] for i, code in enumerate(halves)]
    return torch.tensor(flat).view(num_rows, width)
