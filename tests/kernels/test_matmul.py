"""Packed linears: every layout, ragged sizes, and the same bits for a row at any batch size."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import matmul
from penstock.kernels.cpu import native
from penstock.kernels.reference import matmul as reference
from tests.kernels.kernel_cases import assert_close

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROWS = [1, 2, 5, 11, 12, 13, 25, 64]


@pytest.fixture(params=["native", "onednn", "plain"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native":
        request.getfixturevalue("native_path")
    else:
        monkeypatch.setattr(native.bound, "library", None)
    if request.param == "plain":
        monkeypatch.setattr(reference, "onednn_packs", lambda weight: False)
    elif request.param == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    return str(request.param)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(64, 64), (1, 1), (33, 17), (500, 63), (31, 130), (896, 896)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(layout, dtype, num_outputs, num_inputs, with_bias):
    if layout == "onednn" and not reference.onednn_packs(torch.zeros(1, 1, dtype=dtype)):
        pytest.skip("oneDNN has no bf16 on this CPU")
    weight = (torch.randn(num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    bias = torch.randn(num_outputs).to(dtype) if with_bias else None
    packed = matmul.pack_linear(weight.clone(), bias)
    assert packed.layout == layout
    assert (packed.in_features, packed.out_features) == (num_inputs, num_outputs)
    for num_rows in ROWS:
        wide = torch.randn(num_rows, num_inputs + 3).to(dtype)
        x = wide[:, :num_inputs]  # rows need not follow each other in memory
        truth = torch.nn.functional.linear(
            x.double(), weight.double(), None if bias is None else bias.double()
        ).to(dtype)
        assert_close(matmul.linear(x, packed), truth)
        out = torch.full((num_rows, num_outputs), float("nan"), dtype=dtype)
        assert matmul.linear(x, packed, out=out) is out
        assert_close(out, truth)


def test_no_rows(layout):
    packed = matmul.pack_linear(torch.randn(40, 24))
    assert matmul.linear(torch.empty(0, 24), packed).shape == (0, 40)


def test_fp16_stays_plain_on_the_cpu():
    packed = matmul.pack_linear(torch.randn(40, 24).to(FP16))
    assert packed.layout == "plain"
    assert matmul.linear(torch.randn(3, 24).to(FP16), packed).shape == (3, 40)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(896, 901), (40, 2048), (70, 8224)])
def test_rows_do_not_depend_on_the_batch_or_the_threads(
    native_path, dtype, num_outputs, num_inputs
):
    packed = matmul.pack_linear(
        torch.randn(num_outputs, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype)
    )
    x = torch.randn(300, num_inputs).to(dtype)
    together = matmul.linear(x, packed)
    torch.set_num_threads(2)
    assert torch.equal(matmul.linear(x, packed), together)
    for num_rows in (1, 2, 12, 13, 32, 130):
        assert torch.equal(matmul.linear(x[:num_rows], packed), together[:num_rows])
        assert torch.equal(matmul.linear(x[-num_rows:], packed), together[-num_rows:])
    apart = torch.nn.functional.pad(x, (0, 3))[:, :num_inputs]  # nor on where the rows lie
    assert torch.equal(matmul.linear(apart, packed), together)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_one_copy_of_the_weight(native_path, dtype):
    weight = torch.randn(1000, 501).to(dtype)
    packed = matmul.pack_linear(weight)
    assert packed.payload.numel() <= 1024 * 502
    assert packed.payload.data_ptr() != weight.data_ptr()
    assert packed.num_bytes == weight.numel() * weight.element_size()
