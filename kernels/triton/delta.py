"""The Triton kernels of `delta.py`: a gated DeltaNet layer, and the gate of an attention's output.

Imported only where it runs: on a GPU, or in Triton's interpreter on CPU tensors. Shapes and meaning
of the arguments are those of `delta.py`. A program is one value head of one sequence and keeps the
head's state in registers from token to token. Not yet run on a GPU.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.delta_types import DeltaState, DeltaWeights, StateRows


def gated_delta(
    mixed: Tensor, z: Tensor, ba: Tensor, weights: DeltaWeights, states: DeltaState,
    rows: StateRows, out: Tensor,
) -> Tensor:  # fmt: skip
    taps, channels = weights.conv.shape
    num_heads, num_sequences = weights.num_value_heads, rows.sources.numel()
    if num_sequences:
        _delta_kernel[(num_sequences, num_heads)](
            mixed, z, ba, *weights.tensors, states.last, states.matrix, rows.starts, rows.sources,
            rows.write_starts, rows.write_after, rows.write_slots, out, mixed.stride(0),
            z.stride(0), ba.stride(0), states.last.stride(0), states.matrix.stride(0),
            out.stride(0), weights.eps, CHANNELS=channels, TAPS=taps,
            KEY_HEADS=weights.num_key_heads, VALUE_HEADS=num_heads, KEY_DIM=weights.key_dim,
            VALUE_DIM=weights.value_dim, KEYS=triton.next_power_of_2(weights.key_dim),
            VALUES=triton.next_power_of_2(weights.value_dim), num_warps=8,
        )  # fmt: skip
    return out


def gate_mul_(x: Tensor, gate: Tensor) -> Tensor:
    num_rows, dim = x.shape
    tile = min(1024, triton.next_power_of_2(dim))
    if num_rows:
        _gate_mul_kernel[(num_rows, triton.cdiv(dim, tile))](
            x, gate, x.stride(0), gate.stride(0), dim, TILE=tile
        )
    return x


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _mixed_at(mixed_ptr, last_ptr, position, first, source, stride, last_stride, channels, is_one,
              CHANNELS: tl.constexpr, TAPS: tl.constexpr):  # fmt: skip
    """`channels` of the token at row `position`, which may lie before the sequence's `first`."""
    nothing = tl.zeros_like(channels)  # Triton's interpreter widens no bit to a block
    at = position - first + nothing
    here = mixed_ptr + (position + nothing).to(tl.int64) * stride + channels
    now = tl.load(here, mask=is_one & (at >= 0), other=0.0)
    there = last_ptr + source * last_stride + (TAPS - 1 + position - first) * CHANNELS + channels
    is_kept = is_one & (at < 0) & (source + nothing >= 0)
    return now + tl.load(there, mask=is_kept, other=0.0)


@triton.jit
def _convolved(mixed_ptr, last_ptr, conv_ptr, row, first, source, stride, last_stride, channels,
               is_one, CHANNELS: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    total = tl.zeros([TILE], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        x = _mixed_at(mixed_ptr, last_ptr, row - TAPS + 1 + tap, first, source, stride, last_stride,
                      channels, is_one, CHANNELS, TAPS)  # fmt: skip
        weight = tl.load(conv_ptr + tap * CHANNELS + channels, mask=is_one, other=0.0)
        total += x.to(tl.float32) * weight
    return _silu(total)


@triton.jit
def _keep_last(mixed_ptr, last_ptr, row, first, source, stride, last_stride, slot, channels, is_one,
               CHANNELS: tl.constexpr, TAPS: tl.constexpr):  # fmt: skip
    """Write the inputs of the convolution that the token after `row` sees."""
    for tap in tl.static_range(TAPS - 1):
        x = _mixed_at(mixed_ptr, last_ptr, row - TAPS + 2 + tap, first, source, stride, last_stride,
                      channels, is_one, CHANNELS, TAPS)  # fmt: skip
        tl.store(last_ptr + slot * last_stride + tap * CHANNELS + channels, x, mask=is_one)


@triton.jit
def _delta_kernel(
    mixed_ptr, z_ptr, ba_ptr, conv_ptr, decay_ptr, dt_bias_ptr, norm_ptr, last_ptr, state_ptr,
    starts_ptr, sources_ptr, write_starts_ptr, write_after_ptr, write_slots_ptr, out_ptr, stride,
    z_stride, ba_stride, last_stride, state_stride, out_stride, eps,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    key_head = head // SHARED
    first, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    source = tl.load(sources_ptr + sequence).to(tl.int64)
    write = tl.load(write_starts_ptr + sequence)
    last_write = tl.load(write_starts_ptr + sequence + 1)
    keys, values = tl.arange(0, KEYS), tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    q_channels = key_head * KEY_DIM + keys
    k_channels = KEY_HEADS * KEY_DIM + q_channels
    v_channels = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
    cells = (head * KEY_DIM + keys[:, None]) * VALUE_DIM + values[None, :]
    is_cell = is_key[:, None] & is_value[None, :]
    begun = state_ptr + source * state_stride + cells
    matrix = tl.load(begun, mask=is_cell & (source + cells * 0 >= 0), other=0.0)
    factor = tl.load(decay_ptr + head)
    bias = tl.load(dt_bias_ptr + head)
    norm_weight = tl.load(norm_ptr + values, mask=is_value, other=0.0)
    for done in range(end - first):
        row = first + done
        q = _convolved(mixed_ptr, last_ptr, conv_ptr, row, first, source, stride, last_stride,
                       q_channels, is_key, CHANNELS, TAPS, KEYS)  # fmt: skip
        k = _convolved(mixed_ptr, last_ptr, conv_ptr, row, first, source, stride, last_stride,
                       k_channels, is_key, CHANNELS, TAPS, KEYS)  # fmt: skip
        v = _convolved(mixed_ptr, last_ptr, conv_ptr, row, first, source, stride, last_stride,
                       v_channels, is_value, CHANNELS, TAPS, VALUES)  # fmt: skip
        q = q / tl.sqrt(tl.sum(q * q) + 1e-6) / tl.sqrt(KEY_DIM * 1.0)
        k = k / tl.sqrt(tl.sum(k * k) + 1e-6)
        at = row.to(tl.int64)
        b = tl.load(ba_ptr + at * ba_stride + head).to(tl.float32)
        raw = tl.load(ba_ptr + at * ba_stride + VALUE_HEADS + head).to(tl.float32) + bias
        step = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
        matrix = matrix * tl.exp(factor * step)
        added = (v - tl.sum(matrix * k[:, None], axis=0)) / (1.0 + tl.exp(-b))
        matrix += k[:, None] * added[None, :]
        read = tl.sum(matrix * q[:, None], axis=0)
        scale = 1.0 / tl.sqrt(tl.sum(read * read) / VALUE_DIM + eps)
        places = head * VALUE_DIM + values
        gate = tl.load(z_ptr + at * z_stride + places, mask=is_value, other=0.0).to(tl.float32)
        result = read * scale * norm_weight * _silu(gate)
        tl.store(out_ptr + at * out_stride + places, result, mask=is_value)
        after = tl.load(write_after_ptr + write, mask=write < last_write, other=-1)
        if after == done + 1:
            slot = tl.load(write_slots_ptr + write).to(tl.int64)
            tl.store(state_ptr + slot * state_stride + cells, matrix, mask=is_cell)
            is_own = is_key & (
                keys * 0 + head % SHARED == 0
            )  # value heads of one key head share its channels
            _keep_last(mixed_ptr, last_ptr, row, first, source, stride, last_stride, slot,
                       q_channels, is_own, CHANNELS, TAPS)  # fmt: skip
            _keep_last(mixed_ptr, last_ptr, row, first, source, stride, last_stride, slot,
                       k_channels, is_own, CHANNELS, TAPS)  # fmt: skip
            _keep_last(mixed_ptr, last_ptr, row, first, source, stride, last_stride, slot,
                       v_channels, is_value, CHANNELS, TAPS)  # fmt: skip
            write += 1


@triton.jit
def _gate_mul_kernel(x_ptr, gate_ptr, stride, gate_stride, dim, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_one = columns < dim
    factor = tl.load(gate_ptr + row * gate_stride + columns, mask=is_one).to(tl.float32)
    value = tl.load(x_ptr + row * stride + columns, mask=is_one).to(tl.float32)
    tl.store(x_ptr + row * stride + columns, value / (1.0 + tl.exp(-factor)), mask=is_one)
