"""Counters of the expert cache: hits, misses, and which prefetches were used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.workers.experts.expert_file import RowIndices
from penstock.workers.experts.slots import Key, SlotTable

NeededRows = Mapping[int, RowIndices]  # rows by expert; of an expert that it lacks, all rows


@dataclass(slots=True)
class CacheCounts:
    """Lookups of experts that had tokens, and the fate of prefetches."""

    num_hits: int = 0  # all needed rows were present
    num_partial: int = 0  # some were
    num_misses: int = 0
    num_rows_wanted: int = 0  # neurons, or pieces of packed experts
    num_rows_there: int = 0
    num_prefetched: int = 0  # experts for which a prefetch began
    num_prefetch_used: int = 0  # of those, used before they were evicted
    stall_s: float = 0.0  # time that the computation waited for experts
    uses: dict[Key, int] = field(default_factory=dict)  # steps that needed an expert

    def look_up(
        self,
        table: SlotTable,
        layer: int,
        needed: Sequence[int],
        needed_rows: NeededRows,
        num_rows: int,
    ) -> None:
        """Count how much `table` holds of the `needed` experts of a layer, `num_rows` each, before
        any load begins."""
        for expert in needed:
            rows, slot = needed_rows.get(expert), table.get((layer, expert))
            num_wanted = num_rows if rows is None else len(rows)
            num_there = 0 if slot is None else num_wanted - len(slot.missing(rows))
            self.count((layer, expert), num_wanted, num_there, slot is not None)
            if slot is not None:
                self.num_prefetch_used += slot.was_prefetched
                slot.was_prefetched = False

    def count(self, key: Key, num_wanted: int, num_there: int, has_some: bool) -> None:
        """Count one expert; `has_some`: the cache holds something of it."""
        self.uses[key] = self.uses.get(key, 0) + 1
        self.num_hits += has_some and num_there == num_wanted
        self.num_partial += has_some and num_there < num_wanted
        self.num_misses += not has_some
        self.num_rows_wanted += num_wanted
        self.num_rows_there += num_there
