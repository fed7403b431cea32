"""One generation: its `Request`, and the `Delta`s that the engine returns.

No text: a prompt is token ids, and stop strings are kept only for the ingress, which has the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from penstock.workers.config import CONTEXT_POLICIES
from penstock.workers.structured_spec import StructuredSpec


class RequestError(ValueError):
    """A request that cannot be served as asked: `param` names the field, `code` the error.

    The message is written for the client: it says what was wrong and what would be right, and never
    carries internal state.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, a stop token id, or (at the ingress) a stop string
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # the client left or cancelled
    ERROR = "error"  # this request failed; `Delta.error` has the catalogue code


MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
LEAST_REPETITION_PENALTY = 0.01  # a logit divided by next to nothing is infinite
MAX_BAD_WORDS = 128
MAX_BAD_WORD_IDS = 64
MAX_SINKS = 1024


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a numeric parameter, inclusive but for `low` where `open_low`."""

    low: float
    high: float
    open_low: bool = False


def bounded(default: Any, low: float, high: float, *, open_low: bool = False) -> Any:
    """A field of SamplingParams with its range, which `check` enforces and OpenAPI states."""
    return field(default=default, metadata={"bounds": Bounds(low, high, open_low)})


MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Each request carries its own, on every step.

    temperature 0 means greedy. top_k 0, top_p 1 and min_p 0 switch the filter off. With a `seed`
    the draw for token i depends on (seed, i) alone, whatever else is in the batch.
    """

    temperature: float = bounded(1.0, 0, 100)
    top_k: int = bounded(0, 0, MAX_INT32)
    top_p: float = bounded(1.0, 0, 1, open_low=True)
    min_p: float = bounded(0.0, 0, 1)
    seed: int | None = bounded(None, -(2**63), 2**63 - 1)
    max_tokens: int | None = bounded(None, 1, MAX_INT32)  # None: up to the model's context
    min_tokens: int = bounded(0, 0, MAX_INT32)  # before, end and stop tokens are masked
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # checked at the ingress, where text exists
    stop_token_ids: tuple[int, ...] = ()
    # Divides the positive logits of tokens of the prompt and the answer.
    repetition_penalty: float = bounded(1.0, LEAST_REPETITION_PENALTY, 100)
    presence_penalty: float = bounded(0.0, -2, 2)  # subtracted once for a token of the answer
    frequency_penalty: float = bounded(0.0, -2, 2)  # subtracted for each time that it occurred
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # nothing else may come; empty: everything may
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    # The number of likeliest alternatives of each token; 0: only the token's own logprob.
    logprobs: int | None = bounded(None, 0, MAX_LOGPROBS)
    prompt_logprobs: int | None = bounded(None, 0, MAX_LOGPROBS)  # for the tokens of the prompt
    structured: StructuredSpec | None = None  # the shape that the answer must have
    context_policy: str | None = None  # "full" or "sink_window"; None: the model's default
    sinks: int | None = bounded(None, 1, MAX_SINKS)  # sink_window: first tokens that stay
    window: int | None = bounded(None, 1, MAX_INT32)  # sink_window: newest tokens that are seen
    roll: int | None = bounded(None, 1, MAX_INT32)  # sink_window: tokens per move of the window
    moe_mode: str | None = None  # of cached experts; None: the model's default

    @property
    def edits_logits(self) -> bool:
        """Whether anything but temperature and filters changes the logits."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words_ids
        )

    @property
    def needs_history(self) -> bool:
        """Whether the logits of the next token depend on the answer's tokens so far."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or any(len(word) > 1 for word in self.bad_words_ids)
        )

    def check(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field that is out of range."""
        for name, bounds in PARAMETER_BOUNDS.items():
            value = getattr(self, name)
            if value is not None:
                _in_range(name, value, bounds)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings", param="stop")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise RequestError(
                    f"each stop string has 1 to {MAX_STOP_CHARS} characters", param="stop"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids"
            )
        _ids_in_vocabulary("stop_token_ids", self.stop_token_ids, vocab_size)
        self._check_edits(vocab_size)
        if self.structured is not None and (problem := self.structured.problem()) is not None:
            raise RequestError(f"{self.structured.param} {problem}", param=self.structured.param)

    def _check_edits(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens", param="logit_bias"
            )
        _ids_in_vocabulary("logit_bias", [each[0] for each in self.logit_bias], vocab_size)
        for _, bias in self.logit_bias:
            _in_range("logit_bias", bias, LOGIT_BIAS_BOUNDS)
        if len(self.allowed_token_ids) > vocab_size:
            raise RequestError(
                "allowed_token_ids is longer than the vocabulary", param="allowed_token_ids"
            )
        _ids_in_vocabulary("allowed_token_ids", self.allowed_token_ids, vocab_size)
        if len(self.bad_words_ids) > MAX_BAD_WORDS:
            raise RequestError(f"bad_words takes at most {MAX_BAD_WORDS} words", param="bad_words")
        for word in self.bad_words_ids:
            if not 1 <= len(word) <= MAX_BAD_WORD_IDS:
                raise RequestError(
                    f"each of bad_words has 1 to {MAX_BAD_WORD_IDS} tokens", param="bad_words"
                )
            _ids_in_vocabulary("bad_words", word, vocab_size)
        if self.context_policy not in (None, *CONTEXT_POLICIES):
            raise RequestError(
                f"context_policy must be one of {', '.join(CONTEXT_POLICIES)}",
                param="context_policy",
            )


LOGIT_BIAS_BOUNDS = Bounds(-100, 100)
PARAMETER_BOUNDS: dict[str, Bounds] = {
    each.name: each.metadata["bounds"] for each in fields(SamplingParams) if each.metadata
}
_MESSAGES = {  # where the range alone would be less clear
    "top_k": "top_k must be 0 (off) or a positive integer",
    "seed": "seed must fit in a signed 64-bit integer",
    "max_tokens": "max_tokens must be at least 1",
    "min_tokens": "min_tokens must be at least 0",
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request as token ids: every front end builds it, the engine runs it.

    `emitted_ids` are tokens that another worker already produced for the same request: generation
    continues after them, they count against max_tokens, and they are not emitted again.
    """

    request_id: str  # made by the server, never by a client
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    emitted_ids: tuple[int, ...] = ()
    deadline_s: float | None = (
        None  # on time.monotonic(): a request that still waits then is dropped
    )
    priority: int = 0  # lower is scheduled first, and preempted last
    may_decline: bool = False  # a worker without room may return the error `declined`
    num_expected: int = 0  # predicted tokens of prompt and answer; 0: no prediction


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was by the model's own logits, before any parameter of the request.

    `rank` is 1 for the likeliest. `top` has the likeliest tokens with their logprobs, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """Where a request's time to first token went in its worker, in seconds."""

    queue_s: float  # from arrival at the engine to admission
    prefill_s: float  # from there to the first token


@dataclass(slots=True)
class Delta:
    """What one engine step produced for one request.

    `token_ids` are in order and never repeated. A request's last delta has `finish_reason` set.
    A token that ended the sequence is included in `token_ids` and named by `stop_token_id`, so that
    it is counted but not rendered.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None  # a code of the error catalogue, when finish_reason is ERROR
    error_message: str = ""  # for the client, where the request itself is at fault
    error_param: str | None = None  # the field at fault
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_evicted_tokens: int = 0  # with the last delta: tokens that the sink window evicted
    moe_mode: str = "exact"  # with the last delta: how exact the experts were
    num_neurons: int = 0  # with the last delta: sparse, of the experts that answer tokens had
    num_skipped_neurons: int = 0  # of those, skipped
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, if requested
    # Of the prompt's tokens from the second on, with the first delta, if requested.
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    times: FirstTokenTimes | None = None  # with the first delta
    engine: str = ""  # address of the worker, where there are several


def _ids_in_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    if any(not 0 <= token_id < vocab_size for token_id in ids):
        raise RequestError(f"{name}: token ids must lie in [0, {vocab_size})", param=name)


def _in_range(name: str, value: float, bounds: Bounds) -> None:
    above = bounds.low < value if bounds.open_low else bounds.low <= value
    if not (above and value <= bounds.high):  # false for NaN, too; an int may exceed any float
        bracket = "(" if bounds.open_low else "["
        message = f"{name} must lie in {bracket}{bounds.low:.10g}, {bounds.high:.10g}]"
        raise RequestError(_MESSAGES.get(name, message), param=name)
