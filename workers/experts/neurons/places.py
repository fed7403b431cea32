"""Which neuron lies in which place of a pool, and which give way. Tables only; callers hold a lock.

A place is given to another neuron by a clock hand: it passes places in a ring, takes one use from
each that has some, and takes the first that have none (GCLOCK; Smith 1978).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.workers.experts.expert_file import RowIndices

Places = npt.NDArray[np.int32]  # by neuron of an expert: its place in the pool; -1: it has none
MAX_USES = 3  # that are counted: rounds of the hand which a neuron outlasts without a use
WINDOW = 256  # places that the hand looks at together


class PlaceTable:
    """`num_places` places for neurons of `num_experts` experts with `inner` neurons each."""

    def __init__(self, num_places: int, num_experts: int, inner: int):
        self.places: Places = np.full((num_experts, inner), -1, np.int32)
        self.has = np.zeros((num_experts, inner), np.bool_)  # its row has arrived
        # By place: the index of its expert (-1: the place is free), its neuron, the uses that are
        # counted, and whether a step uses it now.
        self._owner = np.full(num_places, -1, np.int32)
        self._neuron = np.zeros(num_places, np.int32)
        self._uses = np.zeros(num_places, np.uint8)
        self._in_use = np.zeros(num_places, np.bool_)
        self._free = np.arange(num_places, dtype=np.int32)[::-1].copy()  # a stack
        self._num_free = num_places
        self._hand = 0

    @property
    def num_places(self) -> int:
        return len(self._owner)

    def give(self, expert: int, rows: RowIndices) -> bool:
        """Give each of these neurons a place, if there is room for all of them."""
        own = self.places[expert]
        places = own[rows]
        lacking = rows[places < 0]
        if not len(lacking):
            return True
        kept = places[places >= 0]
        kept = kept[~self._in_use[kept]]
        self._in_use[kept] = True  # the hand must not take what is there already
        found = self._take(len(lacking))
        self._in_use[kept] = False
        if found is None:
            return False
        own[lacking] = found
        self._owner[found], self._neuron[found], self._uses[found] = expert, lacking, 0
        return True

    def use(self, expert: int, rows: RowIndices) -> None:
        """These neurons, which have places, stay until `release`; count one use of each."""
        places = self.places[expert][rows]
        self._in_use[places] = True
        self._uses[places] = np.minimum(self._uses[places] + 1, MAX_USES)

    def release(self, expert: int, rows: RowIndices) -> None:
        self._in_use[self.places[expert][rows]] = False

    def free_unfilled(self, expert: int) -> None:
        """Take back the places for which no row came, unless they are in use."""
        own = self.places[expert]
        unfilled = np.flatnonzero((own >= 0) & ~self.has[expert])
        unfilled = unfilled[~self._in_use[own[unfilled]]]
        places = own[unfilled]
        own[unfilled] = -1
        self._owner[places] = -1
        self._free[self._num_free : self._num_free + len(places)] = places
        self._num_free += len(places)

    def check(self) -> None:
        """Assert that the tables agree with one another."""
        placed = np.argwhere(self.places >= 0)
        at = self.places[placed[:, 0], placed[:, 1]]
        assert len(np.unique(at)) == len(at)
        assert (self._owner[at] == placed[:, 0]).all()
        assert (self._neuron[at] == placed[:, 1]).all()
        free = self._free[: self._num_free]
        assert len(at) + len(free) == self.num_places and (self._owner[free] == -1).all()
        assert not (self.has & (self.places < 0)).any()

    def _take(self, count: int) -> Places | None:
        """`count` places, free ones first; None if fewer can be taken."""
        num_free = min(count, self._num_free)
        victims = self._victims(count - num_free)
        if victims is None:
            return None
        self._num_free -= num_free
        free = self._free[self._num_free : self._num_free + num_free].copy()
        self.places[self._owner[victims], self._neuron[victims]] = -1
        self.has[self._owner[victims], self._neuron[victims]] = False
        return np.concatenate([free, victims])

    def _victims(self, count: int) -> Places | None:
        """The next `count` places to evict, by the clock hand; None if there are fewer."""
        found = [np.empty(0, np.int64)]
        if not count:
            return found[0].astype(np.int32)
        num_windows = -(-self.num_places // WINDOW)
        chosen = np.zeros(self.num_places, np.bool_)
        for _ in range(num_windows * (MAX_USES + 1) + 1):
            first, end = self._hand, min(self._hand + WINDOW, self.num_places)
            part = slice(first, end)
            may_go = (self._owner[part] >= 0) & ~self._in_use[part] & ~chosen[part]
            may_go &= self.has[self._owner[part], self._neuron[part]]  # a load fills the others
            idle = np.flatnonzero(may_go & (self._uses[part] == 0))[:count]
            count -= len(idle)
            if not count and len(idle):
                end = first + int(idle[-1]) + 1
            passed = first + np.flatnonzero(may_go[: end - first])
            self._uses[passed] -= self._uses[passed] > 0
            chosen[first + idle] = True
            found.append(first + idle)
            self._hand = end % self.num_places
            if not count:
                break
        return None if count else np.concatenate(found).astype(np.int32)
