"""The expert cache: experts of all layers in a few slots of device memory, and a pool of neurons.

Handles hits, misses, evictions and prefetches. One thread at a time calls it (the engine's); the
copier's thread fills slots in parallel. An expert is yielded only when all rows that are needed of
it are present, in the bits of the checkpoint: prediction, prefetching and eviction change when a
result is ready, never its value.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from penstock.kernels.moe.mlp import Expert
from penstock.workers.errors import LoadError
from penstock.workers.experts.copier import CHUNK_BYTES, ExpertCopier
from penstock.workers.experts.expert_file import RowIndices, RowSource
from penstock.workers.experts.layouts import ExpertLayout
from penstock.workers.experts.lookups import CacheCounts, NeededRows
from penstock.workers.experts.neurons.pool import NeuronPool
from penstock.workers.experts.slots import Key, Slot, SlotLoad, SlotTable, make_slots

log = logging.getLogger("penstock.experts")

PinnedExperts = deque[tuple[int, Slot]]  # experts in use or waited for: never evicted
ALL: NeededRows = {}


class ExpertCache:
    """The slots of one device, filled from `source`."""

    def __init__(
        self,
        source: RowSource,
        num_slots: int,
        layout: ExpertLayout,
        *,
        is_fair: bool = True,
        num_pooled: int = 0,
        bytes_per_s: float | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        """`num_slots`, at least 1, is capped at the number of experts; `layout` says how experts of
        `source` lie in a slot. With `is_fair`, layers that hold more than their share of the slots
        are evicted from first; else the least recently used expert of all layers is evicted.
        `num_pooled`: neurons in a pool besides the slots, none or those of an expert at least.
        `bytes_per_s` simulates a slow host link."""
        facts = source.manifest
        assert num_slots >= 1
        num_slots = min(num_slots, facts.num_all)
        num_layers = len({layer for layer, _ in facts.experts()})
        share = max(1, num_slots // num_layers) if is_fair else None
        self.manifest = facts
        self.layout = layout
        self.table = SlotTable(make_slots(num_slots, facts.num_rows, layout), share)
        self.counts = CacheCounts()
        self._known = set(facts.digests())
        self._changed = threading.Condition()
        # To be prefetched as soon as a slot is free or evictable.
        self._prefetch_queue: deque[tuple[Key, RowIndices | None]] = deque()
        self._predicted: set[Key] = set()  # all experts predicted for the next layer: not evicted
        self._pinned: list[Slot] = []
        self.copier = ExpertCopier(
            source,
            facts,
            layout,
            self._changed,
            bytes_per_s,
            chunk_bytes,
            self._start_prefetches,
        )
        self.pool: NeuronPool | None = None
        if num_pooled:
            self.pool = NeuronPool(self.copier, facts, num_pooled, self.counts)

    @property
    def num_slots(self) -> int:
        return len(self.table.slots)

    def visit(
        self,
        layer: int,
        needed: Sequence[int],
        meanwhile: Callable[[], None] | None = None,
        needed_rows: NeededRows = ALL,
    ) -> Iterator[tuple[int, Expert]]:
        """Yields each of the `needed` experts of a layer once, resident ones first.

        For an expert in `needed_rows`, only these rows are loaded; the slot's other rows hold zeros
        or rows of an earlier expert. `meanwhile` is called once, after loads have been submitted
        for all misses that have a slot. An expert is pinned until the next one is requested. Raises
        the copier's error; CorruptedExpert names the expert.
        """
        waiting = deque(needed)
        pinned: PinnedExperts = deque()
        with self._changed:
            self._unpin_abandoned()
            self._drop_stale(layer, set(needed))
            num_rows = self.manifest.num_rows
            self.counts.look_up(self.table, layer, needed, needed_rows, num_rows)
            self._claim_residents(layer, waiting, pinned, needed_rows)
            self._claim_misses(layer, waiting, pinned, needed_rows)
        if meanwhile is not None:
            meanwhile()
        while waiting or pinned:
            with self._changed:
                expert, slot = self._next_ready(layer, waiting, pinned, needed_rows)
            yield expert, slot.experts[self.layout.kind_of(layer)]
            with self._changed:
                self._release(slot)
                self._claim_misses(layer, waiting, pinned, needed_rows)
                self._start_prefetches()

    def prefetch(self, layer: int, experts: Sequence[int], needed_rows: NeededRows = ALL) -> None:
        """Load these experts of `layer` in order, if there is room; for an expert in `needed_rows`,
        these rows only.

        This only warms the cache: experts that are in use or loading are not evicted for it, and
        nothing is evicted before the host link is idle. If the link is never idle, it does nothing.
        """
        with self._changed:
            self._clear_prefetch_queue()
            for expert in experts:
                key, rows = (layer, expert), needed_rows.get(expert)
                if key not in self._known or (rows is not None and not len(rows)):
                    continue
                slot = self.table.get(key)
                if slot is not None:
                    self.table.touch(key)
                if slot is None or not (slot.holds(rows) or slot.load is not None):
                    self._prefetch_queue.append((key, rows))
                self._predicted.add(key)
            self._start_prefetches()

    def warm(self, keys: Sequence[Key]) -> None:
        """Fill free slots with these experts, in order: before the first request."""
        with self._changed:
            for key in keys:
                if key in self._known and self.table.get(key) is None and self.table.num_free:
                    self._begin_prefetch(key, self.table.take(key))

    def use_source(self, source: RowSource) -> None:
        """Load from `source` from now on. Raises LoadError if it holds other experts."""
        if source.manifest.digests() != self.manifest.digests():
            raise LoadError(
                f"{source.manifest.path} (epoch {source.manifest.epoch}) holds other experts than "
                "this worker started with; restart the worker to serve them"
            )
        with self._changed:
            self.manifest = source.manifest
            self.copier.source = source

    def close(self) -> None:
        """Stop the copier's thread; the next load starts another one."""
        with self._changed:
            self._clear_prefetch_queue()
            if self.pool is not None:
                self.pool.forget_prefetches()
            thread = self.copier.close()
        if thread is not None:
            thread.join()

    def check(self) -> None:
        """Assert that the tables are consistent."""
        with self._changed:
            self.table.check()
            assert all(slot.num_users for slot in self._pinned)
        if self.pool is not None:
            self.pool.check()

    # -- all methods below: with the lock held

    def _unpin_abandoned(self) -> None:
        """Unpin slots that an earlier visit left pinned when it was abandoned."""
        for slot in list(self._pinned):
            self._release(slot)

    def _drop_stale(self, layer: int, needed: set[int]) -> None:
        """Cancel prefetches that the routing, now known, does not need."""
        self._clear_prefetch_queue()
        for load in self.copier.prefetches:
            if load.key[0] == layer and load.key[1] not in needed:
                self._cancel(load)

    def _clear_prefetch_queue(self) -> None:
        self._prefetch_queue.clear()
        self._predicted.clear()

    def _cancel(self, load: SlotLoad) -> None:
        """Stop a prefetch; one into the pool goes on."""
        slot = load.slot
        if not isinstance(slot, Slot):
            return
        self.copier.cancel(load)
        if slot.is_idle and not slot.num_has:
            self.table.give_back(slot)

    def _claim_residents(
        self, layer: int, waiting: deque[int], pinned: PinnedExperts, needed_rows: NeededRows
    ) -> None:
        """Pin the experts that have slots, and load the rows that are missing."""
        for expert in list(waiting):
            slot = self.table.get((layer, expert))
            if slot is None:
                continue
            waiting.remove(expert)
            self._pin(slot, (layer, expert), needed_rows.get(expert))
            pinned.append((expert, slot))

    def _claim_misses(
        self, layer: int, waiting: deque[int], pinned: PinnedExperts, needed_rows: NeededRows
    ) -> None:
        """Give the others slots while there are any, and load them."""
        while waiting:
            key = (layer, waiting[0])
            slot = self.table.get(key) or self.table.take(key)
            if slot is None:
                return
            self._pin(slot, key, needed_rows.get(waiting[0]))
            pinned.append((waiting.popleft(), slot))

    def _pin(self, slot: Slot, key: Key, rows: RowIndices | None) -> None:
        slot.num_users += 1
        self._pinned.append(slot)
        self.table.touch(key)
        if slot.holds(rows):
            return
        missing = slot.missing(rows)
        if slot.load is not None:
            self.copier.promote(slot.load, missing)
        else:
            self.copier.submit(SlotLoad(slot, key, missing, is_demand=True))

    def _next_ready(
        self, layer: int, waiting: deque[int], pinned: PinnedExperts, needed_rows: NeededRows
    ) -> tuple[int, Slot]:
        """The next expert whose needed rows are all present; waits if there is none."""
        began_s = None
        while True:
            for place, (expert, slot) in enumerate(pinned):
                rows = needed_rows.get(expert)
                if slot.holds(rows):
                    del pinned[place]
                    if began_s is not None:
                        self.counts.stall_s += time.perf_counter() - began_s
                    return expert, slot
                if slot.load is None:  # the load has ended, and rows are still missing
                    self._ask_again(slot, rows)
            if not pinned:  # every slot is taken by prefetches
                for load in self.copier.prefetches:
                    self._cancel(load)
                self._claim_misses(layer, waiting, pinned, needed_rows)
                if pinned:
                    continue
            began_s = began_s or time.perf_counter()
            self.copier.wait()

    def _ask_again(self, slot: Slot, rows: RowIndices | None) -> None:
        error, slot.error = slot.error, None
        if error is not None:
            raise error
        assert slot.key is not None
        self.copier.submit(SlotLoad(slot, slot.key, slot.missing(rows), is_demand=True))

    def _release(self, slot: Slot) -> None:
        slot.num_users -= 1
        self._pinned.remove(slot)
        if self.layout.device.type == "cuda":
            slot.last_use = slot.last_use or torch.cuda.Event()
            slot.last_use.record(torch.cuda.current_stream(self.layout.device))

    def _start_prefetches(self) -> None:
        """Begin the next prefetch, if the host link is idle and there is a slot."""
        while self._prefetch_queue and not self.copier.is_busy:
            key, rows = self._prefetch_queue[0]
            slot = self.table.get(key)
            if slot is None:
                slot = self.table.take(key, keep=self._predicted)
                if slot is None:
                    break
            self._prefetch_queue.popleft()
            if not slot.holds(rows) and slot.load is None:
                self._begin_prefetch(key, slot, rows)
        if self.pool is not None:
            self.pool.start_prefetches()

    def _begin_prefetch(self, key: Key, slot: Slot | None, rows: RowIndices | None = None) -> None:
        assert slot is not None
        slot.was_prefetched = True
        self.counts.num_prefetched += 1
        self.copier.submit(SlotLoad(slot, key, slot.missing(rows), is_demand=False))
