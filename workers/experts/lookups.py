"""Counters of the expert cache: hits, misses, and which prefetches were used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.workers.experts.expert_file import RowIndices
from penstock.workers.experts.slots import Key, Residence, SlotTable

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
            key, rows = (layer, expert), needed_rows.get(expert)
            self.uses[key] = self.uses.get(key, 0) + 1
            found, slot = table.lookup(key, rows)
            self.num_hits += found is Residence.WHOLE
            self.num_partial += found is Residence.PARTIAL
            self.num_misses += found is Residence.ABSENT
            num_wanted = num_rows if rows is None else len(rows)
            self.num_rows_wanted += num_wanted
            if slot is not None:
                self.num_rows_there += num_wanted - len(slot.missing(rows))
                self.num_prefetch_used += slot.was_prefetched
                slot.was_prefetched = False
