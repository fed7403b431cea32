"""The Triton kernels of gated DeltaNet against their references. Run by test_triton.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.kernels.delta_types import DeltaState, DeltaWeights, StateRows
from penstock.kernels.reference import delta as reference
from penstock.kernels.triton import delta as delta_triton
from tests.kernels.cpu.test_delta import Case, int32
from tests.kernels.triton.interpreter import DEVICE, HALF

SHAPES = [(2, 4, 16, 32, 4), (1, 3, 5, 7, 4)]
NEAR: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    HALF: {"atol": 5e-3, "rtol": 5e-3},
}


def moved(case: Case) -> tuple[DeltaWeights, DeltaState]:
    """Weights and fresh states on the device."""
    weights = case.weights
    conv, decay, dt_bias, norm = (each.to(DEVICE) for each in weights.tensors)
    state = DeltaState(*(each.to(DEVICE).clone() for each in (case.state.last, case.state.matrix)))
    there = replace(weights, conv=conv, decay=decay, dt_bias=dt_bias, norm=norm)
    return there, state


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_delta(shape, dtype):
    """A fresh sequence with states on the way, then one row and a chunk that go on from them."""
    case = Case(shape, dtype)
    weights, state = moved(case)
    inputs = case.rows(20)
    there = tuple(each.to(DEVICE) for each in inputs)
    first = int32(0, 6), int32(-1), int32(0, 2), int32(2, 6), int32(4, 1)
    second = int32(0, 1, 14), int32(4, 1), int32(0, 1, 2), int32(1, 13), int32(0, 3)
    for part, rows in ((slice(0, 6), first), (slice(6, 20), second)):
        mixed, z, ba = (each[part] for each in inputs)
        expected = reference.gated_delta(
            mixed, z, ba, case.weights, case.state, StateRows(*rows), torch.empty_like(z)
        )
        mixed, z, ba = (each[part] for each in there)
        found = delta_triton.gated_delta(
            mixed, z, ba, weights, state, StateRows(*(each.to(DEVICE) for each in rows)),
            torch.full_like(z, float("nan")),
        )  # fmt: skip
        torch.testing.assert_close(found.cpu(), expected, **NEAR[dtype])
        torch.testing.assert_close(
            state.matrix.cpu(), case.state.matrix, equal_nan=True, atol=2e-5, rtol=2e-5
        )
        assert torch.equal(state.last.cpu().nan_to_num(), case.state.last.nan_to_num())


def test_a_row_has_the_same_bits_however_its_sequence_is_cut():
    case = Case(SHAPES[0])
    weights, state = moved(case)
    inputs = tuple(each.to(DEVICE) for each in case.rows(9))

    def run(begin, end, source, slot):
        rows = int32(0, end - begin), int32(source), int32(0, 1), int32(end - begin), int32(slot)
        mixed, z, ba = (each[begin:end] for each in inputs)
        return delta_triton.gated_delta(
            mixed, z, ba, weights, state, StateRows(*(each.to(DEVICE) for each in rows)),
            torch.empty_like(z),
        )  # fmt: skip

    whole = run(0, 9, -1, 8)
    parts = [run(0, 1, -1, 0), run(1, 6, 0, 1), run(6, 9, 1, 2)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state.matrix[2], state.matrix[8])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_gate_mul(dtype):
    x, gate = torch.randn(3, 2 * 1100).to(dtype).to(DEVICE).split(1100, dim=1)
    expected = reference.gate_mul_(x.clone(), gate)
    torch.testing.assert_close(delta_triton.gate_mul_(x.clone(), gate), expected, **NEAR[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("columns", [1, 5, 160])
def test_sigmoid_of_routers_and_silu_of_itself(dtype, columns):
    """One column: the gate of a shared expert, behind the scores of the experts."""
    scores = (3 * torch.randn(7, 4 + columns)).to(dtype).to(DEVICE)[:, 4:]
    found = delta_triton.gate_mul_(torch.ones_like(scores), scores)
    torch.testing.assert_close(found, scores.float().sigmoid().to(dtype), **NEAR[dtype])
    twice = scores.clone()
    expected = torch.nn.functional.silu(scores.float()).to(dtype)
    torch.testing.assert_close(delta_triton.gate_mul_(twice, twice), expected, **NEAR[dtype])
