"""The sampled futures of what a worker holds, kept from one forecast to the next.

A row for each answer. Between two forecasts an answer gains a few tokens, so that most of its
futures end in the same bin of its distribution as before: only those that left it are searched for.
What does not change with the tokens is computed once.
"""

from __future__ import annotations

import numpy as np

from penstock.deployments.prediction.distribution import (
    MAX_LENGTH,
    NUM_BINS,
    Floats,
    Ints,
    LengthDistribution,
    hazards_at,
    lengths_in,
    places_of,
)

MIDDLES = np.array([1, 3, 5, 7]) / 8  # of the quarters of a distribution: their mean is the mean
ROWS = 16  # at first
ROW_OFFSET = 4096.0  # above any cumulative hazard: NUM_BINS * -ln(1 - MAX_HAZARD) is below 1,100


class HeldFutures:
    """Rows are given by `add`, and asked for by their numbers."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._free: list[int] = []
        columns = num_samples + len(MIDDLES)
        self._hazards = np.zeros((0, NUM_BINS + 1))  # cumulative, row r plus r * ROW_OFFSET
        self._died = np.zeros((0, NUM_BINS + 1))  # of each bin: P(ends in it | reaches it)
        self._drawn = np.zeros((0, columns))  # of each future: -ln(1 - its uniform number)
        self._places = np.zeros((0, columns), np.int64)  # its bin, in all of `_hazards`
        self._limits = np.zeros((0, 2), np.int64)  # least and most tokens

    def add(self, length: LengthDistribution, uniforms: Floats) -> int:
        """An answer with this distribution of its length; its row. uniforms: [samples]."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._hazards[row] = length.cumulative + ROW_OFFSET * row
        self._died[row, :-1] = -np.expm1(-np.diff(self._hazards[row]))
        self._drawn[row] = -np.log1p(-np.concatenate((uniforms, MIDDLES)))
        self._places[row] = (NUM_BINS + 1) * row
        most = MAX_LENGTH if length.max_tokens is None else length.max_tokens
        self._limits[row] = length.min_tokens, most
        return row

    def remove(self, row: int) -> None:
        """Free the row, for a later `add`."""
        self._free.append(row)

    def remaining(self, rows: Ints, generated: Ints) -> Ints:
        """rows [n], generated [n] -> [n, samples] tokens still to come in each future."""
        return self._remaining(rows, generated, slice(0, self._num_samples))

    def mean_remaining(self, rows: Ints, generated: Ints) -> Floats:
        """[n] tokens still to come, on average, from the middles of a distribution's quarters."""
        middles = slice(self._num_samples, None)
        return self._remaining(rows, generated, middles).mean(axis=-1)

    def _remaining(self, rows: Ints, generated: Ints, columns: slice) -> Ints:
        """As LengthDistribution.sample_remaining, of several answers at once."""
        limits, flat = self._limits[rows], self._hazards.ravel()
        now = np.minimum(np.maximum(generated, limits[:, 0]), MAX_LENGTH)[:, None]
        first = ((NUM_BINS + 1) * rows)[:, None]
        target = hazards_at(flat, first, now) + self._drawn[rows, columns]
        place = self._places[rows, columns]
        low = flat[place]
        left = np.flatnonzero((target >= flat[place + 1]) | (target < low))
        if len(left):
            begins = np.broadcast_to(first, target.shape).ravel()[left]
            found = places_of(flat, begins, target.ravel()[left])
            place.ravel()[left] = found
            low.ravel()[left] = flat[found]
            self._places[rows, columns] = place
        length = lengths_in(place - first, low, self._died.ravel()[place], target)
        ends = np.minimum(np.maximum(length, now + 1), limits[:, 1:])
        return np.maximum(ends - generated[:, None], 0)

    def _grow(self) -> None:
        """Double the number of rows. Free rows hold their offset, too: a search needs all of
        `_hazards`, read row by row, to be sorted."""
        num = len(self._hazards)
        added = max(num, ROWS)
        offsets = ROW_OFFSET * np.arange(num, num + added)[:, None]
        self._hazards = np.concatenate((self._hazards, np.tile(offsets, NUM_BINS + 1)))
        for name in ("_died", "_drawn", "_places", "_limits"):
            kept = getattr(self, name)
            more = np.zeros((added, kept.shape[1]), kept.dtype)
            setattr(self, name, np.concatenate((kept, more)))
        self._free.extend(reversed(range(num, num + added)))
