"""The expert slots of a device: which expert is in which slot, and which of its rows are present.

Tables only: no thread, no copy, no clock. Callers hold the cache's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.moe.mlp import Expert
from penstock.workers.experts.expert_file import RowIndices
from penstock.workers.experts.layouts import ExpertLayout

Key = tuple[int, int]  # layer, expert


class LoadTarget(Protocol):
    """Where rows of one expert are loaded to: its slot, or its places in a pool of neurons."""

    load: SlotLoad | None  # in progress
    error: Exception | None  # of the last load

    @property
    def last_use(self) -> torch.cuda.Event | None:
        """Kernels launched before it may read what is written next."""

    def write(self, layout: ExpertLayout, rows: Tensor, part: RowIndices, is_copy: bool) -> None:
        """Write the rows `part` of the expert, uint8 [n, bytes of a row], on the device."""

    def arrived(self, part: RowIndices) -> None:
        """These rows are present from now on."""

    def ended(self) -> None:
        """Its load is over, with all rows or without."""


@dataclass(slots=True, eq=False)
class Slot:
    """Device memory of one expert. It may be given to another expert only while it `is_idle`."""

    memory: torch.Tensor  # uint8
    # The packed weights in it, always in the same place; by kind of layer (layouts.py).
    experts: tuple[Expert, ...]
    has: npt.NDArray[np.bool_]  # which rows are present: neurons, or pieces of a packed expert
    key: Key | None = None
    num_has: int = 0
    num_users: int = 0
    load: SlotLoad | None = None  # the load in progress
    was_prefetched: bool = False  # and not used yet
    error: Exception | None = None  # of the last load
    last_use: torch.cuda.Event | None = None  # kernels launched before it may read the slot

    @property
    def widest(self) -> Expert:
        """Of `experts`, the one with the most bytes."""
        return max(self.experts, key=lambda expert: sum(packed.num_bytes for packed in expert))

    @property
    def is_whole(self) -> bool:
        return self.num_has == len(self.has)

    @property
    def is_idle(self) -> bool:
        """Neither in use nor loading."""
        return not self.num_users and self.load is None

    def holds(self, needed_rows: RowIndices | None = None) -> bool:
        """Whether these rows are present; None: all rows."""
        return self.is_whole if needed_rows is None else bool(self.has[needed_rows].all())

    def missing(self, needed_rows: RowIndices | None = None) -> RowIndices:
        """Rows that are not present: of `needed_rows`, or of all."""
        if needed_rows is None:
            return np.flatnonzero(~self.has)
        return needed_rows[~self.has[needed_rows]]

    def write(self, layout: ExpertLayout, rows: Tensor, part: RowIndices, is_copy: bool) -> None:
        places = torch.from_numpy(part).to(rows.device)
        layout.write(self.memory, self.experts[0], rows, places, is_copy)

    def arrived(self, part: RowIndices) -> None:
        self.has[part] = True
        self.num_has = int(np.count_nonzero(self.has))

    def ended(self) -> None: ...


@dataclass(slots=True, eq=False)
class SlotLoad:
    """A load in progress: rows of one expert into its slot, or into a pool of neurons."""

    slot: LoadTarget
    key: Key
    row_indices: RowIndices  # the first ones go first
    is_demand: bool
    num_done: int = 0
    num_active: int = 0  # rows of the chunk that is being copied
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class SlotTable:
    """Slots by key, the least recently used first."""

    slots: Sequence[Slot]
    layer_share: int | None = (
        None  # slots that a layer keeps while others hold more; None: plain LRU
    )
    _by_key: OrderedDict[Key, Slot] = field(default_factory=OrderedDict)
    _free: list[Slot] = field(init=False)
    _of_layer: dict[int, int] = field(default_factory=dict)  # occupied slots

    def __post_init__(self) -> None:
        self._free = list(reversed(self.slots))

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def get(self, key: Key) -> Slot | None:
        return self._by_key.get(key)

    def touch(self, key: Key) -> None:
        """Mark the expert as the most recently used."""
        self._by_key.move_to_end(key)

    def take(self, key: Key, keep: Set[Key] = frozenset()) -> Slot | None:
        """An empty slot for the expert `key`, which has none: a free slot, or the slot of the least
        recently used expert that is idle and not in `keep`. None if there is none.

        With a layer share, the victim is of the same layer if that layer has its share, or of a
        layer that holds more than its share; another expert is evicted only if there is neither.
        """
        slot = self._free.pop() if self._free else self._victim(key[0], keep)
        if slot is None:
            return None
        if slot.key is not None:
            self._leave(slot)
        slot.key = key
        slot.has[:] = False
        slot.num_has, slot.was_prefetched = 0, False
        self._by_key[key] = slot
        self._of_layer[key[0]] = self._of_layer.get(key[0], 0) + 1
        return slot

    def give_back(self, slot: Slot) -> None:
        """Free a slot that holds nothing of use."""
        assert slot.is_idle and slot.key is not None
        self._leave(slot)
        slot.key = None
        self._free.append(slot)

    def check(self) -> None:
        """Assert that each slot is free or in use, and that its contents match the tables."""
        assert len(self._by_key) + len(self._free) == len(self.slots)
        assert not {id(s) for s in self._free} & {id(s) for s in self._by_key.values()}
        for key, slot in self._by_key.items():
            assert slot.key == key and slot.num_has == np.count_nonzero(slot.has)
            assert slot.load is None or (slot.load.slot is slot and slot.load.key == key)
        layers = [key[0] for key in self._by_key]
        assert {k: n for k, n in self._of_layer.items() if n} == {
            k: layers.count(k) for k in layers
        }

    def _leave(self, slot: Slot) -> None:
        assert slot.key is not None and slot.is_idle
        del self._by_key[slot.key]
        self._of_layer[slot.key[0]] -= 1

    def _victim(self, layer: int, keep: Set[Key]) -> Slot | None:
        fallback = None
        for key, slot in self._by_key.items():
            if not slot.is_idle or key in keep:
                continue
            if self.layer_share is None:
                return slot
            if self._of_layer[key[0]] + (key[0] == layer) > self.layer_share:
                return slot
            fallback = fallback or slot
        return fallback


def make_slots(num_slots: int, num_rows: int, layout: ExpertLayout) -> list[Slot]:
    """Slots for experts of `num_rows` rows, in one zeroed allocation."""
    memory = torch.zeros(num_slots, layout.num_bytes, dtype=torch.uint8, device=layout.device)
    return [Slot(part, layout.place(part), np.zeros(num_rows, dtype=bool)) for part in memory]
