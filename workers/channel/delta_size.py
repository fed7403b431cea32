"""How much memory a delta takes, as CPython 3.11 holds it: what bounds on unread deltas count."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.workers.request import Delta, TokenLogprob

# A token id in a list, a TokenLogprob in one, and each (id, logprob) of its `top`.
TOKEN_BYTES, LOGPROB_BYTES, ALTERNATIVE_BYTES = 36, 180, 116


def num_bytes(delta: Delta) -> int:
    """The memory that the tokens of `delta` take, with their logprobs, and its embedding."""
    size = TOKEN_BYTES * len(delta.token_ids) + len(delta.embedding)
    return size + _bytes_of(delta.logprobs) if delta.logprobs else size


def num_token_bytes(delta: Delta, index: int) -> int:
    """The memory that one of its tokens takes."""
    return TOKEN_BYTES + (_bytes_of(delta.logprobs[index : index + 1]) if delta.logprobs else 0)


def num_prompt_bytes(delta: Delta) -> int:
    """The memory that its prompt_logprobs take; a request has them once."""
    return _bytes_of(delta.prompt_logprobs) if delta.prompt_logprobs else 0


def _bytes_of(logprobs: Iterable[TokenLogprob]) -> int:
    return sum(LOGPROB_BYTES + ALTERNATIVE_BYTES * len(each.top) for each in logprobs)
