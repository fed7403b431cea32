"""A step in parts of its rows, so that stages compute at the same time.

A row's result depends neither on the other rows of a step nor on how a prompt is cut into chunks,
so any cut is as good as another: the parts follow one another, as chunks do. Chunks stay whole
where commits are deferred, and with recurrent states: there is no slot for one in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from penstock.kernels.delta_types import StateRows
from penstock.kernels.types import DecodeBatch, PrefillBatch
from penstock.workers.models.layers import AttentionInputs, RollingInputs

# A part reads all weights of its stage: with fewer rows, more parts take longer than they save.
LEAST_ROWS = {"cpu": 16, "cuda": 256}
PARTS_A_STAGE = 4  # of S stages with M parts each, S - 1 of M + S - 1 turns are idle at the ends


@dataclass(frozen=True, slots=True)
class StepPart:
    """Rows [first, end) of a step, and their inputs."""

    first: int
    end: int
    inputs: AttentionInputs


def parts_of(inputs: AttentionInputs, num_stages: int) -> list[StepPart]:
    """All rows, in their order. A prompt's chunk is in one part where keys lie in scratch blocks,
    which every layer overwrites, and where there are recurrent states."""
    num_rows = len(inputs.slots)
    least = LEAST_ROWS[inputs.slots.device.type]
    num = max(1, min(num_stages * PARTS_A_STAGE, num_rows // least))
    bounds = [number * num_rows // num for number in range(num + 1)]
    starts = [int(each) for each in inputs.prefill.query_starts.tolist()]
    if inputs.uses_scratch or inputs.states is not None:
        ends = {inputs.num_decode + each for each in starts} | {num_rows}
        bounds = [each for each in bounds if each <= inputs.num_decode or each in ends]
        bounds = sorted({0, *bounds, num_rows})
    return [_part(inputs, starts, first, end) for first, end in pairwise(bounds)]


def _part(inputs: AttentionInputs, starts: Sequence[int], first: int, end: int) -> StepPart:
    if first == 0 and end == len(inputs.slots):
        return StepPart(first, end, inputs)
    num = inputs.num_decode
    decoding = slice(min(first, num), min(end, num))
    decode = DecodeBatch(
        inputs.decode.block_tables[decoding],
        inputs.decode.context_lens[decoding],
        inputs.decode.max_context_len,
    )
    begin, stop = max(first - num, 0), max(end - num, 0)
    chunks = [i for i, (a, b) in enumerate(pairwise(starts)) if a < stop and b > begin]
    own = slice(chunks[0], chunks[-1] + 1) if chunks else slice(0, 0)
    return StepPart(
        first,
        end,
        AttentionInputs(
            inputs.slots[first:end],
            decoding.stop - decoding.start,
            decode,
            _chunks(inputs.prefill, starts, own, begin, stop),
            inputs.rolling and _rolling(inputs.rolling, slice(first, end), decoding, own, num),
            inputs.states and _states(inputs.states, first, end),
        ),
    )


def _chunks(
    prefill: PrefillBatch, starts: Sequence[int], own: slice, begin: int, stop: int
) -> PrefillBatch:
    """Rows [begin, stop) of the chunks `own`, the first and the last of which may be cut."""
    bounds = [min(max(each, begin), stop) - begin for each in starts[own.start : own.stop + 1]]
    left_out = [max(0, end - stop) for end in starts[own.start + 1 : own.stop + 1]]
    device = prefill.context_lens.device
    return PrefillBatch(
        prefill.block_tables[own],
        torch.tensor(bounds if left_out else [0], dtype=torch.int32, device=device),
        prefill.context_lens[own] - torch.tensor(left_out, dtype=torch.int32, device=device),
        max((b - a for a, b in pairwise(bounds)), default=0) if left_out else 0,
    )


def _rolling(
    rolling: RollingInputs, rows: slice, decoding: slice, own: slice, num_decode: int
) -> RollingInputs:
    chunks = slice(num_decode + own.start, num_decode + own.stop)

    def of_sequences(values: Tensor) -> Tensor:
        return torch.cat([values[decoding], values[chunks]])

    return RollingInputs(
        rolling.sink_positions[rows],
        rolling.sink_ends[rows],
        rolling.window_starts[rows],
        of_sequences(rolling.sink_blocks),
        of_sequences(rolling.bases),
        rolling.max_visible_len,
    )


def _states(states: StateRows, first: int, end: int) -> StateRows:
    """Of the sequences in rows [first, end), all of whose rows these have."""
    starts = states.starts.tolist()
    begin, stop = starts.index(first), starts.index(end)
    writes = states.write_starts[begin : stop + 1]
    written = slice(int(writes[0]), int(writes[-1]))
    return StateRows(
        states.starts[begin : stop + 1] - first,
        states.sources[begin:stop],
        writes - writes[0],
        states.write_after[written],
        states.write_slots[written],
    )
