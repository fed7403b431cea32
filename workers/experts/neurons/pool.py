"""A pool of neurons of all experts: which are there, and how those that are missing come.

A place holds the row of one neuron: memory of a given size holds the neurons that are used of many
experts, where slots of whole experts hold few. places.py says where each lies and which give way.
Loads run on the expert cache's copier, under its lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.workers.experts.copier import ExpertCopier
from penstock.workers.experts.expert_file import Manifest, RowIndices
from penstock.workers.experts.layouts import ExpertLayout
from penstock.workers.experts.lookups import CacheCounts
from penstock.workers.experts.neurons.places import Places, PlaceTable
from penstock.workers.experts.slots import Key, SlotLoad

# By expert: neurons that a step needs of it, in parts that are used one after another.
NeededParts = Mapping[int, Sequence[RowIndices]]


class PooledExpert:
    """One expert's neurons in the pool: where rows of it are loaded to."""

    __slots__ = (
        "awaited", "error", "has", "index", "key", "load", "places", "pool", "was_prefetched",
    )  # fmt: skip

    def __init__(self, pool: NeuronPool, key: Key, index: int):
        self.pool, self.key, self.index = pool, key, index
        self.places: Places = pool.table.places[index]
        self.has: npt.NDArray[np.bool_] = pool.table.has[index]
        self.load: SlotLoad | None = None
        self.awaited: RowIndices | None = None  # the part that a visit uses next
        self.error: Exception | None = None
        self.was_prefetched = False

    @property
    def last_use(self) -> torch.cuda.Event | None:
        return self.pool.last_use

    def missing(self, rows: RowIndices) -> RowIndices:
        return rows[~self.has[rows]]

    def write(self, layout: ExpertLayout, rows: Tensor, part: RowIndices, is_copy: bool) -> None:
        places = torch.from_numpy(self.places[part].astype(np.int64)).to(rows.device)
        self.pool.rows.index_copy_(0, places, rows)

    def arrived(self, part: RowIndices) -> None:
        self.has[part] = True
        if self.awaited is not None and self.has[self.awaited].all():
            self.pool.copier.changed.notify_all()

    def ended(self) -> None:
        self.pool.table.free_unfilled(self.index)


class NeuronPool:
    """Rows of neurons on one device, filled by `copier`, whose lock callers do not hold."""

    def __init__(self, copier: ExpertCopier, facts: Manifest, num_places: int, counts: CacheCounts):
        """`num_places`: at least the neurons of one expert; more than those of all are not used.
        `counts`: lookups are counted there."""
        num_places = min(num_places, facts.num_all * facts.inner)
        assert num_places >= facts.inner and (facts.copies or not facts.is_packed)
        self.facts, self.copier = facts, copier
        # Packed experts have no neurons of their own: those of their copies are taken.
        self.format = facts.copies if facts.is_packed else facts.dtype  # kernels/neurons.py
        self._first = facts.num_experts if facts.is_packed else 0  # the file's id for expert 0
        self.rows = torch.zeros(
            num_places,
            facts.row_bytes_of(self._first),
            dtype=torch.uint8,
            device=copier.layout.device,
        )
        self.counts = counts
        self.last_use: torch.cuda.Event | None = None  # kernels launched before it may read rows
        self.table = PlaceTable(num_places, facts.num_all, facts.inner)
        self.experts = {key: PooledExpert(self, key, i) for i, key in enumerate(facts.experts())}
        self._pinned: dict[Key, RowIndices] = {}
        self._prefetch_queue: deque[tuple[Key, RowIndices]] = deque()

    @property
    def num_places(self) -> int:
        return self.table.num_places

    def visit(
        self,
        layer: int,
        needed: NeededParts,
        meanwhile: Callable[[], None] | None = None,
    ) -> Iterator[tuple[int, int, Places]]:
        """Yields each part of each of the `needed` experts of a layer once: the expert, the number
        of the part, and the places of its neurons, which are there. Parts of an expert come in
        their order, and are loaded in it. As `ExpertCache.visit`."""
        rows = {e: parts[0] if len(parts) == 1 else np.concatenate(parts)
                for e, parts in needed.items()}  # fmt: skip
        waiting, pinned = deque(needed), deque[int]()
        left = {expert: deque(enumerate(parts)) for expert, parts in needed.items()}
        with self.copier.changed:
            for key in list(self._pinned):  # of a visit that was abandoned
                self._unpin(key)
            self._drop_stale(layer, rows)
            self._count(layer, rows)
            self._claim(layer, waiting, pinned, rows)
        if meanwhile is not None:
            meanwhile()
        while waiting or pinned:
            with self.copier.changed:
                expert = self._next_ready(layer, waiting, pinned, rows, left)
            part, _ = left[expert].popleft()
            yield expert, part, self.experts[layer, expert].places
            if left[expert]:
                continue
            pinned.remove(expert)
            with self.copier.changed:
                self._unpin((layer, expert))
                self._claim(layer, waiting, pinned, rows)
                self.start_prefetches()

    def prefetch(self, layer: int, wanted: Sequence[tuple[int, RowIndices]]) -> None:
        """Load these neurons of experts of `layer`, in their order, whenever the host link is idle,
        until the next call or the visit of that layer."""
        with self.copier.changed:
            self._prefetch_queue.clear()
            for expert, rows in wanted:
                if (layer, expert) in self.experts and len(rows):
                    self._prefetch_queue.append(((layer, expert), rows))
            self.start_prefetches()

    def forget_prefetches(self) -> None:
        """Begin none of those that are queued; the lock is held."""
        self._prefetch_queue.clear()

    def check(self) -> None:
        """Assert that the tables agree with one another."""
        with self.copier.changed:
            self.table.check()

    # -- all methods below: with the lock held

    def start_prefetches(self) -> None:
        """Begin the next prefetch, if the host link is idle."""
        while self._prefetch_queue and not self.copier.is_busy:
            key, rows = self._prefetch_queue.popleft()
            expert = self.experts[key]
            missing = expert.missing(rows)
            if expert.load is None and len(missing) and self.table.give(expert.index, rows):
                expert.was_prefetched = True
                self.counts.num_prefetched += 1
                self._load(expert, missing, is_demand=False)

    def _drop_stale(self, layer: int, needed: Mapping[int, RowIndices]) -> None:
        self._prefetch_queue.clear()
        for load in self.copier.prefetches:
            target = load.slot
            if (
                isinstance(target, PooledExpert)
                and target.key[0] == layer
                and target.key[1] not in needed
            ):
                self.copier.cancel(load)

    def _count(self, layer: int, needed: Mapping[int, RowIndices]) -> None:
        for each, rows in needed.items():
            expert = self.experts[layer, each]
            num_there = int(np.count_nonzero(expert.has[rows]))
            self.counts.count(expert.key, len(rows), num_there, bool(num_there))
            self.counts.num_prefetch_used += expert.was_prefetched
            expert.was_prefetched = False

    def _claim(
        self,
        layer: int,
        waiting: deque[int],
        pinned: deque[int],
        needed: Mapping[int, RowIndices],
    ) -> None:
        """Pin the experts that wait and load what they lack, as long as there is room."""
        while waiting and self._pin(self.experts[layer, waiting[0]], needed[waiting[0]]):
            pinned.append(waiting.popleft())

    def _pin(self, expert: PooledExpert, rows: RowIndices) -> bool:
        """Keep these neurons, and load those that are missing; False if there is no room."""
        if not self.table.give(expert.index, rows):
            return False
        self.table.use(expert.index, rows)
        self._pinned[expert.key] = rows
        missing = expert.missing(rows)
        if len(missing) and expert.load is not None:
            self.copier.promote(expert.load, missing)
        elif len(missing):
            self._load(expert, missing, is_demand=True)
        return True

    def _load(self, expert: PooledExpert, missing: RowIndices, is_demand: bool) -> None:
        layer, each = expert.key
        self.copier.submit(SlotLoad(expert, (layer, self._first + each), missing, is_demand))

    def _unpin(self, key: Key) -> None:
        expert, rows = self.experts[key], self._pinned.pop(key)
        self.table.release(expert.index, rows)
        if expert.load is None and len(expert.missing(rows)):
            self.table.free_unfilled(expert.index)
        if self.rows.is_cuda:
            self.last_use = self.last_use or torch.cuda.Event()
            self.last_use.record(torch.cuda.current_stream(self.rows.device))

    def _next_ready(
        self,
        layer: int,
        waiting: deque[int],
        pinned: deque[int],
        needed: Mapping[int, RowIndices],
        left: Mapping[int, deque[tuple[int, RowIndices]]],
    ) -> int:
        """The next expert of which the next part is all there; waits if there is none."""
        began_s = None
        while True:
            for expert in pinned:
                target, (_, part) = self.experts[layer, expert], left[expert][0]
                if target.has[part].all():
                    target.awaited = None
                    if began_s is not None:
                        self.counts.stall_s += time.perf_counter() - began_s
                    return expert
                target.awaited = part
                if target.load is None:  # it has ended, and rows are still missing
                    error, target.error = target.error, None
                    if error is not None:
                        raise error
                    self._load(target, target.missing(needed[expert]), is_demand=True)
            if not pinned:  # prefetches hold all places
                for load in self.copier.prefetches:
                    if isinstance(load.slot, PooledExpert):
                        self.copier.cancel(load)
                self._claim(layer, waiting, pinned, needed)
                if pinned:
                    continue
            began_s = began_s or time.perf_counter()
            self.copier.wait()
