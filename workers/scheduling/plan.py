"""The plan of one step: which sequences compute which of their tokens.

The scheduler makes plans, the executor runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.workers.scheduling.sequence import Sequence
from penstock.workers.speculation.draft import Draft

NO_STATE = -1  # the state before the first token: no slot holds it


@dataclass(frozen=True, slots=True)
class StateMoves:
    """The slots of one chunk: `source` has the state before it, or is NO_STATE, and after
    `writes[i][0]` of its tokens the state goes to slot `writes[i][1]`. The sequence goes on from
    `target`: one of these slots, or the source."""

    source: int
    writes: tuple[tuple[int, int], ...]
    target: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of one sequence; `samples` if its last token is among them.

    K and V of the last `num_deferred` of them are not kept: after the sequence's own blocks, they
    are in the blocks `scratch` for this step.

    With a `draft`, which only a chunk of one token has, the step also computes a row for each of
    its tokens, and samples from all of these rows.

    `moves`: of a model with recurrent states, once the plan is complete.
    """

    seq: Sequence
    start: int
    length: int
    num_deferred: int = 0
    scratch: tuple[int, ...] = ()
    draft: Draft | None = None
    moves: StateMoves | None = None

    @property
    def drafts(self) -> tuple[int, ...]:
        """Ids that are verified in this step, after the sequence's own."""
        return () if self.draft is None else self.draft.token_ids

    @property
    def num_rows(self) -> int:
        """Rows of the flat batch."""
        return self.length if self.draft is None else self.length + len(self.draft.token_ids)

    @property
    def samples(self) -> bool:
        return self.start + self.length == self.seq.num_tokens

    @property
    def num_samples(self) -> int:
        """Tokens that are sampled: one, and one after each draft."""
        return self.samples if self.draft is None else self.samples + len(self.draft.token_ids)


@dataclass(slots=True)
class Plan:
    """One step: decode rows (chunks of one token, and their drafts) first, then prefill chunks."""

    decode: list[Chunk] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        return self.decode + self.prefill

    @property
    def num_tokens(self) -> int:
        """Rows of the flat batch, those of drafts included."""
        return self.num_decode_rows + sum(chunk.length for chunk in self.prefill)

    @property
    def num_decode_rows(self) -> int:
        return len(self.decode) + self.num_drafts

    @property
    def num_drafts(self) -> int:
        drafts = [chunk.draft for chunk in self.decode if chunk.draft is not None]
        return sum(len(draft.token_ids) for draft in drafts)

    @property
    def num_sampled_rows(self) -> int:
        """Rows whose logits are computed."""
        return sum(chunk.num_samples for chunk in self.chunks)

    def add(self, chunk: Chunk) -> None:
        (self.decode if chunk.length == 1 else self.prefill).append(chunk)

    def drop(self, seq: Sequence) -> int:
        """Remove the chunk of `seq`, if there is one; returns its number of tokens."""
        for chunks in (self.decode, self.prefill):
            for i, chunk in enumerate(chunks):
                if chunk.seq is seq:
                    del chunks[i]
                    return chunk.length
        return 0
