"""Gated DeltaNet against transformers' own functions, and its bits under any cut of a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from penstock.kernels import delta_types
from penstock.kernels.cpu import native
from penstock.kernels.delta import gate_mul_, gated_delta, sigmoid
from penstock.kernels.delta_types import DeltaState, DeltaWeights, StateRows
from penstock.workers.families import linear_attention

# Key heads, value heads, key_dim, value_dim, taps: whole vectors, odd ones, and several tiles.
SHAPES = [
    (2, 4, 16, 32, 4),
    (1, 3, 5, 7, 4),
    (3, 3, 24, 17, 3),
    (1, 2, 64, 176, 4),
    (2, 2, 8, 1, 1),
]
NUM_SLOTS = 9
LENGTHS = (1, 37, 3, 1)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Case:
    """Random weights and inputs of one layer; slots hold NaN until they are written."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0):
        self.nk, self.nv, self.dk, self.dv, self.taps = shape
        self.rng = torch.Generator().manual_seed(seed)
        self.dtype, self.channels = dtype, 2 * self.nk * self.dk + self.nv * self.dv
        self.weights = DeltaWeights(
            conv=self.random(self.taps, self.channels),
            decay=-self.random(self.nv).exp(),
            dt_bias=self.random(self.nv),
            norm=1 + 0.2 * self.random(self.dv),
            eps=1e-6,
            num_key_heads=self.nk,
            key_dim=self.dk,
        )
        # Each slot is a part of a larger row, as in memory that all layers share.
        size = self.nv * self.dk * self.dv
        matrix = torch.full((NUM_SLOTS, size + 3), float("nan"))[:, :size]
        last = torch.full((NUM_SLOTS, self.channels * (self.taps - 1) + 5), float("nan"))
        last = last.to(dtype)[:, : self.channels * (self.taps - 1)]
        self.state = DeltaState(
            last.unflatten(1, (self.taps - 1, self.channels)),
            matrix.unflatten(1, (self.nv, self.dk, self.dv)),
        )

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng)

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """mixed, z and ba, side by side as a fused projection leaves them."""
        widths = [self.channels, self.nv * self.dv, 2 * self.nv]
        return self.random(num_rows, sum(widths)).to(self.dtype).split(widths, dim=1)

    def run(self, inputs: tuple[Tensor, ...], *rows: Tensor) -> Tensor:
        mixed, z, ba = inputs
        return gated_delta(mixed, z, ba, self.weights, self.state, StateRows(*rows))

    @torch.inference_mode()
    def expected(self, mixed: Tensor, z: Tensor, ba: Tensor) -> tuple[Tensor, Tensor]:
        """transformers' output and last state of one whole sequence, in fp32."""
        mixed, z, ba = mixed.float(), z.float(), ba.float()
        conv = torch.nn.functional.conv1d(
            mixed.T[None], self.weights.conv.T[:, None], groups=self.channels, padding=self.taps - 1
        )
        qkv = torch.nn.functional.silu(conv[0, :, : len(mixed)].T)
        keys = self.nk * self.dk
        q, k, v = qkv.split([keys, keys, self.nv * self.dv], dim=1)
        b, a = ba.chunk(2, dim=1)
        decay = self.weights.decay * torch.nn.functional.softplus(a + self.weights.dt_bias)
        read, state = theirs.torch_recurrent_gated_delta_rule(
            q.view(1, len(q), self.nk, -1), k.view(1, len(k), self.nk, -1),
            v.view(1, len(v), self.nv, -1), g=decay[None], beta=b.sigmoid()[None],
            initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        norm = theirs.Qwen3NextRMSNormGated(self.dv, eps=1e-6)
        norm.weight.data = self.weights.norm
        out = norm(read.view(-1, self.dv), z.reshape(-1, self.dv))
        return out.view(len(mixed), -1), state[0]


BACKENDS = ["native", "reference"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "native":
        if native.bound.library is None:
            pytest.skip("the native library cannot be built here")
        yield
    else:
        with native.instead(None):
            yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_of_sequences_is_what_transformers_makes_of_each(backend, shape, dtype):
    case = Case(shape, dtype)
    num_rows = sum(LENGTHS)
    mixed, z, ba = case.rows(num_rows)
    starts = int32(0, *torch.tensor(LENGTHS).cumsum(0).tolist())
    ends = int32(*LENGTHS)
    slots = int32(7, 0, 3, 4)
    out = case.run((mixed, z, ba), starts, int32(-1, -1, -1, -1), int32(0, 1, 2, 3, 4), ends, slots)
    near: dict[str, Any] = (
        {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    )
    for i, slot in enumerate(slots.tolist()):
        part = slice(int(starts[i]), int(starts[i + 1]))
        expected, state = case.expected(mixed[part], z[part], ba[part])
        torch.testing.assert_close(out[part].float(), expected, **near)
        torch.testing.assert_close(case.state.matrix[slot], state, atol=2e-5, rtol=2e-5)
        newest = torch.cat([torch.zeros(case.taps - 1, case.channels, dtype=dtype), mixed[part]])
        assert torch.equal(case.state.last[slot], newest[len(newest) - case.taps + 1 :])
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert case.state.matrix[others].isnan().all() and case.state.last[others].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_however_its_sequence_is_cut(backend, shape):
    case = Case(shape)
    inputs = case.rows(41)
    nothing = int32()
    whole = case.run(inputs, int32(0, 41), int32(-1), int32(0, 1), int32(41), int32(8))
    for cut in (1, 2, 3, 7, 40):
        found, slot = [], -1
        for begin in range(0, 41, cut):
            end = min(begin + cut, 41)
            part = tuple(each[begin:end] for each in inputs)
            to = begin // cut % 2
            found.append(
                case.run(part, int32(0, end - begin), int32(slot), int32(0, 1), int32(end - begin),
                         int32(to))
            )  # fmt: skip
            slot = to
        assert torch.equal(torch.cat(found), whole), cut
        assert torch.equal(case.state.matrix[slot], case.state.matrix[8])
        assert torch.equal(case.state.last[slot], case.state.last[8])
    silent = case.run(inputs, int32(0, 41), int32(-1), int32(0, 0), nothing, nothing)
    assert torch.equal(silent, whole), "nothing need be written"


def test_states_on_the_way_are_those_of_shorter_sequences(backend):
    """Several writes of one sequence; two sequences from one slot, one of them without a write."""
    case = Case(SHAPES[0])
    inputs = case.rows(30)
    case.run(inputs, int32(0, 30), int32(-1), int32(0, 3), int32(1, 16, 30), int32(2, 5, 6))
    for length, slot in ((1, 2), (16, 5), (30, 6)):
        part = tuple(each[:length] for each in inputs)
        case.run(part, int32(0, length), int32(-1), int32(0, 1), int32(length), int32(0))
        assert torch.equal(case.state.matrix[0], case.state.matrix[slot])
        assert torch.equal(case.state.last[0], case.state.last[slot])
    rest = tuple(torch.cat([each[16:], each[16:23]]) for each in inputs)
    out = case.run(rest, int32(0, 14, 21), int32(5, 5), int32(0, 1, 1), int32(14), int32(1))
    assert torch.equal(case.state.matrix[1], case.state.matrix[6])
    assert torch.equal(out[14:], out[:7])


def test_a_config_allows_the_taps_that_the_kernel_has():
    """Two constants, as whatever reads a config loads no torch."""
    assert linear_attention.MAX_TAPS == delta_types.MAX_TAPS


def test_the_number_of_threads_changes_no_bit():
    case = Case((2, 4, 64, 64, 4))
    inputs = case.rows(24)
    rows = int32(0, 10, 24), int32(-1, -1), int32(0, 1, 2), int32(10, 14), int32(0, 1)
    threads, found = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(case.run(inputs, *rows))
    torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_of_an_attention(backend, dtype):
    both = torch.randn(5, 2 * 37).to(dtype)
    x, gate = both.split(37, dim=1)
    expected = (x.double() * gate.double().sigmoid()).to(dtype)
    near: dict[str, Any] = (
        {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    )
    torch.testing.assert_close(gate_mul_(x, gate), expected, **near)
    assert torch.equal(gate_mul_(x[2:3].clone(), gate[2:3]), gate_mul_(x, gate)[2:3])


@pytest.mark.skipif(
    native.bound.library is None, reason="needs the native library: it tests its sigmoid"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sigmoid_has_the_same_bits_among_any_rows(dtype):
    x = 3 * torch.randn(300, 5).to(dtype)
    whole = sigmoid(x)
    torch.testing.assert_close(whole, x.double().sigmoid().to(dtype), rtol=1e-6, atol=1e-6)
    for begin, end in ((0, 1), (7, 8), (3, 20), (100, 300), (299, 300)):
        assert torch.equal(sigmoid(x[begin:end]), whole[begin:end])
    into = torch.full_like(x, float("nan"))
    assert sigmoid(x, into) is into and torch.equal(into, whole)
    columns = torch.randn(9, 12).to(dtype)
    assert torch.equal(sigmoid(columns[:, 4:9]), sigmoid(columns[:, 4:9].contiguous()))
