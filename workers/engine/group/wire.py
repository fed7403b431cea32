"""What the first rank of a group tells the others: plain arrays after a header of numbers.

A message is its length, its kind and its contents, over a pair of connected sockets. No pickle: who
reads takes numbers and arrays, whose sizes the header gives.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.workers.errors import InvariantError
from penstock.workers.models.host_batch import GroupStep, HostBatch, HostRolling, HostStates

SETTINGS, READY, CONNECT, MEMORY, STEP, LOGITS, HOST, STORE, LOAD, CAPTURE = range(10)
DRAFT_STEP, DRAFT_LOGITS = 10, 11  # of the draft model, if all ranks have a part of it
EXPERTS = 15  # another epoch of the file that expert caches are filled from
PREFETCH = 16  # whether experts are predicted and prefetched: a byte
OF_ADAPTERS = LOAD_ADAPTER, DROP_ADAPTERS, STEP_ADAPTERS = 12, 13, 14  # adapters.py
PULSE, FAILED = -1, -2
_HEAD = struct.Struct("<qq")  # bytes of the contents, kind
_STEP = struct.Struct("<8q")
_ARRAY = struct.Struct("<4q")  # whether of int64, whether of two dimensions, rows, columns
LARGEST = 1 << 30  # bytes of a message
_ARRAYS: dict[type, tuple[str, ...]] = {  # int64 or int32, in the order in which they travel
    HostBatch: (
        "token_ids", "positions", "slots", "decode_tables", "decode_lens", "prefill_tables",
        "prefill_starts", "prefill_lens",
    ),
    HostRolling: ("sink_positions", "sink_ends", "window_starts", "sink_blocks", "bases"),
    HostStates: ("starts", "sources", "write_starts", "write_after", "write_slots"),
}  # fmt: skip


class PeerGone(Exception):
    """The other end has closed the connection."""


def send(peer: socket.socket, kind: int, contents: bytes = b"") -> None:
    """Raises PeerGone."""
    try:
        peer.sendall(_HEAD.pack(len(contents), kind) + contents)
    except OSError as error:
        raise PeerGone(str(error)) from error


def receive(peer: socket.socket) -> tuple[int, bytes]:
    """Kind and contents. Raises PeerGone."""
    size, kind = _HEAD.unpack(exactly(peer, _HEAD.size))
    if not 0 <= size <= LARGEST:
        raise PeerGone(f"a message of {size} bytes")
    return kind, exactly(peer, size)


def step_bytes(step: GroupStep) -> bytes:
    """Its arrays one after another, each behind its kind and shape."""
    batch = step.batch
    parts = [batch, *(each for each in (batch.rolling, batch.states) if each is not None)]
    head = _STEP.pack(
        step.is_graph,
        step.shares_ids,
        batch.max_prefill_chunk,
        batch.rolling is not None,
        0 if batch.rolling is None else batch.rolling.max_visible_len,
        batch.states is not None,
        batch.uses_scratch,
        step.modes is not None,
    )
    arrays = [getattr(part, name) for part in parts for name in _ARRAYS[type(part)]]
    if step.modes is not None:
        arrays.append(step.modes)
    found = [head]
    for array in arrays:
        is_table = array.ndim == 2
        rows, columns = array.shape if is_table else (len(array), 1)
        found.append(_ARRAY.pack(array.dtype == np.int64, is_table, rows, columns))
        found.append(np.ascontiguousarray(array).tobytes())
    return b"".join(found)


def step_from(contents: bytes) -> GroupStep:
    """The inverse of `step_bytes`. Raises InvariantError for a message of another length."""
    reader = _Reader(contents)
    head = reader.numbers(_STEP)
    is_graph, shares_ids, longest, has_rolling, visible, has_states, uses_scratch, has_modes = head
    arrays = {name: reader.array() for name in _ARRAYS[HostBatch]}
    rolling, states = None, None
    if has_rolling:
        found = {name: reader.array() for name in _ARRAYS[HostRolling]}
        rolling = HostRolling(**found, max_visible_len=visible)
    if has_states:
        states = HostStates(**{name: reader.array() for name in _ARRAYS[HostStates]})
    modes = reader.array() if has_modes else None
    reader.end()
    unread = np.empty((2, 0), dtype=np.int64)
    batch = HostBatch(
        **arrays,
        max_prefill_chunk=longest,
        unread=unread,
        rolling=rolling,
        states=states,
        uses_scratch=bool(uses_scratch),
    )
    return GroupStep(batch, modes, bool(is_graph), bool(shares_ids))


def pairs_bytes(sources: Sequence[int], targets: Sequence[int]) -> bytes:
    """Numbers of blocks and slots, or of slots and blocks, that are copied."""
    return np.array([list(sources), list(targets)], dtype=np.int64).tobytes()


def pairs_from(contents: bytes) -> list[tuple[int, int]]:
    """The inverse."""
    sources, targets = np.frombuffer(contents, np.int64).reshape(2, -1).tolist()
    return list(zip(sources, targets, strict=True))


class _Reader:
    """Numbers and arrays, one after another."""

    def __init__(self, contents: bytes):
        self._contents, self._at = contents, 0

    def numbers(self, form: struct.Struct) -> tuple[int, ...]:
        at = self._advance(form.size)
        return form.unpack_from(self._contents, at)

    def array(self) -> NDArray[Any]:
        is_wide, is_table, rows, columns = self.numbers(_ARRAY)
        kind = np.dtype(np.int64 if is_wide else np.int32)
        if rows < 0 or columns < 0:
            raise InvariantError("a step's message has an array of a negative size")
        count = rows * columns
        at = self._advance(count * kind.itemsize)
        found = np.frombuffer(self._contents, kind, count, at).copy()
        return found.reshape(rows, columns) if is_table else found

    def end(self) -> None:
        if self._at != len(self._contents):
            raise InvariantError("a step's message is too long")

    def _advance(self, size: int) -> int:
        """Where the next `size` bytes begin."""
        at = self._at
        if at + size > len(self._contents):
            raise InvariantError("a step's message is too short")
        self._at += size
        return at


def exactly(peer: socket.socket, size: int) -> bytes:
    """The next `size` bytes. Raises PeerGone."""
    parts, left = [], size
    while left:
        try:
            part = peer.recv(left)
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not part:
            raise PeerGone("the other end has closed the connection")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
