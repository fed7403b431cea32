"""What the first rank of a group tells the others: plain arrays after a header of numbers.

A message is its length, its kind and its contents, over a pair of connected sockets. No pickle: who
reads takes numbers and arrays, whose sizes the header gives.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.delta_types import StateRows
from penstock.kernels.types import DecodeBatch, PrefillBatch
from penstock.workers.errors import InvariantError
from penstock.workers.models.layers import AttentionInputs, RollingInputs

SETTINGS, READY, CONNECT, MEMORY, STEP, LOGITS, HOST, STORE, LOAD = range(9)
_HEAD = struct.Struct("<qq")  # bytes of the contents, kind
_STEP = struct.Struct("<10q")
NO_STATES = -1  # in place of the number of states that a step writes
LARGEST = 1 << 30  # bytes of a message
CPU = torch.device("cpu")


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


def send_json(peer: socket.socket, kind: int, value: Any) -> None:
    send(peer, kind, json.dumps(value).encode())


def step_bytes(token_ids: Tensor, positions: Tensor, inputs: AttentionInputs) -> bytes:
    """A step of one batch; its arrays are copied from their device."""
    decode, prefill, rolling = inputs.decode, inputs.prefill, inputs.rolling
    states = inputs.states
    head = _STEP.pack(
        len(token_ids),
        inputs.num_decode,
        decode.block_tables.shape[1],
        decode.max_context_len,
        prefill.context_lens.numel(),
        prefill.block_tables.shape[1],
        prefill.max_query_len,
        rolling is not None,
        0 if rolling is None else rolling.max_visible_len,
        NO_STATES if states is None else states.write_slots.numel(),
    )
    arrays = _arrays(token_ids, positions, inputs)
    return b"".join([head, *(each.contiguous().cpu().numpy().tobytes() for each in arrays)])


def step_from(
    contents: bytes, device: torch.device = CPU
) -> tuple[Tensor, Tensor, AttentionInputs]:
    """The inverse of `step_bytes`, on `device`. Raises InvariantError for a message of another
    length."""
    rows, num_decode, width, longest, chunks, chunk_width, largest, has_rolling, visible, writes = (
        _STEP.unpack_from(contents)
    )
    sequences = num_decode + chunks
    reader = _Reader(contents, _STEP.size, device)
    ids, positions, slots = (reader.take(torch.int64, rows) for _ in range(3))
    decode = DecodeBatch(
        reader.take(torch.int32, num_decode, width), reader.take(torch.int32, num_decode), longest
    )
    prefill = PrefillBatch(
        reader.take(torch.int32, chunks, chunk_width),
        reader.take(torch.int32, chunks + 1),
        reader.take(torch.int32, chunks),
        largest,
    )
    rolling = None
    if has_rolling:
        rolling = RollingInputs(
            reader.take(torch.int64, rows),
            reader.take(torch.int32, rows),
            reader.take(torch.int32, rows),
            reader.take(torch.int32, sequences),
            reader.take(torch.int32, sequences),
            visible,
        )
    states = None
    if writes != NO_STATES:
        sizes = sequences + 1, sequences, sequences + 1, writes, writes
        states = StateRows(*(reader.take(torch.int32, size) for size in sizes))
    reader.end()
    return ids, positions, AttentionInputs(slots, num_decode, decode, prefill, rolling, states)


def pairs_bytes(sources: Sequence[int], targets: Sequence[int]) -> bytes:
    """Numbers of blocks and slots, or of slots and blocks, that are copied."""
    return np.array([list(sources), list(targets)], dtype=np.int64).tobytes()


def pairs_from(contents: bytes) -> list[tuple[int, int]]:
    """The inverse."""
    sources, targets = np.frombuffer(contents, np.int64).reshape(2, -1).tolist()
    return list(zip(sources, targets, strict=True))


def _arrays(token_ids: Tensor, positions: Tensor, inputs: AttentionInputs) -> list[Tensor]:
    decode, prefill, rolling = inputs.decode, inputs.prefill, inputs.rolling
    arrays = [token_ids, positions, inputs.slots, decode.block_tables, decode.context_lens]
    arrays += [prefill.block_tables, prefill.query_starts, prefill.context_lens]
    if rolling is not None:
        arrays += [rolling.sink_positions, rolling.sink_ends, rolling.window_starts]
        arrays += [rolling.sink_blocks, rolling.bases]
    if (states := inputs.states) is not None:
        arrays += [states.starts, states.sources, states.write_starts]
        arrays += [states.write_after, states.write_slots]
    return arrays


class _Reader:
    """Arrays one after another."""

    def __init__(self, contents: bytes, at: int, device: torch.device):
        self._contents, self._at, self._device = contents, at, device

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        count = int(np.prod(shape))
        kind = np.int64 if dtype == torch.int64 else np.int32
        end = self._at + count * dtype.itemsize
        if end > len(self._contents) or count < 0:
            raise InvariantError("a step's message is too short")
        found = np.frombuffer(self._contents, kind, count, self._at).copy()
        self._at = end
        return torch.from_numpy(found).view(shape).to(self._device)

    def end(self) -> None:
        if self._at != len(self._contents):
            raise InvariantError("a step's message is too long")


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
