"""Copies of KV blocks in host memory (the host tier), evicted least recently used first.

Two kinds of entries. Content: one block each, addressed and compared as in `PrefixIndex`, for
prefix blocks that are evicted from the device. Private: all blocks of one swapped sequence under
its id, kept or evicted together. For one thread; only a `CopyThread` reads held slots in parallel.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.workers.errors import ConfigError, InvariantError
from penstock.workers.memory.block_pool import ContentKey
from penstock.workers.memory.copier import CopyThread, Transfer


@dataclass(slots=True, eq=False)
class _HostEntry:
    name: bytes | str  # the key of content, or the owner of private blocks
    slots: list[int]
    parent: bytes = b""
    token_ids: bytes = b""
    num_holds: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class HeldSlots:
    """Slots that do not change until `HostTier.release`; in the order of the request."""

    slots: tuple[int, ...]
    entries: tuple[_HostEntry, ...]


@dataclass(frozen=True, slots=True)
class TierStats:
    """Levels now, and counters since the start."""

    num_slots: int
    num_used: int
    num_content: int  # entries, each of one block
    num_private: int  # entries
    bytes_in: int
    bytes_out: int
    num_hit_blocks: int
    num_missed_blocks: int
    num_evicted_blocks: int
    num_refused_blocks: int  # not stored, because all slots were held or there were too few


class HostMirror(Protocol):
    """The other ranks of a group: each keeps its part of a block in the slot of the same number.

    They copy between two steps, in the order of the calls, and before the next step.
    """

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """From device blocks into slots."""

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """From slots into device blocks."""


class HostTier:
    """`capacity_bytes` // `block_bytes` slots in one uint8 tensor [num_slots, block_bytes].

    Every slot is free, or belongs to exactly one entry: an indexed entry, or one that was discarded
    while held. Held entries are never evicted. `pin`: page-locked memory, if CUDA is available.
    """

    def __init__(self, capacity_bytes: int, block_bytes: int, *, pin: bool = False):
        self.num_slots = capacity_bytes // block_bytes
        if self.num_slots < 1:
            raise ConfigError(
                f"host_kv_gb: {capacity_bytes} bytes hold no block of {block_bytes} bytes; give "
                "more, or leave it out to use no host memory"
            )
        self.block_bytes = block_bytes
        self.is_pinned = pin and torch.cuda.is_available()
        try:
            self.storage = torch.empty(
                self.num_slots, block_bytes, dtype=torch.uint8, pin_memory=self.is_pinned
            )
        except RuntimeError as error:
            raise ConfigError(
                f"host_kv_gb: {capacity_bytes / 2**30:.2f} GiB of host memory cannot be had; give "
                "less"
            ) from error
        self._free = list(range(self.num_slots))  # a heap
        self._entries: OrderedDict[bytes | str, _HostEntry] = OrderedDict()  # oldest use first
        self._discarded: set[_HostEntry] = set()  # but still held
        self._num_held: dict[int, int] = {}  # slot -> holds
        self._bytes_in = self._bytes_out = 0
        self._num_hits = self._num_misses = self._num_evicted = self._num_refused = 0

    # -- in

    def put(self, key: bytes, parent: bytes, token_ids: bytes, block: Tensor) -> bool:
        """Store a copy of one block, uint8 [block_bytes], under its content key; returns whether it
        is stored.

        An existing copy is kept, and counts as used. A key that other content has taken keeps that
        content, as in `PrefixIndex`. Also False if every slot is held. The copy is complete when
        this returns.
        """
        entry = self._entries.get(key)
        if entry is not None:
            if (entry.parent, entry.token_ids) != (parent, token_ids):
                return False
            self._entries.move_to_end(key)
            return True
        return self._put(_HostEntry(key, [], parent, token_ids), [block])

    def put_private(self, owner: str, blocks: Sequence[Tensor]) -> bool:
        """Store copies of all `blocks` of a sequence; stores none and returns False if they do not
        fit.

        `owner` must have no entry yet.
        """
        if owner in self._entries:
            raise InvariantError(f"{owner} is in host memory already")
        return self._put(_HostEntry(owner, []), blocks)

    def _put(self, entry: _HostEntry, blocks: Sequence[Tensor]) -> bool:
        for block in blocks:
            self._check_block(block)
        if not self._make_room(len(blocks)):
            self._num_refused += len(blocks)
            return False
        entry.slots = [heapq.heappop(self._free) for _ in blocks]
        try:
            with torch.inference_mode():
                for slot, block in zip(entry.slots, blocks):
                    self.storage[slot].copy_(block)
        except BaseException:
            self._give_back(entry)
            raise
        self._entries[entry.name] = entry
        self._bytes_in += len(blocks) * self.block_bytes
        return True

    def _make_room(self, num_blocks: int) -> bool:
        """Evict until `num_blocks` slots are free; if that is impossible, change nothing and return
        False."""
        if num_blocks > self.num_slots - len(self._num_held):
            return False
        while len(self._free) < num_blocks:
            oldest = next(entry for entry in self._entries.values() if not entry.num_holds)
            del self._entries[oldest.name]
            self._num_evicted += len(oldest.slots)
            self._give_back(oldest)
        return True

    # -- out

    def slots_of(self, name: bytes | str) -> tuple[int, ...]:
        """Those of a stored content key or owner."""
        return tuple(self._entries[name].slots)

    def match(self, chain: Sequence[ContentKey]) -> int:
        """How many leading blocks of `chain` are stored. Does not count as use."""
        return len(self._leading(chain))

    def hold(self, chain: Sequence[ContentKey]) -> HeldSlots:
        """Hold the leading blocks of `chain` that are stored. They count as used, the first one
        most recently, so that a chain is evicted from its end."""
        entries = self._leading(chain)
        for entry in reversed(entries):
            self._entries.move_to_end(entry.name)
        self._num_hits += len(entries)
        self._num_misses += len(chain) - len(entries)
        return self._hold(entries)

    def hold_private(self, owner: str) -> HeldSlots | None:
        """Hold all blocks of `owner`, in order; None if they were evicted or never stored."""
        entry = self._entries.get(owner)
        if entry is None:
            self._num_misses += 1
            return None
        self._entries.move_to_end(owner)
        self._num_hits += len(entry.slots)
        return self._hold([entry])

    def load(
        self, slots: Sequence[int], outs: Sequence[Tensor], copier: CopyThread | None = None
    ) -> Transfer | None:
        """Copy held slots into `outs`, each uint8 [block_bytes]: at once, or with `copier`.

        Release the slots only when the transfer is done.
        """
        if len(slots) != len(outs):
            raise InvariantError("slots and destinations differ in number")
        if not all(slot in self._num_held for slot in slots):
            raise InvariantError("a slot that is not held")
        for out in outs:
            self._check_block(out)
        self._bytes_out += len(slots) * self.block_bytes
        pairs = [(self.storage[slot], out) for slot, out in zip(slots, outs)]
        if copier is not None:
            return copier.submit(pairs)
        with torch.inference_mode():
            for source, out in pairs:
                out.copy_(source)
        return None

    def release(self, held: HeldSlots) -> None:
        """End a hold; call once for each."""
        for entry in held.entries:
            if entry.num_holds <= 0:
                raise InvariantError(f"{entry.name!r} released twice")
            entry.num_holds -= 1
            for slot in entry.slots:
                self._num_held[slot] -= 1
                if not self._num_held[slot]:
                    del self._num_held[slot]
            if entry in self._discarded and not entry.num_holds:
                self._discarded.remove(entry)
                self._give_back(entry)

    def discard(self, name: bytes | str) -> bool:
        """Remove a content key or an owner; returns whether it existed. Held slots stay."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        if entry.num_holds:
            self._discarded.add(entry)
        else:
            self._give_back(entry)
        return True

    def __contains__(self, name: bytes | str) -> bool:
        return name in self._entries

    # -- accounts

    @property
    def num_used(self) -> int:
        """Slots that hold a copy."""
        return self.num_slots - len(self._free)

    def stats(self) -> TierStats:
        num_content = sum(isinstance(name, bytes) for name in self._entries)
        return TierStats(
            num_slots=self.num_slots,
            num_used=self.num_used,
            num_content=num_content,
            num_private=len(self._entries) - num_content,
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            num_hit_blocks=self._num_hits,
            num_missed_blocks=self._num_misses,
            num_evicted_blocks=self._num_evicted,
            num_refused_blocks=self._num_refused,
        )

    def check(self) -> None:
        """Assert that every slot is accounted for once, and that holds add up."""
        entries = [*self._entries.values(), *self._discarded]
        slots = self._free + [slot for entry in entries for slot in entry.slots]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost, or in two places"
        holds = {slot: e.num_holds for e in entries if e.num_holds for slot in e.slots}
        assert holds == self._num_held, "holds differ from the entries'"
        assert all(entry.num_holds for entry in self._discarded), "discarded, but not held"
        assert all(name == entry.name for name, entry in self._entries.items())
        for entry in entries:
            assert isinstance(entry.name, str) or len(entry.slots) == 1

    def _leading(self, chain: Sequence[ContentKey]) -> list[_HostEntry]:
        found = []
        for key, parent, token_ids in chain:
            entry = self._entries.get(key)
            if entry is None or (entry.parent, entry.token_ids) != (parent, token_ids):
                break
            found.append(entry)
        return found

    def _hold(self, entries: Sequence[_HostEntry]) -> HeldSlots:
        for entry in entries:
            entry.num_holds += 1
            for slot in entry.slots:
                self._num_held[slot] = self._num_held.get(slot, 0) + 1
        return HeldSlots(tuple(slot for e in entries for slot in e.slots), tuple(entries))

    def _give_back(self, entry: _HostEntry) -> None:
        for slot in entry.slots:
            heapq.heappush(self._free, slot)

    def _check_block(self, block: Tensor) -> None:
        if block.dtype != torch.uint8 or block.shape != (self.block_bytes,):
            raise ValueError(
                f"a block is uint8 [{self.block_bytes}]; got {block.dtype} {list(block.shape)}"
            )
