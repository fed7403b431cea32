"""The roofline's arithmetic against published figures, closed forms and real checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from safetensors import safe_open

from penstock.workers.errors import ConfigError
from penstock.workers.memory.arena import BLOCK_ALIGN_BYTES, BlockLayout
from penstock.workers.memory.kv_format import DTYPES
from penstock.workers.model_config import ModelConfig
from penstock.workers.planning import group as planned
from penstock.workers.planning.group import Group, Link
from penstock.workers.planning.hardware import ATTENTION, DEVICES, device_named
from penstock.workers.planning.parameters import count_parameters
from penstock.workers.planning.roofline import BLOCK_ALIGN_BYTES as ROOFLINE_ALIGN_BYTES
from penstock.workers.planning.roofline import Roofline, ridge_tokens
from penstock.workers.planning.shapes import SHAPES, shape_named
from penstock.workers.weights.hub import resolve_model

KIB, MIB = 2**10, 2**20


def roof(model, device="H200", weights="bf16", kv="bf16", **more):
    return Roofline(shape_named(model), device_named(device), weights, kv, **more)


@pytest.mark.parametrize("name", ["builtin", "builtin-moe"])
def test_parameters_are_those_of_a_checkpoint(name):
    folder = resolve_model(name)
    held = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            held += sum(math.prod(tensors.get_slice(k).get_shape()) for k in tensors.keys())  # noqa: SIM118
    assert count_parameters(ModelConfig.from_pretrained(folder)).total == held


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-2-7B", 6.738),
        ("Llama-2-70B", 68.977),
        ("Llama-3-8B", 8.030),
        ("Qwen2.5-0.5B", 0.494),
        ("Qwen2.5-7B", 7.616),
        ("Mixtral-8x7B", 46.703),
        ("Granite-3.1-1B-A400M", 1.3346),
        ("gpt-oss-20b", 20.9148),
        ("gpt-oss-120b", 116.829),
        ("GLM-4.5-Air", 106.852),
        ("MiniMax-M2", 228.690),
        ("Llama-3.1-8B", 8.030),
        ("Llama-3.1-70B", 70.554),
        ("Llama-3.2-1B", 1.236),
        ("Llama-3.2-3B", 3.213),
        ("SmolLM2-135M", 0.1345),
        ("SmolLM2-1.7B", 1.711),
        ("Mistral-7B", 7.248),
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-4B", 4.022),
        ("Qwen3-8B", 8.191),
        ("Qwen3-14B", 14.768),
        ("Qwen3-32B", 32.762),
        ("Qwen3-30B-A3B", 30.532),
    ],
)
def test_parameters_of_published_shapes(name, billions):
    assert count_parameters(SHAPES[name]).total / 1e9 == pytest.approx(billions, abs=6e-4)


def test_parameters_of_every_switch():
    """Each family's extras, counted by hand: Qwen2-MoE, Qwen3, OLMoE, and biases."""
    base = replace(
        SHAPES["Mixtral-8x7B"],
        num_layers=3,
        sliding_window=(None,) * 3,
        moe_layers=(False, True, True),
    )
    plain = count_parameters(base)
    shared = count_parameters(replace(base, shared_expert_intermediate_size=100))
    assert shared.linear - plain.linear == 2 * 3 * 4096 * 100
    assert shared.other - plain.other == 2 * 4096
    assert plain.routed == 2 * 8 * 3 * 4096 * 14336
    assert plain.linear == 3 * (4096 * 6144 + 4096 * 4096) + 3 * 4096 * 14336
    for change, per_layer in (
        ({"qk_norm": "head"}, 2 * 128),
        ({"qk_norm": "full"}, 4096 + 1024),
        ({"qkv_bias": True}, 6144),
        ({"o_bias": True}, 4096),
    ):
        assert count_parameters(replace(base, **change)).other - plain.other == 3 * per_layer
    with_bias = count_parameters(replace(base, mlp_bias=True))
    assert with_bias.other - plain.other == 2 * 14336 + 4096  # the one dense layer's


# Columns of research: nt; microseconds to read, to compute one token; r in per cent.
@pytest.mark.parametrize(
    ("device", "model", "weights", "kv", "nt", "read_us", "compute_us", "r_percent"),
    [
        ("H200", "Llama-2-7B", "bf16", "bf16", 206, 0.11, 13.1, 0.83),
        ("H200", "Llama-3-8B", "bf16", "int8", 206, 0.014, 14.1, 0.10),
        ("H200", "Qwen2.5-0.5B", "bf16", "bf16", 206, 0.0026, 0.72, 0.35),
        ("L4", "Llama-2-7B", "bf16", "bf16", 403, 1.75, 107, 1.6),
        ("L4", "Qwen2.5-0.5B", "bf16", "bf16", 403, 0.041, 5.9, 0.69),
        ("cpu", "Llama-2-7B", "fp32", "bf16", 25, 6.6, 13e3, 0.05),
        ("cpu", "Qwen2.5-0.5B", "fp32", "bf16", 25, 0.15, 0.7e3, 0.02),
    ],
)
def test_cached_or_computed_again(device, model, weights, kv, nt, read_us, compute_us, r_percent):
    bound = roof(model, device, weights, kv)
    assert round(bound.ridge_tokens) == nt
    assert two_digits(bound.read_s_per_token * 1e6, read_us)
    assert two_digits(bound.compute_s_per_token * 1e6, compute_us)
    assert two_digits(bound.pending_per_cached_token * 100, r_percent)
    tl_over_td = bound.read_s_per_token / bound.compute_s_per_token
    assert bound.pending_per_cached_token == pytest.approx(tl_over_td)


def two_digits(value, printed):
    """Whether `value` is printed so, in as many digits as `printed` has."""
    digits = len(f"{printed:g}".replace(".", "").lstrip("0")) if printed < 1000 else 2
    return float(f"{value:.{min(digits, 3)}g}") == pytest.approx(printed, rel=0.05)


@pytest.mark.parametrize(
    ("device", "share", "gigabytes"),
    [
        (
            "H200",
            0.5,
            {"Llama-2-7B": 20, "Llama-3-8B": 4.6, "Qwen2.5-7B": 2.2, "Qwen2.5-0.5B": 8.5},
        ),
        ("L4", 0.5, {"Llama-2-7B": 2.4, "Llama-3-8B": 0.57, "Qwen2.5-7B": 0.27, "Qwen2.5-0.5B": 1}),
        (
            "cpu",
            0.4,
            {
                "Llama-2-7B": 0.016,
                "Llama-3-8B": 0.004,
                "Qwen2.5-7B": 0.002,
                "Qwen2.5-0.5B": 0.007,
            },
        ),
    ],
)
def test_link_thresholds(device, share, gigabytes):
    weights = "fp32" if device == "cpu" else "bf16"
    for model, printed in gigabytes.items():
        found = roof(model, device, weights).link_threshold(share) / 1e9
        digits = len(f"{printed:g}".replace(".", "").lstrip("0"))
        assert float(f"{found:.{digits}g}") == pytest.approx(printed, rel=0.04), (model, found)
        ideal = roof(model, device, weights, "int8", kv_group=0).link_threshold(share) / 1e9
        assert ideal == pytest.approx(found / 2)


def test_kv_bytes_per_token():
    def kappa(model, kv, group):
        return roof(model, kv=kv, kv_group=group).kv_bytes_per_token

    seven = [kappa("Llama-2-7B", "bf16", 8)]
    seven += [kappa("Llama-2-7B", "int8", g) for g in (8, 64, 0)]
    assert seven == [524_288, 327_680, 270_336, 262_144]
    seventy = [kappa("Llama-2-70B", "bf16", 8)]
    seventy += [kappa("Llama-2-70B", "int8", g) for g in (8, 64)]
    assert seventy == [327_680, 204_800, 168_960]
    assert kappa("Qwen2.5-0.5B", "int8", 128) == kappa("Qwen2.5-0.5B", "int8", 64)  # whole head
    assert kappa("Llama-3-8B", "fp8", 64) == kappa("Llama-3-8B", "int8", 64)
    assert kappa("Llama-3-8B", "fp8", 0) == kappa("Llama-3-8B", "bf16", 64) / 2


def test_blocks_are_the_arenas():
    import torch

    assert ROOFLINE_ALIGN_BYTES == BLOCK_ALIGN_BYTES
    for name, size in (("Qwen2.5-0.5B", 1), ("Llama-3-8B", 16), ("Mixtral-8x7B", 32)):
        m = SHAPES[name]
        layout = BlockLayout(m.num_layers, m.num_kv_heads, size, m.head_dim, torch.bfloat16)
        assert roof(name, block_size=size).block_bytes == layout.block_bytes
        for kv, group in (("int8", 8), ("int8", 64), ("fp8", 32), ("int8", m.head_dim)):
            quantised = replace(layout, dtype=DTYPES[kv], group=group)
            bound = roof(name, kv=kv, kv_group=group, block_size=size)
            assert bound.block_bytes == quantised.block_bytes
            assert bound.kv_bytes_per_token == quantised.token_bytes
    assert roof("Qwen2.5-0.5B", kv="int8", block_size=1).block_bytes % 512 == 0


@pytest.mark.parametrize(
    ("model", "kib", "mib", "blocks", "int8_blocks"),
    [
        ("Llama-2-7B", 59, 472, 59, 118),
        ("Llama-3-8B", 72, 576, 288, 576),
        ("Qwen2.5-7B", 88, 704, 805, 1609),
        ("Qwen2.5-0.5B", 22.5, 180, 960, 1920),
    ],
)
def test_activations(model, kib, mib, blocks, int8_blocks):
    bound, ideal = roof(model), roof(model, kv="int8", kv_group=0)
    assert bound.activation_bytes_per_token == kib * KIB
    step_bytes = 8192 * bound.activation_bytes_per_token
    assert step_bytes == mib * MIB
    assert round(step_bytes / bound.block_bytes) == blocks
    assert round(step_bytes / ideal.block_bytes) == int8_blocks
    assert abs(bound.num_blocks - replace(bound, batched_tokens=8192).num_blocks - blocks) <= 1


def test_activations_of_experts():
    moe = replace(SHAPES["Mixtral-8x7B"], moe_intermediate_size=20_000)
    bound = Roofline(moe, DEVICES["H200"])
    assert bound.activation_bytes_per_token == 2 * (2 * 4096 + 2 * 2 * 20_000)
    one_dense = replace(moe, moe_layers=(False,) + (True,) * 31, intermediate_size=50_000)
    assert Roofline(one_dense, DEVICES["H200"]).activation_bytes_per_token == 2 * (8192 + 100_000)


def test_published_batch_on_a100():
    bound = roof(
        *("Llama-2-7B", "A100", "int8", "int8"),
        kv_group=0,
        quantised_embedding=True,
        quantised_head=True,
    )
    assert bound.largest_batch(1024) == 272
    step = bound.decode(272, 1024)
    assert round(step.memory_s * 1e3) == 39
    assert round(step.linear_s * 1e3) == 6
    # What an engine keeps besides: scales, embedding and head in bf16, activations of 2048 rows.
    real = replace(bound, kv_group=64, quantised_embedding=False, quantised_head=False)
    assert replace(real, batched_tokens=2048).largest_batch(1024) == 263
    assert int((80e9 - 6.476e9 - 2 * 2 * 32000 * 4096 - 2048 * 60416) / (1024 * 270_336)) == 263


@pytest.mark.parametrize(
    ("device", "weights", "rows"),
    [("A100", "bf16", 153), ("A100", "int8", 153), ("H200", "bf16", 206), ("H200", "fp8", 206)],
)
def test_where_products_become_compute_bound(device, weights, rows):
    assert round(roof("Llama-2-7B", device, weights).ridge_tokens) == rows


def test_int4_of_files_is_soon_compute_bound_and_of_int8_rows_later():
    a100, h200 = DEVICES["A100"], DEVICES["H200"]
    assert int(ridge_tokens(a100.peak("bf16"), 0.5, a100.bandwidth)) == 38
    assert int(ridge_tokens(h200.peak("bf16"), 0.5, h200.bandwidth)) == 51

    def gain(device, weights):
        steps = [roof("Llama-2-7B", device, w).decode(128, 1) for w in ("bf16", weights)]
        layers = [  # the head aside, which stays in bf16
            max(step.weights_s, step.linear_s) for step in steps
        ]
        return layers[0] / layers[1]

    assert gain("A100", "int4") == pytest.approx(2.39, abs=0.05)
    # 3.06 if no layer were wide, whose q, k, v and down are int8.
    assert gain("H200", "int4") == pytest.approx(2.70, abs=0.05)
    assert gain("A100", "int8") == pytest.approx(2.0, abs=0.06)


def test_decode_step_and_what_a_preemption_costs():
    bound = roof("Llama-2-7B")
    assert round(bound.decode(64, 2048).seconds * 1e3) == 17
    assert 2048 * bound.compute_s_per_token / 0.5 * 1e3 == pytest.approx(54, abs=0.5)
    half = Roofline(bound.model, bound.device.at(0.5, 0.8))
    step, whole = half.decode(64, 2048), bound.decode(64, 2048)
    assert step.memory_s == pytest.approx(whole.memory_s / 0.8)
    assert step.compute_s == pytest.approx(whole.compute_s / 0.5)
    assert bound.tokens_per_s(64, 2048) == pytest.approx(64 / whole.seconds)
    assert bound.cost_per_million(64, 2048, 3.6) == pytest.approx(
        1000 / bound.tokens_per_s(64, 2048)
    )
    assert bound.cost_per_million(0, 2048, 3.6) == math.inf


def test_prefill_against_a_naive_sum():
    model = replace(
        SHAPES["Mixtral-8x7B"],
        num_layers=3,
        moe_layers=(True,) * 3,
        sliding_window=(None, 5, 40),
    )
    bound = Roofline(model, DEVICES["L4"])
    num_tokens, chunk = 37, 16
    total_s = 0.0
    for start in range(0, num_tokens, chunk):
        rows = range(start, min(start + chunk, num_tokens))
        pairs = sum(min(t + 1, w or 10**9) for t in rows for w in model.sliding_window)
        read = sum(min(rows[-1] + 1, w or 10**9) for w in model.sliding_window) * 2 * 1024 * 2
        is_last = rows[-1] == num_tokens - 1
        num_used = 3 * (4096 * 6144 + 4096 * 4096) + 3 * 2 * 3 * 4096 * 14336
        hit = 8 * (1 - (6 / 8) ** len(rows))
        held = 3 * (4096 * 6144 + 4096 * 4096) + hit * 3 * 3 * 4096 * 14336
        held += 3 * (2 * 4096 + 8 * 4096) + 4096 + is_last * 32000 * 4096
        flops = len(rows) * 2 * num_used + is_last * 2 * 32000 * 4096
        total_s += max(held * 2 / 300e9, flops / 121e12)
        total_s += max(read / 300e9, 4 * 32 * 128 * pairs / 121e12)
    assert bound.prefill_s(num_tokens, chunk) == pytest.approx(total_s)
    # With little to multiply but much to attend to: 2 windows, where pairs of rows count.
    thin = replace(model, intermediate_size=1, moe_intermediate_size=1, hidden_size=8)
    fast = replace(DEVICES["L4"], bandwidth=1e30)
    pairs = sum(min(t + 1, w or 10**9) for t in range(700) for w in model.sliding_window)
    products_s = 700 * Roofline(thin, fast).flops_per_token / 121e12 + 2 * 32000 * 8 / 121e12
    attention_s = 4 * 32 * 128 * pairs / 121e12
    for size in (None, 16, 700):
        found_s = Roofline(thin, fast).prefill_s(700, size)
        assert found_s == pytest.approx(products_s + attention_s)
    assert bound.prefill_s(num_tokens) <= bound.prefill_s(num_tokens, chunk)


def test_a_device_computes_in_the_next_wider_format():
    assert DEVICES["A100"].peak("fp8") == DEVICES["A100"].peak("bf16")
    assert DEVICES["cpu"].peak("int8") == DEVICES["cpu"].peak("fp32")


def test_what_does_not_fit():
    bound = roof("Llama-2-70B", "L4")
    assert bound.num_blocks == bound.largest_batch(1) == 0
    assert bound.tokens_per_s(bound.largest_batch(1), 1) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "int5"}, "weights must be one of fp32"),
        ({"kv": "int4"}, "kv must be one of fp32"),
        ({"kv_group": 48}, "must divide the head dimension 128"),
        ({"kv_group": -1}, "must divide"),
        ({"block_size": 0}, "block_size must be positive"),
        ({"reserve_bytes": -1}, "reserve_bytes"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ConfigError, match=message):
        roof("Llama-2-7B", **change)


def test_names():
    assert device_named("h200") is DEVICES["H200"]
    assert shape_named("llama-3-8b") is SHAPES["Llama-3-8B"]
    with pytest.raises(ConfigError, match="did you mean 'H200'"):
        device_named("H20")
    with pytest.raises(ConfigError, match=r"did you mean 'Qwen2.5-7B'"):
        shape_named("Qwen2.5-7")
    with pytest.raises(ConfigError, match="share of peak compute"):
        DEVICES["L4"].at(0, 1)
    with pytest.raises(ConfigError, match="bandwidth must be positive"):
        replace(DEVICES["L4"], bandwidth=0)


def test_a_measured_device_has_rates_of_its_own():
    base = DEVICES["A100"]
    measured = replace(
        base,
        flops={**base.flops, ATTENTION: 1e12},
        reads={"int4": 1e12, "bf16": 5e11},
        layer_s=1e-5,
        row_s=2e-6,
        overlaps=False,
    )
    model = roof("Llama-2-7B").model
    plain, own = (Roofline(model, device, "int4").decode(9, 700) for device in (base, measured))
    head = 32000 * 4096 * 2
    norms = count_parameters(model).other * 2
    layers_s = plain.weights_s - (head + norms) / base.bandwidth
    assert own.weights_s == pytest.approx(
        layers_s * base.bandwidth / 1e12 + (head + norms) / 5e11, rel=1e-6
    )
    assert own.attention_s == pytest.approx(plain.attention_s * base.peak("bf16") / 1e12)
    assert own.other_s == pytest.approx(32e-5 + 9 * 2e-6) and plain.other_s == 0
    parts = math.hypot(own.weights_s, own.linear_s) + math.hypot(own.kv_s, own.attention_s)
    assert own.seconds == pytest.approx(parts + own.other_s)
    halved = measured.at(1.0, 0.5)
    assert (halved.read("int4"), halved.read("int8")) == (5e11, base.bandwidth / 2)


def test_stages_divide_layers_and_are_idle_at_the_ends():
    """One part passes all layers, and each hand-over; many parts keep all stages busy."""
    model = shape_named("Llama-3-8B")
    device = DEVICES["H100"]
    link = Link("made up", 0.001, 1e9, "")
    one, four = Roofline(model, device), Roofline(model, device, group=Group(1, link, 4))
    assert four.kv_bytes_per_token == one.kv_bytes_per_token / 4
    few, alone = four.decode(8, 512), one.decode(8, 512)
    for name in ("weights_s", "linear_s", "kv_s", "attention_s"):
        assert getattr(few, name) == pytest.approx(getattr(alone, name), rel=1e-9)
    row_bytes = model.hidden_size * 2
    assert few.exchange_s == pytest.approx(5 * (0.001 + 8 * row_bytes / 1e9))

    rows = 16 * planned.LEAST_ROWS
    many, alone = four.decode(rows, 512), one.decode(rows, 512)
    head_s = one.head_flops * rows / device.peak("bf16")
    assert many.linear_s - head_s == pytest.approx((alone.linear_s - head_s) * 19 / 16 / 4)
    assert many.exchange_s == pytest.approx(20 * (0.001 + 256 * row_bytes / 1e9))


def test_more_stages_than_layers_are_refused():
    model = shape_named("Llama-3-8B")
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size must lie in \[1, 32\]"):
        Roofline(model, DEVICES["H100"], group=Group(stages=33))
