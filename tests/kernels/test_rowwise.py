"""RMSNorm, rotary embedding, activation * mul and soft caps on the CPU, against the references and
by hand."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import rowwise
from penstock.kernels.cpu import native
from penstock.kernels.quant import quantize_rows_int8
from penstock.kernels.reference.rowwise import rms_norm_reference
from tests.kernels.kernel_cases import assert_close

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [FP32, BF16, FP16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (33, 500), (2, 896)])
def test_rms_norm(cpu_path, dtype, shape):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    y = rowwise.rms_norm(x, weight, 1e-6)
    truth = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(y, (truth * weight.double()).to(dtype))


def test_rms_norm_of_tiny_rows_is_held_by_eps(cpu_path):
    x = torch.randn(3, 64) * torch.tensor([[0.0], [1e-3], [1.0]])
    truth = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close(rowwise.rms_norm(x, torch.ones(64), 1e-5), truth.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_residual(cpu_path, dtype):
    x, residual = torch.randn(5, 100).to(dtype), torch.randn(7, 100).to(dtype)[1:6]
    weight, out = torch.randn(100).to(dtype), torch.empty(5, 100, dtype=dtype)
    y, total = rowwise.rms_norm(x, weight, 1e-5, residual=residual, out=out)
    assert y is out
    assert torch.equal(total, x + residual)
    assert_close(y, rms_norm_reference(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_residual_in_place(cpu_path, dtype):
    x, residual = torch.randn(2, 5, 100).to(dtype)
    weight, out = torch.randn(100).to(dtype), torch.full((5, 100), float("nan"), dtype=dtype)
    want, total = rowwise.rms_norm(x, weight, 1e-5, residual=residual)
    for target in (out, x):
        stream = residual.clone()
        y, h = rowwise.rms_norm(x, weight, 1e-5, residual=stream, out=target, total=stream)
        assert y is target and h is stream
        assert torch.equal(y, want)
        assert torch.equal(h, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_rms_norm_of_what_is_normed_and_scaled_before_it_is_added(cpu_path, dtype, is_wide, factor):
    """Every placement of the norms, weights in the rows' dtype and in fp32, and in place."""
    x, residual = torch.randn(2, 5, 100).to(dtype)
    weight, post = torch.randn(2, 100).to(torch.float32 if is_wide else dtype)
    for w in (weight, None):
        for p in (post, None):
            added = x if p is None else rms_norm_reference(x, p, 1e-5)
            want = (residual.double() + factor * added.double()).to(dtype)
            stream = residual.clone()
            y, h = rowwise.rms_norm(
                x, w, 1e-5, residual=stream, total=stream, post=p, factor=factor
            )
            assert h is stream
            assert_close(h, want)
            assert_close(y, h if w is None else rms_norm_reference(h, w, 1e-5))
            rows = rowwise.rms_norm_int8(
                x, w, 1e-5, residual=residual.clone(), group=16, post=p, factor=factor,
                total=torch.empty_like(stream),
            )  # fmt: skip
            codes, scales = quantize_rows_int8(y, 16)
            assert torch.equal(rows.codes, codes) and torch.equal(rows.scales, scales)


def test_a_wide_weight_multiplies_the_unrounded_value(cpu_path):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    oracle = Gemma3RMSNorm(896, eps=1e-6)
    oracle.weight.data = 3 * torch.randn(896)
    x = torch.randn(9, 896).to(BF16)
    y = rowwise.rms_norm(x, oracle.weight.data + 1.0, 1e-6)
    assert y.dtype == BF16
    assert (y != oracle(x)).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_per_head_in_place_on_a_view(cpu_path, dtype):
    qkv = torch.randn(4, 7, 24).to(dtype)
    before, weight = qkv.clone(), torch.randn(24).to(dtype)
    q = qkv[:, 2:5]
    rowwise.rms_norm(q, weight, 1e-5, out=q)
    assert_close(q, rms_norm_reference(before[:, 2:5], weight, 1e-5))
    assert torch.equal(qkv[:, :2], before[:, :2])
    assert torch.equal(qkv[:, 5:], before[:, 5:])


def test_rms_norm_rounds_as_transformers_does(cpu_path):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    oracle = LlamaRMSNorm(896, eps=1e-6).to(BF16)
    oracle.weight.data = torch.randn(896).to(BF16)
    x = torch.randn(9, 896).to(BF16)
    y = rowwise.rms_norm(x, oracle.weight.data, 1e-6)
    assert (y != oracle(x)).float().mean() < 1e-3  # a last bit here and there


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rot"), [(64, 64), (16, 16), (80, 32), (20, 10)])
def test_rope(cpu_path, dtype, head_dim, rot):
    qkv = torch.randn(5, 9, head_dim).to(dtype)
    before = qkv.clone()
    angle = 10 * torch.randn(5, rot // 2)
    rowwise.rope_(qkv[:, :6], qkv[:, 6:8], angle.cos(), angle.sin())
    pairs = (
        torch.complex(before[..., : rot // 2].double(), before[..., rot // 2 : rot].double())
        * torch.polar(torch.ones_like(angle, dtype=torch.float64), angle.double())[:, None]
    )
    assert_close(qkv[:, :8, : rot // 2], pairs.real[:, :8].to(dtype))
    assert_close(qkv[:, :8, rot // 2 : rot], pairs.imag[:, :8].to(dtype))
    assert torch.equal(qkv[..., rot:], before[..., rot:])
    assert torch.equal(qkv[:, 8], before[:, 8])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rot"), [(64, 64), (80, 32), (20, 10)])
def test_rope_to_leaves_q_and_has_the_bits_of_rope(cpu_path, dtype, head_dim, rot):
    qkv, angle = torch.randn(5, 9, head_dim).to(dtype), 10 * torch.randn(5, rot // 2)
    before, turned = qkv.clone(), qkv.clone()
    rowwise.rope_(turned[:, 1:7], turned[:, 7:8], angle.cos(), angle.sin())
    wide = torch.full((5, 8, head_dim), float("nan"), dtype=dtype)
    out = wide[:, 1:7]
    assert rowwise.rope_to(qkv[:, 1:7], angle.cos(), angle.sin(), out) is out
    assert torch.equal(out, turned[:, 1:7])
    assert torch.equal(qkv, before)
    assert wide[:, [0, 7]].isnan().all()
    assert rowwise.rope_to(qkv[:0, :6], angle[:0].cos(), angle[:0].sin(), out[:0]).shape[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (33, 500)])
def test_act_mul(cpu_path, dtype, shape):
    gate_up = 3 * torch.randn(shape[0], 2 * shape[1]).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    truth = (torch.nn.functional.silu(gate) * up).to(dtype)
    assert_close(rowwise.act_mul(gate_up), truth)
    out = torch.empty(shape, dtype=dtype)
    assert rowwise.act_mul(gate_up, out) is out
    assert_close(out, truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_act_mul_where_the_gate_was(cpu_path, dtype):
    gate_up = torch.randn(7, 2 * 65).to(dtype)
    up, want = gate_up[:, 65:].clone(), rowwise.act_mul(gate_up)
    gate = gate_up[:, :65]
    assert rowwise.act_mul(gate_up, gate) is gate
    assert torch.equal(gate, want)
    assert torch.equal(gate_up[:, 65:], up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (33, 500)])
def test_swiglu(cpu_path, dtype, shape):
    """gpt-oss's, as its paper writes it; over the gate, too, and NaN stays."""
    gate_up = 3 * torch.randn(shape[0], 2 * shape[1]).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    gate, up = gate.clamp(max=4.0), up.clamp(-4.0, 4.0)
    truth = ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(dtype)
    assert_close(rowwise.swiglu(gate_up, 1.702, 4.0), truth)
    place, kept = gate_up[:, : shape[1]], gate_up[:, shape[1] :].clone()
    assert rowwise.swiglu(gate_up, 1.702, 4.0, out=place) is place
    assert_close(place, truth)
    assert torch.equal(gate_up[:, shape[1] :], kept)
    far = torch.tensor([[1e4, -1e4, float("nan"), 1.0, 1e4, -1e4, 1.0, float("nan")]]).to(dtype)
    y = rowwise.swiglu(far, 1.702, 7.0)[0]
    assert y[2:].isnan().all() and abs(float(y[1])) < 1e-30 and abs(float(y[0]) - 56) < 0.25


def test_act_mul_far_out(cpu_path):
    gate = torch.tensor([[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4]])
    y = rowwise.act_mul(torch.cat((gate, torch.ones_like(gate)), -1))
    torch.testing.assert_close(y, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-30)


def test_every_bf16_value_is_read_as_it_is_and_rounded_to_the_nearest_even(cpu_path):
    """silu(33) is 33 in fp32, so the product is exact, and half of them have to be rounded."""
    up = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(BF16)
    gate = torch.full_like(up, 33.0)
    want = (33 * up.float()).to(BF16)
    for width in (1 << 16, 47):  # whole vectors, and a rest
        y = rowwise.act_mul(torch.cat((gate[:width], up[:width])).view(1, -1))
        same = y.view(torch.int16) == want[:width].view(torch.int16)
        assert (same | (y.isnan() & want[:width].isnan())).all()
    assert want.isnan().any() and want.isinf().any() and ((want != 0) & (want.abs() < 1e-38)).any()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_do_not_depend_on_the_batch_or_the_threads(native_path, dtype):
    x, residual = torch.randn(2, 200, 901).to(dtype)  # enough for a second thread to take part
    weight, angle = torch.randn(901).to(dtype), torch.randn(200, 15)
    heads = torch.randn(2, 200, 9, 37).to(dtype)

    def run(rows: slice) -> list[torch.Tensor]:
        q, k = heads[0, rows].clone(), heads[1, rows].clone()
        rowwise.rope_(q, k, angle[rows].cos(), angle[rows].sin())
        normed = rowwise.rms_norm(x[rows], weight, 1e-5, residual=residual[rows])
        other = rowwise.rope_to(q, angle[rows].cos(), angle[rows].sin(), torch.empty_like(q))
        gated = rowwise.act_mul(x[rows, :900]), rowwise.swiglu(x[rows, :900], 1.7, 1.0)
        return [q, k, other, *normed, *gated]

    together = run(slice(None))
    torch.set_num_threads(2)
    for a, b in zip(run(slice(None)), together, strict=True):
        assert torch.equal(a, b)
    for row in (0, 1, 99, 199):
        for alone, batch in zip(run(slice(row, row + 1)), together, strict=True):
            assert torch.equal(alone[0], batch[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_by_tanh(cpu_path, dtype):
    gate_up = (3 * torch.randn(4, 2 * 77)).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    want = torch.nn.functional.gelu(gate, approximate="tanh") * up
    y = rowwise.act_mul(gate_up, activation="gelu_tanh")
    assert_close(y, want.to(dtype))
    assert (y - rowwise.act_mul(gate_up)).abs().max() > 0.1
    rows = rowwise.act_mul_int8(gate_up, activation="gelu_tanh", group=16)
    codes, scales = quantize_rows_int8(y, 16)
    assert torch.equal(rows.codes, codes) and torch.equal(rows.scales, scales)


def test_soft_cap(cpu_path):
    """Small values keep their digits, large ones stop at the cap; a row's length is no matter."""
    x = torch.randn(5, 203) * torch.tensor([[1e-6], [0.1], [1.0], [30.0], [1e4]])
    want = torch.tanh(x.double() / 30.0) * 30.0
    for width in (203, 64, 1):
        some = x[:, :width].clone()
        assert rowwise.soft_cap_(some, 30.0) is some
        torch.testing.assert_close(some.double(), want[:, :width], rtol=1e-6, atol=1e-30)
        if width < 203 and native.usable(x) is not None:
            assert torch.equal(some, rowwise.soft_cap_(x.clone(), 30.0)[:, :width])
