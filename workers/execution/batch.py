"""A plan as arrays on the host: token ids, positions, slots and block tables of one flat batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.workers.errors import InvariantError
from penstock.workers.models.host_batch import HostBatch, HostRolling, HostStates, Ints
from penstock.workers.scheduling.plan import Chunk, Plan
from penstock.workers.scheduling.sequence import Sequence


def _states(chunks: list[Chunk]) -> HostStates | None:
    """Of `chunks` in the order of their rows; None: the model has no recurrent states."""
    moves = [chunk.moves for chunk in chunks if chunk.moves is not None]
    if not moves:
        return None
    if len(moves) < len(chunks):
        raise InvariantError("a chunk has no slot for its state")
    writes = [write for each in moves for write in each.writes]
    after, slots = zip(*writes) if writes else ((), ())
    return HostStates(
        starts=_starts([chunk.num_rows for chunk in chunks]),
        sources=np.array([each.source for each in moves], dtype=np.int32),
        write_starts=_starts([len(each.writes) for each in moves]),
        write_after=np.array(after, dtype=np.int32),
        write_slots=np.array(slots, dtype=np.int32),
    )


def _starts(lengths: list[int]) -> NDArray[np.int32]:
    """Where parts of these lengths begin, and where the last one ends."""
    return np.cumsum([0, *lengths]).astype(np.int32)


def host_batch(plan: Plan, block_size: int, row_of: Mapping[Sequence, int]) -> HostBatch:
    """The arrays of `plan`. `row_of`: rows of ids that the step before sampled and are unread."""
    decode, prefill = plan.decode, plan.prefill
    decode_tables, prefill_tables = _tables(decode), _tables(prefill)
    position = np.array([chunk.start for chunk in decode], dtype=np.int64)
    known = [0 if c.seq.num_unread_tokens else c.seq.token_ids[c.start] for c in decode]
    rows = decode  # the chunk of each decode row
    if plan.num_drafts:
        rows = [chunk for chunk in decode for _ in range(chunk.num_rows)]
        decode_tables = np.repeat(decode_tables, [chunk.num_rows for chunk in decode], axis=0)
        spans = [np.arange(c.start, c.start + c.num_rows, dtype=np.int64) for c in decode]
        position = np.concatenate(spans)
        known = [i for first, c in zip(known, decode, strict=True) for i in (first, *c.drafts)]
    slots = [_slots_of_rows(rows, decode_tables, position, block_size)] if decode else []
    unread = [(i, row_of[c.seq]) for i, c in enumerate(rows) if c.seq.num_unread_tokens]
    token_ids = [np.array(known, dtype=np.int64)]
    positions = [position]
    for chunk, table in zip(prefill, prefill_tables):
        if chunk.seq.num_unread_tokens:
            raise InvariantError("a prefill chunk needs ids that the host has not read")
        span = np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int64)
        entry = span // block_size - _rolled_before(chunk.seq, span, block_size)
        slots.append(table[entry] * np.int64(block_size) + span % block_size)
        ids = np.frombuffer(chunk.seq.token_ids, dtype=np.int32)
        token_ids.append(ids[chunk.start : chunk.start + chunk.length].astype(np.int64))
        positions.append(span)
    lens = [chunk.start + chunk.length for chunk in prefill]
    return HostBatch(
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        decode_tables=decode_tables,
        decode_lens=(position + 1).astype(np.int32),
        prefill_tables=prefill_tables,
        prefill_starts=_starts([chunk.length for chunk in prefill]),
        prefill_lens=np.array(lens, dtype=np.int32),
        max_prefill_chunk=max((chunk.length for chunk in prefill), default=0),
        unread=np.array([*zip(*unread)], dtype=np.int64).reshape(2, -1),
        rolling=_rolling([*rows, *prefill], positions),
        states=_states([*decode, *prefill]),
        uses_scratch=any(chunk.scratch for chunk in [*decode, *prefill]),
    )


def draft_batch(chunks: list[Chunk], num_rows: list[int], block_size: int) -> HostBatch:
    """Decode rows for a draft model: of each chunk, whose draft may still grow, its last
    `num_rows` tokens, the draft's included."""
    ends = np.array([chunk.start + chunk.num_rows for chunk in chunks], dtype=np.int64)
    spans = [np.arange(end - num, end) for end, num in zip(ends, num_rows, strict=True)]
    position = np.concatenate(spans)
    rows = [chunk for chunk, num in zip(chunks, num_rows, strict=True) for _ in range(num)]
    token_ids = [
        chunk.seq.token_ids[at] if at <= chunk.start else chunk.drafts[at - chunk.start - 1]
        for chunk, at in zip(rows, position.tolist(), strict=True)
    ]
    tables = np.repeat(_tables(chunks), num_rows, axis=0)
    nothing = np.zeros(0, dtype=np.int32)
    return HostBatch(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=position,
        slots=_slots_of_rows(rows, tables, position, block_size),
        decode_tables=tables,
        decode_lens=(position + 1).astype(np.int32),
        prefill_tables=nothing.reshape(0, 0),
        prefill_starts=_starts([]),
        prefill_lens=nothing,
        max_prefill_chunk=0,
        unread=np.zeros((2, 0), dtype=np.int64),
        rolling=_rolling(rows, [position]),
    )


def _rolling(chunks: list[Chunk], positions: list[Ints]) -> HostRolling | None:
    """What each row sees, if a sequence of the step has evicted tokens; else None. `chunks`: of
    each decode row, then the prefill chunks."""
    if not any(c.seq.context.num_evicted(c.start + c.num_rows - 1) for c in chunks):
        return None
    spans = [*positions[0][:, None], *positions[1:]]
    rows = [chunk.seq.context.rows(span) for chunk, span in zip(chunks, spans, strict=True)]
    sink_ends, window_starts, sink_positions = (np.concatenate(each) for each in zip(*rows))
    per_chunk = [(c.seq.context.num_sink_blocks, c.seq.num_rolled_blocks) for c in chunks]
    sink_blocks, bases = np.array(per_chunk, dtype=np.int32).T
    return HostRolling(
        sink_positions=sink_positions,
        sink_ends=sink_ends.astype(np.int32),
        window_starts=window_starts.astype(np.int32),
        sink_blocks=np.ascontiguousarray(sink_blocks),
        bases=np.ascontiguousarray(bases),
        max_visible_len=int(np.max(np.concatenate(spans) - window_starts)) + 1,
    )


def _tables(chunks: list[Chunk]) -> NDArray[np.int32]:
    """Block tables, int32 [chunks, longest]; entries beyond a sequence's own are 0, unread."""
    longest = max((len(c.seq.block_table) + len(c.scratch) for c in chunks), default=0)
    tables = np.zeros((len(chunks), longest), dtype=np.int32)
    for row, chunk in zip(tables, chunks):
        num_own = len(chunk.seq.block_table)
        row[:num_own] = np.frombuffer(chunk.seq.block_table, dtype=np.int32)
        row[num_own : num_own + len(chunk.scratch)] = chunk.scratch
    return tables


def _slots_of_rows(
    chunks: list[Chunk], tables: NDArray[np.int32], position: Ints, block_size: int
) -> Ints:
    rolled = np.array([chunk.seq.num_rolled_blocks for chunk in chunks], dtype=np.int64)
    sinks = np.array([chunk.seq.context.num_sink_blocks for chunk in chunks], dtype=np.int64)
    page = position // block_size
    entry = page - np.where(page >= sinks, rolled, 0)
    block = tables[np.arange(len(position)), entry].astype(np.int64)
    return block * block_size + position % block_size


def _rolled_before(seq: Sequence, span: Ints, block_size: int) -> Ints:
    """How many blocks before each position are missing in the compact block table."""
    in_window = span // block_size >= seq.context.num_sink_blocks
    return np.where(in_window, seq.num_rolled_blocks, 0)


def measured_batch(num_rows: int, num_keys: int, block_size: int, *, has_states: bool) -> HostBatch:
    """Decode rows that see `num_keys` keys each, all in block 0, where they write: for
    measurements. `has_states`: they keep no state."""
    zeros, lens = np.zeros(num_rows, dtype=np.int64), np.full(num_rows, num_keys, dtype=np.int32)
    nothing = np.zeros(0, dtype=np.int32)
    states = None
    if has_states:
        fresh = np.full(num_rows, -1, dtype=np.int32)
        no_writes = np.zeros(num_rows + 1, dtype=np.int32)
        states = HostStates(_starts([1] * num_rows), fresh, no_writes, nothing, nothing)
    return HostBatch(
        token_ids=zeros,
        positions=zeros,
        slots=zeros,
        decode_tables=np.zeros((num_rows, -(-num_keys // block_size)), dtype=np.int32),
        decode_lens=lens,
        prefill_tables=nothing.reshape(0, 1),
        prefill_starts=_starts([]),
        prefill_lens=nothing,
        max_prefill_chunk=0,
        unread=np.zeros((2, 0), dtype=np.int64),
        rolling=None,
        states=states,
    )
