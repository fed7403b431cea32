"""A simulated host link whose chunks wait for what a test does: none overtakes a busy machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.workers.experts import copier
from penstock.workers.memory.copier import Throttle
from tests.deployments.waiting import eventually


def hold_link(patch: pytest.MonkeyPatch, may_pass: Callable[[int], object]) -> None:
    """Chunk `number`, from 0, of a cache that is made then is under way until `may_pass(number)`.

    For caches with `bytes_per_s`.
    """

    class Held(Throttle):
        num_begun = 0

        def delay_s(self, num_bytes: int) -> float:
            number = self.num_begun
            self.num_begun += 1
            eventually(lambda: may_pass(number), what=f"chunk {number} to be let through")
            return super().delay_s(num_bytes)

    patch.setattr(copier, "Throttle", Held)
