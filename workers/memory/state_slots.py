"""Recurrent states beside the KV blocks: one slot holds the states of all linear-attention layers
after some number of tokens. Which slot is free, live, or a snapshot; and the slots' memory.

A slot is never changed once a step has written it: the next step reads it and writes another. So
sequences can share the state after a prefix, and a step that failed can run again.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

import torch

from penstock.kernels.delta_types import DeltaState
from penstock.workers.errors import InvariantError
from penstock.workers.families.linear_attention import LinearAttentionConfig

ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where the states of each layer lie inside a slot: per layer the matrices in fp32, then the
    newest inputs of the convolution in `dtype`; each rounded up to 256 bytes."""

    num_layers: int
    shape: LinearAttentionConfig
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        return self.num_layers * self._layer_bytes

    @property
    def _matrix_bytes(self) -> int:
        return _aligned(self.shape.state_elements * torch.float32.itemsize)

    @property
    def _layer_bytes(self) -> int:
        return self._matrix_bytes + _aligned(self.shape.kept_elements * self.dtype.itemsize)

    def views(self, memory: torch.Tensor) -> list[DeltaState]:
        """Each layer's states in `memory`, uint8 [slots, slot_bytes]."""
        shape, each = self.shape, []
        for layer in range(self.num_layers):
            at = layer * self._layer_bytes
            matrix = memory[:, at : at + 4 * shape.state_elements].view(torch.float32)
            at += self._matrix_bytes
            last = memory[:, at : at + shape.kept_elements * self.dtype.itemsize].view(self.dtype)
            each.append(
                DeltaState(
                    last.unflatten(1, (shape.taps - 1, shape.channels)),
                    matrix.unflatten(1, (shape.num_value_heads, shape.key_dim, shape.value_dim)),
                )
            )
        return each


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class StatePool:
    """Reference-counted slots. Every slot is free, live (reference count above zero), or a snapshot
    without a user: found by the key of the prefix whose state it holds, and evicted, the longest
    unused first, when no slot is free."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = list(range(num_slots))  # a sorted list is a heap
        self._unused: OrderedDict[int, None] = OrderedDict()  # snapshots, by their last use
        self._references = [0] * num_slots
        self._slot_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.num_evicted = 0

    @property
    def num_available(self) -> int:
        """Slots that `allocate` can hand out now."""
        return len(self._free) + len(self._unused)

    @property
    def num_snapshots(self) -> int:
        return len(self._slot_of)

    def allocate(self) -> int:
        """A slot with garbage in it, reference count 1. Call only while `num_available` > 0."""
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = next(iter(self._unused))
            self._forget(slot)
            heapq.heappop(self._free)
            self.num_evicted += 1
        self._references[slot] = 1
        return slot

    def retain(self, slot: int) -> None:
        """One more user of a live slot or of a snapshot."""
        self._unused.pop(slot, None)
        self._references[slot] += 1

    def release(self, slot: int) -> None:
        """Remove one user; without users the slot is a snapshot if it has a key, else free."""
        if self._references[slot] <= 0:
            raise InvariantError(f"state slot {slot} released twice")
        self._references[slot] -= 1
        if self._references[slot]:
            return
        if slot in self._key_of:
            self._unused[slot] = None
        else:
            heapq.heappush(self._free, slot)

    def name(self, slot: int, key: bytes) -> bool:
        """Make a live slot the snapshot of `key`; False if there is one, or it has another key."""
        if key in self._slot_of or slot in self._key_of:
            return False
        self._slot_of[key], self._key_of[slot] = slot, key
        return True

    def find(self, key: bytes) -> int | None:
        return self._slot_of.get(key)

    def forget(self, key: bytes) -> None:
        """Drop the snapshot of `key`; its slot is free if no sequence uses it."""
        slot = self._slot_of.get(key)
        if slot is not None:
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        del self._slot_of[self._key_of.pop(slot)]
        if slot in self._unused:
            del self._unused[slot]
            heapq.heappush(self._free, slot)

    def check(self, users: list[int]) -> None:
        """Assert that the states are consistent. `users`: the slots of all users, each as often as
        it is used."""
        free, unused = set(self._free), set(self._unused)
        assert len(free) == len(self._free) and not free & unused, "a slot is free twice"
        for slot, references in enumerate(self._references):
            assert references == users.count(slot), f"slot {slot}: {references} references"
            assert (slot in free or slot in unused) == (references == 0), f"slot {slot} is lost"
        assert unused <= set(self._key_of), "an unused slot cannot be found"
        assert {slot: key for key, slot in self._slot_of.items()} == self._key_of
