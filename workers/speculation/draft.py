"""A draft: tokens that may come next in an answer, which a step verifies.

At each position the target's own token is drawn, with the random number of that position, and the
longest leading part of the draft that agrees is kept. So the answer is that of plain decoding,
token for token, whatever the drafts are.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Protocol

# Own text, earlier answers, a draft model, the grammar's only choice.
SOURCES = ("lookup", "suffix", "draft", "grammar")
LONG_MATCH = 3  # tokens; shorter ones say nothing of their text, and are right by chance


@dataclass(frozen=True, slots=True)
class Draft:
    """Ids that may come next, where they come from, and how many tokens matched before them.

    `trust`: how often drafts of the same request were right of late, of one whose match would be
    as good as any. Of a draft model, `probabilities` that it gives each of the tokens, and whether
    it drew them.
    """

    token_ids: tuple[int, ...]
    source: str = "lookup"
    match_length: int = 0
    trust: float = 1.0
    probabilities: tuple[float, ...] = ()
    is_sampled: bool = False

    @property
    def is_by_chance(self) -> bool:
        """Whether it follows a short match: worth a row of a small step, and nothing else."""
        return self.source in ("lookup", "suffix") and self.match_length < LONG_MATCH

    def first(self, num: int) -> Draft:
        """The same with its first `num` tokens alone."""
        return replace(self, token_ids=self.token_ids[:num], probabilities=self.probabilities[:num])


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Prompt and answer of one request, `token_ids`, to which the engine appends what it samples.

    Texts of another `domain` belong to others: nothing of one may be proposed in the other.
    """

    request_id: str
    token_ids: array[int]
    num_prompt_tokens: int
    domain: bytes = b""


class Proposer(Protocol):
    """Where drafts come from. It may propose anything: wrong drafts cost nothing but time."""

    def propose(self, text: Text, most: int) -> Draft | None:
        """Up to `most` tokens that may follow `text`; None: nothing is proposed."""

    def observe(self, text: Text, draft: Draft, num_accepted: int) -> None:
        """`draft` was verified after `text`; what was accepted of it is appended next."""

    def end(self, text: Text) -> None:
        """`text` is complete, or given up: no draft of it is asked for any more."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A draft whose tokens would see `num_keys` tokens each."""

    draft: Draft
    num_keys: int


@dataclass(frozen=True, slots=True)
class StepSize:
    """Rows of a step, how many of them give a token, and the keys that decode rows see."""

    num_rows: int
    num_sampled: int
    num_keys: int


class DraftSteps(Protocol):
    """How many sequences a draft model proposes one more token for."""

    def survival(self, draft: Draft) -> float:
        """The probability that all of `draft` is right."""

    def is_likely(self, draft: Draft) -> bool:
        """Whether `draft`, of text, is right at least as often as a token of the draft model."""

    def choose(self, state: Drafted, step: StepSize) -> int:
        """The number of drafts that get one more token, the likeliest of `state.survivals` first.
        `step`: without drafts."""

    def observe(self, num_rows: int, num_keys: int, seconds: float) -> None:
        """The draft model has computed `num_rows` rows, which saw `num_keys` keys, in `seconds`."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a draft model has proposed for a step so far.

    `survivals`, likeliest first: of the drafts that can grow, the probability that all of each is
    right. `gain`: the tokens that all drafts promise; `num_rows` of them; `seconds` spent.
    `num_keys`: that a row of them sees, about.
    """

    survivals: tuple[float, ...]
    gain: float
    num_rows: int
    num_keys: int
    seconds: float


class Widths(Protocol):
    """How many tokens of each offered draft a step verifies."""

    def choose(self, offers: list[Offer], step: StepSize, room: int) -> list[int]:
        """By offer, at most `room` in all. `step`: without them."""

    def observe(self, draft: Draft, num_accepted: int) -> None:
        """`draft`, as it was cut, was verified."""

    def observe_step(
        self, step: StepSize, num_drafts: int, num_draft_keys: int, seconds: float
    ) -> None:
        """A step of decode rows alone took `seconds`: of `step`, and of `num_drafts` rows that saw
        `num_draft_keys` keys."""
