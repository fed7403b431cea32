"""Steps of a draft model for tests: as many as there is room for, or some of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock.workers.speculation.draft import Draft, Drafted, StepSize


@dataclass
class AllSteps:
    """Every draft grows until it has no room, or with `rng` until some time before."""

    rng: random.Random | None = None
    num_observed: int = 0

    def survival(self, draft: Draft) -> float:
        assert len(draft.probabilities) == len(draft.token_ids) > 0
        assert all(0 < each <= 1 for each in draft.probabilities)
        return 0.9 ** len(draft.token_ids)

    def is_likely(self, draft: Draft) -> bool:
        return False

    def choose(self, state: Drafted, step: StepSize) -> int:
        assert list(state.survivals) == sorted(state.survivals, reverse=True)
        assert step.num_rows == step.num_sampled >= len(state.survivals) or step.num_rows > 0
        num = len(state.survivals)
        return num if self.rng is None else self.rng.randint(0, num)

    def observe(self, num_rows: int, num_keys: int, seconds: float) -> None:
        assert num_rows > 0 and seconds > 0
        self.num_observed += 1
