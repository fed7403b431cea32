"""Grids of 4-bit groups, and channel scales: what they promise, and the stored form."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.quant import dequantize_weight, int8_codes, quantize_weight
from penstock.workers.calibration.scaling import choose_scales, rounding_error, scales_of
from penstock.workers.weights.grids import Grid, GridSpec, fit, plain, round_to, round_weight


@pytest.mark.parametrize("kind", ["zero-points", "symmetric"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_fitted_grid_beats_that_of_the_extremes(kind: Grid, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    spec = GridSpec(32, kind, dtype)
    values = torch.randn(32, 500, generator=generator) + 0.5
    importance = torch.rand(32, generator=generator) + 0.1

    def error(grid: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        scale, zero = grid
        rounded = (round_to(values, scale, zero) - zero) * scale
        return importance @ (rounded - values).square()

    fitted, simple = fit(values, importance, spec), plain(values, spec)
    assert error(fitted).sum() < 0.95 * error(simple).sum()
    scale, zero = fitted
    assert torch.equal(scale.to(dtype).float(), scale)
    assert torch.equal(zero, zero.round()) and bool(((zero >= 0) & (zero <= 15)).all())


def test_weights_on_a_grid_come_back():
    """Integers around a zero point, times a scale that the dtype holds."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (20, 96), generator=generator)
    codes[:, ::32], codes[:, 1::32] = 0, 15
    zeros = torch.randint(0, 16, (20, 3), generator=generator).repeat_interleave(32, 1)
    weight = (codes - zeros) * 0.03125
    found = round_weight(weight, None, GridSpec(32, "zero-points", torch.bfloat16))
    assert torch.equal(found.codes, codes.to(torch.uint8))
    assert torch.equal(found.values(), weight)


@pytest.mark.parametrize("kind", ["zero-points", "symmetric"])
def test_extremes(kind: Grid):
    """Zeros, one sign only, values too small and too large for fp16's scales: all stay finite."""
    weight = torch.zeros(5, 64)
    weight[1] = torch.linspace(1, 2, 64)
    weight[2] = -weight[1]
    weight[3, 7] = 1e-12
    weight[4, 3] = 1e9
    found = round_weight(weight, None, GridSpec(32, kind, torch.float16)).values()
    assert bool(found.isfinite().all())
    assert torch.equal(found[0], weight[0])
    assert (found[1] - weight[1]).abs().max() < 0.15 and torch.equal(found[2] == 0, found[1] == 0)


def test_the_symmetric_scale_has_the_sign_that_uses_all_codes():
    """The largest weight is always the code of -8, whatever its sign."""
    weight = torch.linspace(-1, 2, 32)[None]
    found = round_weight(weight, None, GridSpec(32, "symmetric", torch.float16))
    assert found.zeros is None and int(found.codes.min()) == 0
    assert float(found.scales[0, 0]) < 0


@pytest.mark.parametrize(("group", "width"), [(16, 96), (32, 80), (128, 200)])
def test_a_grid_of_steps_is_that_of_weights_rounded_at_load(group: int, width: int):
    """Without importance; the codes are int8, and in the file 4 bits can be found again."""
    weight = torch.randn(40, width, generator=torch.Generator().manual_seed(4))
    weight[3], weight[5, :group] = 0.0, 0.25
    spec = GridSpec(group, "steps")
    found, expected = round_weight(weight, None, spec), quantize_weight(weight, "int4", group)
    assert found.codes.dtype == torch.int8 and found.scales.shape == (40, 1)
    assert torch.equal(found.codes, int8_codes(expected))
    assert torch.equal(found.values(), dequantize_weight(expected))
    assert spec.bits(width) == 4 + (16 * -(-width // group) + 32) / width


def test_importance_moves_steps():
    """What counts ten thousand times is hit, though it lies between the others' codes."""
    values = torch.linspace(-100, 100, 16)[:, None].clone()
    values[4] += 6.0
    importance = torch.ones(16)
    importance[4] = 1e4
    spec = GridSpec(16, "steps")
    errors = {}
    for name, each in (("alike", torch.ones(16)), ("important", importance)):
        scale, zero = fit(values, each, spec)
        rounded = (round_to(values, scale, zero) - zero) * scale
        assert torch.allclose(rounded, rounded.round(), atol=1e-3)
        errors[name] = (rounded - values).abs()[4].item()
    assert errors["important"] <= 1.0 < errors["alike"]


def test_channel_scales_protect_large_inputs():
    generator = torch.Generator().manual_seed(2)
    spec = GridSpec(32, "zero-points", torch.float16)
    weight = torch.randn(64, 128, generator=generator)
    rms = torch.ones(128)
    rms[::16] = 30.0
    squares = rms.square()
    scales = choose_scales(weight, rms, squares, spec)
    assert scales is not None and bool((scales[::16] > scales[1]).all())
    without = rounding_error(weight, torch.ones(128), squares, spec)
    assert rounding_error(weight, scales, squares, spec) < 0.5 * without
    assert scales_of(rms, 0.5).log().mean().abs() < 1e-5
    assert choose_scales(weight, torch.ones(128), torch.ones(128), spec) is None


def test_inputs_that_are_always_zero_have_no_scale():
    rms = torch.tensor([0.0, 1.0, 4.0, 0.0])
    scales = scales_of(rms, 0.5)
    assert scales[0] == scales[3] == 1
    torch.testing.assert_close(scales[2] / scales[1], torch.tensor(2.0))
    assert torch.equal(scales_of(torch.zeros(3), 0.5), torch.ones(3))
