"""Number formats: the codes are the nearest, the scales as published, the edges defined."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import quant
from penstock.kernels.cpu import native

SHAPES = [(1, 1), (3, 17), (5, 64), (7, 128), (4, 129), (2, 300), (33, 257)]


def _weight(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", quant.WEIGHT_FORMATS)
def test_no_other_code_is_nearer(format: quant.WeightFormat, shape: tuple[int, int]) -> None:
    weight = _weight(shape)
    quantized = quant.quantize_weight(weight, format)
    error = (quant.dequantize_weight(quantized) - weight).abs()
    if format in ("int8", "fp8"):
        scales = quantized.scales[:, None].expand(shape)
        table = (
            torch.arange(-127, 128).float()
            if format == "int8"
            else torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
        )
        table = table[table.isfinite()]
    elif format == "int4":
        assert quantized.steps is not None and quantized.offsets is not None
        groups = torch.arange(shape[1]) // quant.INT4_STEP_GROUP
        steps, offsets = quantized.steps[:, groups], quantized.offsets[:, groups]
        scales = quantized.scales[:, None].expand(shape)
        table = steps[..., None] * torch.arange(16) + offsets[..., None].float()
    else:
        assert quantized.group is not None
        scales = quantized.scales[:, torch.arange(shape[1]) // quantized.group]
        table = torch.tensor(quant.NF4_VALUES)
    nearest = (weight[..., None] - table * scales[..., None]).abs().amin(-1)
    assert torch.allclose(error, nearest, atol=1e-6)


def test_symmetric_int4_uses_the_eighth_code_of_the_negative_side() -> None:
    weight = torch.tensor([[-8.0, 3.0], [7.0, -3.0]])
    quantized = quant.quantize_weight(weight, "int4", 128, symmetric=True)
    assert quantized.scales.flatten().tolist() == [1.0, 1.0]
    assert torch.equal(quant.dequantize_weight(quantized), weight)


@pytest.mark.parametrize("native_search", [True, False])
def test_int4_codes_of_sixteen_int8_codes_come_back(
    native_search: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every step and either sign: the weight that they stand for is rounded to itself. Groups
    that hold the first and the last of their codes, a short one among them."""
    if not native_search:
        monkeypatch.setattr(native.bound, "library", None)
    elif native.bound.library is None:
        pytest.skip("no compiler")
    steps = torch.stack([torch.arange(1, 17), torch.arange(16, 0, -1)], 1)
    offsets = torch.stack([127 - 15 * steps[:, 0], torch.arange(16) - 127], 1)
    nibbles = torch.randint(0, 16, (16, 49))
    nibbles[:, [0, 33]], nibbles[:, [1, 34]] = 0, 15
    groups = torch.arange(49) // 32
    codes = steps[:, groups] * nibbles + offsets[:, groups]  # 127 is the largest of each row
    found = quant.quantize_weight(codes * (0.5 / 127), "int4", 32)
    assert found.steps is not None
    assert torch.equal(quant.int8_codes(found).long(), codes)
    assert torch.equal(found.steps.long(), steps)


def test_int4_is_searched_alike_by_the_library_and_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if native.bound.library is None:
        pytest.skip("no compiler")
    weight = _weight((70, 517)) * torch.logspace(-4, 2, 70)[:, None]
    weight[3, 200:264], weight[5], weight[6, 8] = 0, 0, float("nan")
    library = quant.quantize_weight(weight, "int4")
    monkeypatch.setattr(native.bound, "library", None)
    plain = quant.quantize_weight(weight, "int4")
    assert torch.equal(library.scales.nan_to_num(), plain.scales.nan_to_num())
    assert library.scales.isnan().nonzero().tolist() == [[6]]
    found, wanted = quant.dequantize_weight(library), quant.dequantize_weight(plain)
    same = (quant.int8_codes(library) == quant.int8_codes(plain)).float().mean()
    assert same > 0.999  # sums that differ in their last bits decide between equals
    for each in (found, wanted):
        error = ((each - weight)[7:].square().sum(1) / weight[7:].square().sum(1)).sqrt()
        assert error.max() < 0.09 and not each[5].any()  # plain rounding in groups of 128: 0.11


@pytest.mark.parametrize("width", [1, 63, 64, 200, 576])
def test_the_hadamard_transform_is_the_matrix(width: int) -> None:
    """Sylvester's, in blocks of 64; what is left over stays; applied twice, it is undone."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < 64:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x, want = _weight((5, width)), _weight((5, width)).double()
    for start in range(0, width - 63, 64):
        want[:, start : start + 64] = want[:, start : start + 64] @ matrix / 8
    found = quant.hadamard_transform(x)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(quant.hadamard_transform(found), x, rtol=1e-5, atol=1e-6)
    other = _weight((5, width), seed=1)
    products = (found * quant.hadamard_transform(other)).sum(1)
    torch.testing.assert_close(products, (x * other).sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_transformed_weight_stands_for_the_same(format: quant.WeightFormat) -> None:
    """An outlier in each row costs its block less, and activations with one lose far less."""
    weight = _weight((70, 320)) / 18
    weight[:, 100] *= 30
    made = quant.quantize_weight(weight, format, hadamard=quant.hadamard_transform)
    plain = quant.quantize_weight(weight, format)
    assert made.hadamard and not plain.hadamard

    def error(found: torch.Tensor, truth: torch.Tensor) -> float:
        return float((found - truth).square().mean())

    assert error(quant.dequantize_weight(made), weight) < 0.6 * error(
        quant.dequantize_weight(plain), weight
    )
    x = _weight((40, 320), seed=1)
    x[:, 200] *= 50
    lost = [
        error(quant.linear_reference(x, each), x @ quant.dequantize_weight(each).T)
        for each in (made, plain)
    ]
    assert lost[0] < 0.2 * lost[1]


def test_int4_groups_are_whole_words() -> None:
    with pytest.raises(ValueError, match="groups of 12 weights: they are multiples of 8"):
        quant.quantize_weight(torch.zeros(2, 24), "int4", 12)


@pytest.mark.parametrize("format", quant.WEIGHT_FORMATS)
def test_zeros_stay_zero_and_extremes_stay_finite(format: quant.WeightFormat) -> None:
    weight = torch.zeros(4, 200)
    weight[1] = 3e38
    weight[2, 5] = -3e38
    weight[3] = 1e-30
    back = quant.dequantize_weight(quant.quantize_weight(weight, format))
    assert torch.isfinite(back).all()
    assert not back[0].any() and not back[3].abs().gt(1e-6).any()
    assert torch.allclose(back[1], weight[1], rtol=1e-3)


def test_zeros_of_groups_shift_the_codes() -> None:
    nibbles = torch.randint(0, 16, (3, 40), dtype=torch.uint8)
    scales, zeros = torch.rand(3, 5) + 0.1, torch.randint(0, 16, (3, 5), dtype=torch.uint8)
    packed = quant.QuantizedWeight("int4", quant.pack_nibbles(nibbles, 8), scales, 40, 8, zeros)
    expected = (nibbles.float() - zeros.float().repeat_interleave(8, 1)) * (
        scales.repeat_interleave(8, 1)
    )
    assert torch.equal(quant.dequantize_weight(packed), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_and_alone(bad: float) -> None:
    x = torch.ones(3, 64)
    x[1, 7] = bad
    for quantize in (quant.quantize_rows_int8, quant.quantize_rows_fp8):
        codes, scales = quantize(x)
        scales = scales.view(3)
        assert scales.isnan().tolist() == [False, True, False]
        assert torch.equal(codes.float()[0] * scales[0], codes.float()[2] * scales[2])
    codes, kv_scales = quant.quantize_kv(x, torch.int8, 32)
    assert kv_scales.isnan().tolist() == [[False, False], [True, False], [False, False]]
    assert quant.dequantize_kv(codes, kv_scales)[1, :32].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("group", [8, 32, 64])
def test_kv_is_within_half_a_step(dtype: torch.dtype, group: int) -> None:
    x = _weight((6, 64)) * torch.tensor([[1e-3], [1.0], [50.0], [0.0], [1e4], [1e-9]])
    codes, scales = quant.quantize_kv(x, dtype, group)
    assert codes.shape == x.shape and scales.shape == (6, 64 // group)
    assert scales.dtype == torch.float16 and codes.dtype == dtype
    error = (quant.dequantize_kv(codes, scales) - x).abs().unflatten(-1, (-1, group))
    wide = scales.float()[..., None]
    step = 0.5 if dtype == torch.int8 else 16.0  # E4M3 has steps of 32 at its top
    assert (error <= wide * step * 1.01 + wide * 127 * 2**-11).all()


@pytest.mark.parametrize("width", [1, 7, 8])
def test_nibbles_are_packed_wherever_they_lie(width):
    whole = torch.randint(0, 16, (5, 19), generator=torch.Generator().manual_seed(0))
    nibbles = whole.to(torch.uint8)[1:4, 3 : 3 + width]
    packed = quant.pack_nibbles(nibbles, 8)
    opened = quant.unpack_nibbles(packed)
    assert torch.equal(opened[:, :width], nibbles)
    assert (opened[:, width:] == 8).all() and opened.shape[1] == width + width % 2
    assert torch.equal(quant.pack_nibbles(nibbles[:1], 8), packed[:1])  # one row is contiguous
