"""A call's sampling parameters and options, checked, as the engine takes them; for all front ends.

`checked_params` checks the parameters; `nth_choice` makes those of further answers. Prompts are
prompts.py's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.deployments.ingress.core.call import Call
from penstock.workers.context_policy import ContextSettings
from penstock.workers.request import (
    MAX_BAD_WORDS,
    MAX_STOP_CHARS,
    RequestError,
    SamplingParams,
    check_prompt_scores,
)

MAX_CHOICES = 8
MAX_BAD_WORD_STRINGS = MAX_BAD_WORDS // 2  # each is forbidden in two spellings
MAX_TRUNCATE = 2**31 - 1
AS_MANY_AS_FIT = -1  # as truncate_prompt_tokens, which vLLM has it mean, too
_SALT = re.compile(r"[A-Za-z0-9_-]{1,128}")


def check_text(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{param} holds half a surrogate pair, which is no character", param=param
        ) from None


def check_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise RequestError(f"token ids must lie in [0, {vocab_size})", param=param)


def check_num_ids(token_ids: Sequence[Any], most: int, param: str) -> None:
    """Raise RequestError if there are more than a context holds; looks at none of them."""
    if len(token_ids) > most:
        raise RequestError(
            f"{param} has {len(token_ids)} token ids; this model takes at most {most}",
            param=param,
            code="context_length_exceeded",
        )


def checked_params(
    call: Call, num_choices: int, vocab_size: int, contexts: ContextSettings
) -> tuple[SamplingParams, int]:
    """The parameters for the engine, and the most tokens that prompt and answer may have together.

    The engine always makes a token, and it scores a prompt that is echoed. Raises RequestError.
    """
    if not 1 <= num_choices <= MAX_CHOICES:
        raise RequestError(f"n must lie in [1, {MAX_CHOICES}]", param="n")
    params = call.params
    if is_scoring_only(call):
        params = replace(params, max_tokens=1)
    if call.options.echo and params.logprobs is not None:
        asked = params.prompt_logprobs
        most = params.logprobs if asked is None else max(asked, params.logprobs)
        params = replace(params, prompt_logprobs=most)
    _check_options(call)
    params.check(vocab_size)
    for stop in params.stop:
        check_text(stop, "stop")
    contexts.context(params)
    return params, contexts.max_total_tokens(params)


def checked_priority(call: Call) -> int:
    """Of those that wait, lower goes first. Raises RequestError for one above the key's."""
    priority, best = call.options.priority, call.context.max_priority
    if priority is None:
        return best
    if priority < best:
        raise RequestError(
            f"priority must be {best} or more for this API key, not {priority}: lower numbers go "
            "first",
            param="priority",
            code="permission_denied",
        )
    return priority


def num_prompt_scores(call: Call, num_prompt: int) -> int:
    """Tokens that one answer names in the scores of its prompt of `num_prompt` tokens."""
    num_top = call.params.prompt_logprobs
    if call.options.echo and call.params.logprobs is not None:
        num_top = max(num_top or 0, call.params.logprobs)
    return 0 if num_top is None else num_prompt * (1 + num_top)


def check_num_scores(call: Call, num_scores: int) -> None:
    """Raise RequestError if the scores of a call's prompts name more tokens than a call may.

    `num_scores`: over all prompts and answers of the call; `call`: that of one prompt.
    """
    # An echo has the scores of the prompt under the name of those of the answer.
    is_named = call.params.prompt_logprobs is not None
    check_prompt_scores(num_scores, "prompt_logprobs" if is_named else "logprobs")


def cache_domain(principal: str, salt: str) -> bytes:
    """Names, in 16 bytes, who shares cached prefixes: empty for callers without key and salt."""
    if not principal and not salt:
        return b""
    # The length comes first, so that no other principal and salt give the same bytes.
    content = f"{len(principal)}:{principal}:{salt}".encode()
    return hashlib.blake2b(content, digest_size=16, person=b"cache domain").digest()


def is_scoring_only(call: Call) -> bool:
    """Whether the prompt is to be scored and echoed, with no answer to it."""
    return call.options.echo and call.params.max_tokens == 0


def _check_options(call: Call) -> None:
    """Raise RequestError unless what the engine never sees of a call is within its caps."""
    if len(call.options.bad_words) > MAX_BAD_WORD_STRINGS:
        raise RequestError(
            f"bad_words takes at most {MAX_BAD_WORD_STRINGS} words", param="bad_words"
        )
    for word in call.options.bad_words:
        if not (1 <= len(word) <= MAX_STOP_CHARS and word.strip(" ")):
            raise RequestError(
                f"each of bad_words has 1 to {MAX_STOP_CHARS} characters, and not only spaces",
                param="bad_words",
            )
    salt = call.options.cache_salt
    if salt and not _SALT.fullmatch(salt):
        raise RequestError(
            "cache_salt has 1 to 128 of the characters A-Z, a-z, 0-9, _ and -", param="cache_salt"
        )
    kept = call.options.truncate_prompt_tokens
    if kept not in (None, AS_MANY_AS_FIT) and not 1 <= kept <= MAX_TRUNCATE:
        raise RequestError(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as fit",
            param="truncate_prompt_tokens",
        )


def nth_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of another answer to the same prompt, whose scores the first one gets."""
    seed = params.seed
    if seed is not None:
        digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, signed=True)
    return replace(params, seed=seed, prompt_logprobs=None)
