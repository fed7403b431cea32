"""Logprobs with token texts and bytes, aligned with the text of an answer; for all APIs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.workers.request import TokenLogprob

TokenBytes = Callable[[int], bytes]

UNLIKELY = -9999.0  # stands for anything less likely; JSON has no infinity


class AlternativeToken(NamedTuple):
    """A token that could have come, and how likely it was. There may be very many."""

    token_id: int
    token_bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class DecodedLogprob:
    """A token of an answer or a prompt, and what else was likely there, best first.

    `logprob` is None for the first token of a prompt, which follows nothing. `token_bytes` may be a
    part of a character only. `text_offset` counts characters of the text before the token.
    """

    token_id: int
    token_bytes: bytes
    logprob: float | None = None
    rank: int = 0
    top: tuple[AlternativeToken, ...] = ()
    text_offset: int = 0


def decode_logprob(token: TokenLogprob, num_top: int, bytes_of: TokenBytes) -> DecodedLogprob:
    """`token` with the first `num_top` of its alternatives."""
    top = tuple(
        AlternativeToken(token_id, bytes_of(token_id), _finite(logprob))
        for token_id, logprob in token.top[:num_top]
    )
    token_bytes = bytes_of(token.token_id)
    return DecodedLogprob(token.token_id, token_bytes, _finite(token.logprob), token.rank, top)


def decode_prompt_logprobs(
    prompt_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    num_top: int,
    bytes_of: TokenBytes,
) -> list[DecodedLogprob]:
    """All tokens of a prompt; `logprobs` are those from the second token on."""
    first = DecodedLogprob(prompt_ids[0], bytes_of(prompt_ids[0]))
    return [first, *(decode_logprob(each, num_top, bytes_of) for each in logprobs)]


def num_listed_tokens(*lists: Sequence[DecodedLogprob] | None) -> int:
    """How many tokens are named in these scores: what it costs to write them down."""
    return sum(1 + len(each.top) for scores in lists for each in scores or ())


class LogprobQueue:
    """Scores of one text's tokens, each of which waits until the text that it completes is out.

    A token that completes no text goes with the next one that does, or with the end.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[DecodedLogprob, int]] = deque()  # and where its text ends
        self._open: list[DecodedLogprob] = []  # of which no text has come so far
        self._num_chars = 0

    def add(self, token: DecodedLogprob, text: str) -> None:
        """`text` is what `token` adds to the text of all tokens before."""
        self._open.append(replace(token, text_offset=self._num_chars))
        if text:
            self._num_chars += len(text)
            self._waiting.extend((each, self._num_chars) for each in self._open)
            self._open.clear()

    def release(self, num_sent: int) -> list[DecodedLogprob]:
        """The scores that go with a text of `num_sent` characters and were not given out before."""
        released = []
        while self._waiting and self._waiting[0][1] <= num_sent:
            released.append(self._waiting.popleft()[0])
        return released

    def release_all(self, num_sent: int) -> list[DecodedLogprob]:
        """What is left, when the text has ended at `num_sent` characters."""
        left = [token for token, _ in self._waiting] + self._open
        self._waiting.clear()
        self._open.clear()
        return [replace(each, text_offset=min(each.text_offset, num_sent)) for each in left]


def _finite(logprob: float) -> float:
    return logprob if logprob > UNLIKELY else UNLIKELY  # also where it is no number
