"""Proposers of tests, which know the answers, and widths that cost nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.workers.speculation.draft import Draft, Offer, StepSize, Text


@dataclass
class Fixed:
    """Proposes what `drafts` of a request say, by tokens of the answer so far."""

    answers: Mapping[str, Sequence[int]]  # by request
    vocab_size: int
    num_ended: int = 0
    num_verified: int = 0
    num_accepted: int = 0

    def propose(self, text: Text, most: int) -> Draft | None:
        answer = self.answers[text.request_id]
        at = len(text.token_ids) - text.num_prompt_tokens
        ids = self.drafts(list(answer[at : at + most]), text, most)
        return Draft(tuple(ids), "suffix", 3) if ids else None

    def drafts(self, right: list[int], text: Text, most: int) -> list[int]:
        return right

    def observe(self, text: Text, draft: Draft, num_accepted: int) -> None:
        self.num_verified += len(draft.token_ids)
        self.num_accepted += num_accepted

    def end(self, text: Text) -> None:
        self.num_ended += 1


class Oracle(Fixed):
    """Always right."""


@dataclass
class Adversary(Fixed):
    """Always wrong, and at times with ids that no model has, or with ends of sequences."""

    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def drafts(self, right: list[int], text: Text, most: int) -> list[int]:
        wrong = [(each + 1) % self.vocab_size for each in right]
        wrong += [self.rng.randrange(self.vocab_size) for _ in range(most - len(wrong))]
        place, kind = self.rng.randrange(len(wrong)), self.rng.randrange(6)
        if kind < 3:
            wrong[place] = (-1, self.vocab_size, 2**31 - 1)[kind]
        return wrong


@dataclass
class Mixed(Fixed):
    """Right up to some place, then not; of any length, and at times nothing."""

    rng: random.Random = field(default_factory=lambda: random.Random(2))

    def drafts(self, right: list[int], text: Text, most: int) -> list[int]:
        num = self.rng.randint(0, most)
        ids = right[:num] + [self.rng.randrange(self.vocab_size) for _ in range(num - len(right))]
        if ids and self.rng.random() < 0.6:
            place = self.rng.randrange(len(ids))
            ids[place] = (ids[place] + 1 + self.rng.randrange(9)) % self.vocab_size
        return ids


@dataclass
class Widest:
    """All that is offered, as far as there is room; or some of it, by `rng`."""

    rng: random.Random | None = None

    def choose(self, offers: list[Offer], step: StepSize, room: int) -> list[int]:
        widths = []
        for offer in offers:
            most = min(room, len(offer.draft.token_ids))
            width = most if self.rng is None else self.rng.randint(0, most)
            widths.append(width)
            room -= width
        return widths

    def observe(self, draft: Draft, num_accepted: int) -> None:
        pass

    def observe_step(
        self, step: StepSize, num_drafts: int, num_draft_keys: int, seconds: float
    ) -> None:
        assert step.num_rows == step.num_sampled > 0 and seconds > 0
        assert num_drafts or not num_draft_keys
