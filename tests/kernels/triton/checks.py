"""Every Triton kernel against its reference. Not collected by itself: test_triton.py runs this file
in a process of its own, where the interpreter is on before anything imports Triton.

On a GPU the same checks run compiled, and in bf16 too.
"""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.quant import Int8Rows, quantize_rows_int8
from penstock.kernels.reference.rowwise import (
    act_mul_reference,
    added_reference,
    rms_norm_reference,
    rope_reference,
    swiglu_reference,
)
from penstock.kernels.triton import attention as attention_triton
from penstock.kernels.triton import attention_kernels as attention_triton_kernels
from penstock.kernels.triton import rowwise as rowwise_triton
from penstock.kernels.triton import rowwise_quant
from tests.kernels.kernel_cases import Paged, assert_close, dense_attention, paged
from tests.kernels.triton.interpreter import DEVICE, HALF

FP32, FP16 = torch.float32, torch.float16
DTYPES = [FP32, FP16] + [torch.bfloat16] * (DEVICE == "cuda")

# dtype, query heads a kv head, kv heads, head_dim, block_size, window
SHAPES = [
    (FP32, 1, 2, 64, 16, None),
    (FP32, 7, 2, 64, 16, None),
    (FP32, 8, 1, 128, 32, 100),
    (FP32, 2, 2, 80, 1, 16),
    (HALF, 7, 1, 64, 16, None),
    (HALF, 2, 2, 16, 128, 1),
    (HALF, 20, 1, 20, 4, 300),
]
SPLIT = 128  # keys of a decode program here: two tiles of keys, of which short contexts have two


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch):
    monkeypatch.setattr(attention_triton, "SPLIT", SPLIT)


def test_it_runs_interpreted_or_compiled():
    interpreted = type(attention_triton_kernels._decode_kernel).__name__ == "InterpretedFunction"
    assert interpreted == (DEVICE == "cpu")


def decode(q: torch.Tensor, case: Paged, window: int | None, **options) -> torch.Tensor:
    out = torch.full_like(q.contiguous(), float("nan"))
    return attention_triton.decode_attention(
        q, case.kv, case.decode(), 0.125, window, out, **options
    )


def prefill(q: torch.Tensor, case: Paged, query_lens: list[int], window: int | None, **options):
    out = torch.full_like(q.contiguous(), float("nan"))
    chunks = case.prefill(query_lens)
    return attention_triton.prefill_attention(q, case.kv, chunks, 0.125, window, out, **options)


@pytest.mark.parametrize("dtype", [FP32, HALF])
def test_scores_under_a_soft_cap(dtype):
    query_lens = [1, 15, 3, 40]
    case = paged([1, 17, 63, SPLIT + 50], num_kv_heads=2, head_dim=64, dtype=dtype, device=DEVICE)
    q = (3 * torch.randn(sum(query_lens), 6, 64)).to(DEVICE, dtype)
    y = prefill(q, case, query_lens, None, softcap=0.7)
    assert_close(y, dense_attention(q, case, query_lens, 0.125, None, softcap=0.7))
    last = torch.tensor(query_lens).cumsum(0) - 1
    want = dense_attention(q[last], case, [1] * 4, 0.125, None, softcap=0.7)
    assert_close(decode(q[last], case, None, softcap=0.7), want)


@pytest.mark.parametrize("shape", SHAPES)
def test_decode(shape):
    dtype, group, num_kv_heads, head_dim, block_size, window = shape
    lens = [1, 16, 17, 63, SPLIT + 1, 2 * SPLIT + 20]
    case = paged(
        lens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        oldest=None if window is None else [max(0, n - window) for n in lens],
        device=DEVICE,
    )
    qkv = torch.randn(len(lens), group * num_kv_heads + 2, head_dim).to(DEVICE, dtype)
    q = qkv[:, : group * num_kv_heads]
    assert_close(decode(q, case, window), dense_attention(q, case, [1] * 6, 0.125, window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 16])
def test_a_score_without_a_value(dtype, window):
    """gpt-oss's sinks, below, among and above the scores of keys."""
    lens, query_lens = [1, 63, 2 * SPLIT + 20], [1, 15, 20]
    case = paged(lens, num_kv_heads=2, head_dim=24, dtype=dtype, device=DEVICE)
    sinks = torch.tensor([-100.0, 0.0, 3.0, 200.0]).to(DEVICE)
    q = torch.randn(sum(query_lens), 4, 24).to(DEVICE, dtype)
    y = prefill(q, case, query_lens, window, sink_scores=sinks)
    assert_close(y, dense_attention(q, case, query_lens, 0.125, window, sink_scores=sinks))
    last = torch.tensor([0, 15, 35], device=DEVICE)
    assert_close(decode(q[last], case, window, sink_scores=sinks), y[last])


def test_decode_of_many_rows():
    lens = [*range(1, 17), SPLIT + 20]
    case = paged(lens, num_kv_heads=1, head_dim=16, device=DEVICE)
    q = torch.randn(17, 2, 16).to(DEVICE)
    together = decode(q, case, None)
    assert_close(together, dense_attention(q, case, [1] * 17, 0.125, None))
    for b in (0, 15, 16):
        alone = Paged(case.kv, case.tables[b : b + 1], case.lens[b : b + 1], [], [])
        assert torch.equal(decode(q[b : b + 1], alone, None)[0], together[b])


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill(shape):
    dtype, group, num_kv_heads, head_dim, block_size, window = shape
    group = min(group, 3)  # each head is a program here
    lens, query_lens = [1, 16, 63, 150], [1, 15, 40, 33]
    reach = window or max(lens)
    case = paged(
        lens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        oldest=[max(0, n - m - reach + 1) for n, m in zip(lens, query_lens, strict=True)],
        device=DEVICE,
    )
    qkv = torch.randn(sum(query_lens), group * num_kv_heads + 2, head_dim).to(DEVICE, dtype)
    q = qkv[:, : group * num_kv_heads]
    y = prefill(q, case, query_lens, window)
    assert_close(y, dense_attention(q, case, query_lens, 0.125, window))


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv(dtype):
    case = paged([1], num_kv_heads=3, head_dim=20, block_size=4, dtype=dtype, device=DEVICE)
    case.k_cache.zero_(), case.v_cache.zero_()
    qkv = torch.randn(5, 9, 20).to(DEVICE, dtype)
    k, v = qkv[:, 3:6], qkv[:, 6:]
    slots = torch.tensor([7, -1, 0, 13, -5], device=DEVICE)
    attention_triton.write_kv(k, v, case.kv, slots)
    for cache, rows in ((case.k_cache, k), (case.v_cache, v)):
        for token, slot in ((0, 7), (2, 0), (3, 13)):
            assert torch.equal(cache[slot // 4, :, slot % 4], rows[token])
        assert int(cache.count_nonzero()) == 3 * 3 * 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (33, 500)])
def test_rms_norm(dtype, shape):
    x, residual = torch.randn(2, *shape).to(DEVICE, dtype)
    x[0] *= 1e-3  # where eps counts
    weight = torch.randn(shape[1]).to(DEVICE, dtype)
    y = rowwise_triton.rms_norm(x, weight, 1e-5, None, torch.empty_like(x))
    assert isinstance(y, torch.Tensor)
    assert_close(y, rms_norm_reference(x, weight, 1e-5))
    y, total = rowwise_triton.rms_norm(x, weight, 1e-5, residual, torch.empty_like(x))
    assert_close(total, x + residual)
    assert_close(y, rms_norm_reference(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_what_is_normed_and_scaled_before_it_is_added(dtype):
    """Every placement of the norms, with weights in the rows' dtype and in fp32; and as int8."""
    x, residual = torch.randn(2, 3, 63).to(DEVICE, dtype)
    for wide in (dtype, FP32):
        weight, post = torch.randn(2, 63).to(DEVICE, wide)
        for w, p, factor in ((weight, post, 0.5), (None, post, 1.0), (weight, None, 0.22)):
            want = added_reference(x, residual, 1e-5, p, factor)
            out, total = torch.empty_like(x), residual.clone()
            rowwise_triton.rms_norm(x, w, 1e-5, total, out, total, p, factor)
            assert_close(total, want)
            y = total if w is None else out
            assert_close(y, want if w is None else rms_norm_reference(want, w, 1e-5))
            rows = Int8Rows.inside(torch.empty_like(x), None)
            total = residual.clone()
            rowwise_quant.rms_norm_int8(x, w, 1e-5, total, rows, total, p, factor)
            codes, scales = quantize_rows_int8(y, None)
            assert torch.equal(rows.codes, codes) and torch.equal(rows.scales, scales)


def test_gelu_by_tanh():
    gate_up = 3 * torch.randn(3, 2 * 77, device=DEVICE)
    out = torch.empty(3, 77, device=DEVICE)
    y = rowwise_triton.act_mul(gate_up, out, "gelu_tanh")
    assert_close(y, act_mul_reference(gate_up, "gelu_tanh"))
    rows = Int8Rows.inside(torch.empty_like(out), None)
    rowwise_quant.act_mul_int8(gate_up, rows, "gelu_tanh")
    codes, _ = quantize_rows_int8(y, None)
    assert (rows.codes != codes).float().mean() < 0.02


def test_soft_cap():
    x = torch.randn(5, 203, device=DEVICE) * torch.tensor([[1e-6], [0.1], [1.0], [30.0], [1e4]])
    want = torch.tanh(x.double() / 30.0) * 30.0
    torch.testing.assert_close(
        rowwise_triton.soft_cap_(x, 30.0).double(), want, rtol=1e-6, atol=1e-30
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_per_head_in_place_on_a_view(dtype):
    qkv = torch.randn(4, 7, 24).to(DEVICE, dtype)
    before, weight = qkv.clone(), torch.randn(24).to(DEVICE, dtype)
    q = qkv[:, 2:5]
    rowwise_triton.rms_norm(q, weight, 1e-5, None, q)
    assert_close(q, rms_norm_reference(before[:, 2:5], weight, 1e-5))
    assert torch.equal(qkv[:, :2], before[:, :2])
    assert torch.equal(qkv[:, 5:], before[:, 5:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rot"), [(64, 64), (80, 32), (20, 10)])
def test_rope(dtype, head_dim, rot):
    qkv = torch.randn(5, 9, head_dim).to(DEVICE, dtype)
    before, angle = qkv.clone(), torch.randn(5, rot // 2).to(DEVICE)
    rowwise_triton.rope_(qkv[:, :6], qkv[:, 6:8], angle.cos(), angle.sin())
    assert_close(qkv[:, :8], rope_reference(before[:, :8], angle.cos(), angle.sin()))
    assert torch.equal(qkv[:, 8], before[:, 8])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rot"), [(64, 64), (80, 32), (20, 10)])
def test_rope_to(dtype, head_dim, rot):
    qkv, angle = torch.randn(5, 9, head_dim).to(DEVICE, dtype), torch.randn(5, rot // 2).to(DEVICE)
    before = qkv.clone()
    wide = torch.full((5, 8, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    rowwise_triton.rope_to(qkv[:, 1:7], angle.cos(), angle.sin(), wide[:, 1:7])
    assert_close(wide[:, 1:7], rope_reference(before[:, 1:7], angle.cos(), angle.sin()))
    assert torch.equal(qkv, before)
    assert wide[:, [0, 7]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 1500)])
def test_act_mul(dtype, shape):
    gate_up = torch.randn(shape[0], 2 * shape[1]).to(DEVICE, dtype)
    y = rowwise_triton.act_mul(gate_up, torch.empty(shape, dtype=dtype, device=DEVICE))
    assert_close(y, act_mul_reference(gate_up))
    y = rowwise_triton.swiglu(gate_up, y, 1.702, 0.7)
    assert_close(y, swiglu_reference(gate_up, 1.702, 0.7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "ranks", "dim"), [(1, 1, 1), (5, 2, 63), (3, 8, 1500)])
def test_combine(dtype, num_tokens, ranks, dim):
    routed = torch.randn(num_tokens * ranks + 2, dim).to(DEVICE, dtype)
    places = torch.randperm(num_tokens * ranks + 2)[: num_tokens * ranks].view(-1, ranks).to(DEVICE)
    weights = torch.rand(num_tokens, ranks).to(DEVICE)
    out = torch.full((num_tokens, dim), float("nan"), dtype=dtype, device=DEVICE)
    assert rowwise_triton.combine(routed, places, weights, out) is out
    assert_close(out, (weights[..., None] * routed[places].float()).sum(1).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(dtype):
    """The norm writes over its input and the residual stream, SiLU * mul over the gate."""
    x, residual = torch.randn(2, 6, 100).to(DEVICE, dtype)
    weight = torch.randn(100).to(DEVICE, dtype)
    want, total = rowwise_triton.rms_norm(x, weight, 1e-5, residual, torch.empty_like(x))
    rowwise_triton.rms_norm(x, weight, 1e-5, residual, x, residual)
    assert torch.equal(x, want) and torch.equal(residual, total)
    want = rowwise_triton.act_mul(x, torch.empty_like(x[:, :50].contiguous()))
    rowwise_triton.act_mul(x, x[:, :50])
    assert torch.equal(x[:, :50], want)
