"""Checks of prompts and sampling options that hold for every front end.

Also turns the sampling options of a call into the parameters of engine requests: several answers to
one prompt, scoring without an answer, bad words. Pure functions.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.deployments.ingress.core.call import Call
from penstock.workers.request import MAX_BAD_WORDS, MAX_STOP_CHARS, RequestError, SamplingParams

MAX_MESSAGES = 2048
MAX_VARIABLES = 16
MAX_VARIABLE_CHARS = 256
ROLES = ("system", "developer", "user", "assistant", "tool")
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def is_client_id(text: str) -> bool:
    """Whether `text` is a valid client request id: 1 to 128 of A-Z a-z 0-9 . _ -"""
    return _CLIENT_ID.fullmatch(text) is not None


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


def check_length(num_prompt: int, params: SamplingParams, max_model_len: int) -> None:
    """Raise RequestError unless prompt and answer fit, naming what to lower and to what."""
    room = max_model_len - num_prompt
    if num_prompt == 0:
        raise RequestError("the prompt is empty", param="prompt")
    if room < 1:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; this model takes at most {max_model_len} tokens "
            "of prompt and answer together",
            param="prompt",
            code="context_length_exceeded",
        )
    for name in ("max_tokens", "min_tokens"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > room:
            raise RequestError(
                f"the prompt ({num_prompt} tokens) and {name} ({wanted}) exceed the "
                f"{max_model_len} tokens that this model takes; {name} can be at most {room}",
                param=name,
                code="context_length_exceeded",
            )


def check_variables(variables: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise RequestError unless the chat template reads all these, and they are small."""
    field = "chat_template_kwargs"
    if len(variables) > MAX_VARIABLES:
        raise RequestError(f"{field} takes at most {MAX_VARIABLES} variables", param=field)
    for name, value in variables.items():
        where = f"{field}.{ascii(name[:100])[1:-1]}"
        if name not in known:
            there = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise RequestError(
                f"{where}: the chat template of this model has no such variable; {there}",
                param=where,
            )
        if isinstance(value, str):
            check_text(value, where)
            if len(value) > MAX_VARIABLE_CHARS:
                raise RequestError(
                    f"{where} has at most {MAX_VARIABLE_CHARS} characters", param=where
                )


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise RequestError(f"send 1 to {MAX_MESSAGES} messages", param="messages")
    for i, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise RequestError(
                f"messages[{i}].role must be one of {', '.join(ROLES)}", param="messages"
            )
        for text in message.values():
            if isinstance(text, str):
                check_text(text, "messages")
        if message.get("tool_calls"):
            check_text(json.dumps(message["tool_calls"], ensure_ascii=False), "messages")


MAX_CHOICES = 8
MAX_BAD_WORD_STRINGS = MAX_BAD_WORDS // 2  # each is forbidden in two spellings
MAX_TRUNCATE = 2**31 - 1


def check_choices(num_choices: int) -> None:
    if not 1 <= num_choices <= MAX_CHOICES:
        raise RequestError(f"n must lie in [1, {MAX_CHOICES}]", param="n")


def check_extras(call: Call) -> None:
    """Raise RequestError unless what is the front ends' own in a call is within its caps."""
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
    kept = call.options.truncate_prompt_tokens
    if kept is not None and not 1 <= kept <= MAX_TRUNCATE:
        raise RequestError(
            "truncate_prompt_tokens must be at least 1", param="truncate_prompt_tokens"
        )


def is_scoring_only(call: Call) -> bool:
    """Whether the prompt is to be scored and echoed, with no answer to it."""
    return call.options.echo and call.params.max_tokens == 0


def engine_params(call: Call) -> SamplingParams:
    """What the engine is asked for: it makes a token always, and scores a prompt that is echoed."""
    params = call.params
    if is_scoring_only(call):
        params = replace(params, max_tokens=1)
    if call.options.echo and params.logprobs is not None:
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
    """The token sequences of `words`, as they read at the start of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        word = word.lstrip(" ")
        bare, spaced = tuple(encode(word)), tuple(encode(" " + word))
        found[bare] = None
        if spaced[-len(bare) :] != bare:  # else it is forbidden already
            found[spaced] = None
    return tuple(found)
