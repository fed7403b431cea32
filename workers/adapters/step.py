"""The adapters of one step: which rows each changes, and the additions to a linear's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.workers.adapters.packed import Adapter, LayerAdapter, LowRank

Rows = slice | Tensor  # of a flat batch: a range, or int64 indices
Delta = tuple[Rows, Tensor]  # rows, and what is added to them


class StepAdapters:
    """Adapters with the rows of the flat batch that each changes; no row has two."""

    def __init__(self, spans: Sequence[tuple[Adapter, int, int]], device: torch.device):
        """`spans`: an adapter, and the first and the end of rows that have it."""
        self.spans, self._device = spans, device
        ranges: dict[Adapter, list[tuple[int, int]]] = {}
        for adapter, first, end in spans:
            known = ranges.setdefault(adapter, [])
            if known and known[-1][1] == first:
                first = known.pop()[0]
            known.append((first, end))
        self._rows = {adapter: _rows(each, device) for adapter, each in ranges.items()}

    def part(self, first: int, end: int) -> StepAdapters | None:
        """Of rows [first, end) alone, counted from the first of them; None: they have none."""
        clipped = [(each, max(a, first), min(b, end)) for each, a, b in self.spans]
        spans = [(each, a - first, b - first) for each, a, b in clipped if a < b]
        return StepAdapters(spans, self._device) if spans else None

    def layer(self, index: int) -> LayerRows:
        """What is added in one layer of this process."""
        return LayerRows([(each.layers[index], rows) for each, rows in self._rows.items()])


class LayerRows:
    """The adapters of one step in one layer."""

    def __init__(self, adapters: Sequence[tuple[LayerAdapter, Rows]]):
        self._adapters = adapters

    def deltas(
        self, field: str, x: Tensor, made: Callable[[Tensor], Tensor] | None = None
    ) -> Deltas:
        """For the linear `field` of LayerAdapter with the input `x` [T, in]; `made` makes it from
        the rows of `x`."""
        found: list[Delta] = []
        for layer, rows in self._adapters:
            low_rank: LowRank | None = getattr(layer, field)
            if low_rank is not None:
                own = x[rows]
                found.append((rows, low_rank(own if made is None else made(own))))
        return Deltas(found)


@dataclass(frozen=True, slots=True)
class Deltas:
    """What is added to the output of one linear."""

    each: Sequence[Delta]

    def add_to(self, y: Tensor) -> Tensor:
        """In place, to the rows that have an adapter: the others keep their bits."""
        for rows, delta in self.each:
            y[rows] += delta
        return y


def _rows(ranges: Sequence[tuple[int, int]], device: torch.device) -> Rows:
    if len(ranges) == 1:
        return slice(*ranges[0])
    return torch.cat([torch.arange(first, end) for first, end in ranges]).to(device)
