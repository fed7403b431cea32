"""What a call asks of sampling beyond one engine request's parameters: what the engine is to run.

Several answers to one prompt, scoring without an answer, words that must not come. Pure functions;
know nothing of front ends, workers or event loops.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.deployments.calls import Call
from penstock.workers.request import MAX_BAD_WORDS, MAX_STOP_CHARS, RequestError, SamplingParams

MAX_CHOICES = 8
MAX_BAD_WORD_STRINGS = MAX_BAD_WORDS // 2  # each is forbidden in two spellings
MAX_TRUNCATE = 2**31 - 1


def check_choices(num_choices: int) -> None:
    if not 1 <= num_choices <= MAX_CHOICES:
        raise RequestError(f"n must lie in [1, {MAX_CHOICES}]", param="n")


def check_extras(call: Call) -> None:
    """Raise RequestError unless what is the front ends' own in a call is within its caps."""
    if len(call.bad_words) > MAX_BAD_WORD_STRINGS:
        raise RequestError(
            f"bad_words takes at most {MAX_BAD_WORD_STRINGS} words", param="bad_words"
        )
    for word in call.bad_words:
        if not (1 <= len(word) <= MAX_STOP_CHARS and word.strip(" ")):
            raise RequestError(
                f"each of bad_words has 1 to {MAX_STOP_CHARS} characters, and not only spaces",
                param="bad_words",
            )
    kept = call.truncate_prompt_tokens
    if kept is not None and not 1 <= kept <= MAX_TRUNCATE:
        raise RequestError(
            "truncate_prompt_tokens must be at least 1", param="truncate_prompt_tokens"
        )


def scores_only(call: Call) -> bool:
    """Whether the prompt is to be scored and echoed, with no answer to it."""
    return call.echo and call.params.max_tokens == 0


def engine_params(call: Call) -> SamplingParams:
    """What the engine is asked for: it makes a token always, and scores a prompt that is echoed."""
    params = call.params
    if scores_only(call):
        params = replace(params, max_tokens=1)
    if call.echo and params.logprobs is not None:
        asked = params.prompt_logprobs
        most = params.logprobs if asked is None else max(asked, params.logprobs)
        params = replace(params, prompt_logprobs=most)
    return params


def nth_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of another answer to the same prompt, whose scores the first one gets."""
    seed = params.seed
    if seed is not None:
        digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, signed=True)
    return replace(params, seed=seed, prompt_logprobs=None)


def bad_words_ids(
    words: Sequence[str], encode: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """The token sequences of `words`, as they read at the start of a text and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        word = word.lstrip(" ")
        bare, spaced = tuple(encode(word)), tuple(encode(" " + word))
        found[bare] = None
        if spaced[-len(bare) :] != bare:  # else it is forbidden already
            found[spaced] = None
    return tuple(found)
