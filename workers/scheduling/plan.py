"""The plan of one step: which sequences compute which of their tokens.

The scheduler makes plans, the executor runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.workers.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of one sequence; `samples` if its last token is among them.

    K and V of the last `num_deferred` of them are not kept: after the sequence's own blocks, they
    are in the blocks `scratch` for this step.
    """

    seq: Sequence
    start: int
    length: int
    num_deferred: int = 0
    scratch: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        return self.start + self.length == self.seq.num_tokens


@dataclass(slots=True)
class Plan:
    """One step: decode rows (chunks of one token) first, then longer prefill chunks."""

    decode: list[Chunk] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        return self.decode + self.prefill

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.length for chunk in self.prefill)

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
