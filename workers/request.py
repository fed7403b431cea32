"""One generation: its `Request`, and the `Delta`s that the engine returns.

No text: a prompt is token ids, and stop strings are kept only for the ingress, which has the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.workers.config import CONTEXT_POLICIES
from penstock.workers.parameters import (
    EVERY_API,
    FROM_0,
    FROM_1,
    MOST_APIS,
    SHAPED_APIS,
    WIDE_APIS,
    Bounds,
    parameter,
    parameters_of,
)
from penstock.workers.stats import MemoryEvent
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


DECLINED = "declined"  # an error code that no client sees: the ingress tries another worker
# An error code that a client sees only if no worker gets its experts for long.
STORE_UNAVAILABLE = "expert_store_unavailable"
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
# Tokens named in the scores of a call's prompts, alternatives included: each takes 500 to 750 bytes
# of an ingress, and 70 of a JSON answer. A prompt of 4,761 tokens with 20 alternatives each.
MAX_PROMPT_SCORES = 100_000
MAX_LOGIT_BIAS = 1024
LEAST_REPETITION_PENALTY = 0.01  # a logit divided by next to nothing is infinite
MAX_BAD_WORDS = 128
MAX_BAD_WORD_IDS = 64
MAX_SINKS = 1024
LOGIT_BIAS_BOUNDS = Bounds(-100, 100)
INT64 = Bounds(-(2**63), 2**63 - 1)
CONTEXT_POLICY_HELP = (
    "which earlier tokens a token attends to: full, or sink_window, which allows endless answers; "
    "default: as the server is configured"
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Each request carries its own, on every step.

    temperature 0 means greedy. top_k 0, top_p 1 and min_p 0 switch the filter off. With a `seed`
    the draw for token i depends on (seed, i) alone, whatever else is in the batch. The metadata of
    each field has its help, bounds and APIs.
    """

    temperature: float = parameter(1.0, EVERY_API, "0 is greedy", Bounds(0, 100), of_model=True)
    top_k: int = parameter(
        0, EVERY_API, "this many of the likeliest tokens; 0: all", FROM_0, of_model=True
    )
    top_p: float = parameter(
        1.0,
        EVERY_API,
        "likeliest tokens of this total probability",
        Bounds(0, 1, open_low=True),
        of_model=True,
    )
    min_p: float = parameter(
        0.0,
        MOST_APIS,
        "least probability, relative to the likeliest token",
        Bounds(0, 1),
        of_model=True,
    )
    seed: int | None = parameter(
        None, MOST_APIS, "64 bits, signed; the same seed draws the same tokens", INT64
    )
    max_tokens: int | None = parameter(None, EVERY_API, "most tokens of the answer", FROM_1)
    min_tokens: int = parameter(0, MOST_APIS, "nothing ends the answer before", FROM_0)
    ignore_eos: bool = parameter(False, MOST_APIS, "continue after the end-of-sequence token")
    # Checked at the ingress, where text exists.
    stop: tuple[str, ...] = parameter(
        (), EVERY_API, f"up to {MAX_STOP_STRINGS} strings of up to {MAX_STOP_CHARS} characters"
    )
    stop_token_ids: tuple[int, ...] = parameter(
        (), WIDE_APIS, f"up to {MAX_STOP_TOKEN_IDS} tokens that end the answer"
    )
    repetition_penalty: float = parameter(
        1.0,
        MOST_APIS,
        "divides logits of earlier tokens",
        Bounds(LEAST_REPETITION_PENALTY, 100),
        of_model=True,
    )
    presence_penalty: float = parameter(
        0.0, MOST_APIS, "subtracted from the logit of a token of the answer", Bounds(-2, 2)
    )
    frequency_penalty: float = parameter(
        0.0, MOST_APIS, "subtracted for each time that a token occurred", Bounds(-2, 2)
    )
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (),
        WIDE_APIS,
        f"{LOGIT_BIAS_BOUNDS} to add to the logit, by token id; up to {MAX_LOGIT_BIAS}",
    )
    allowed_token_ids: tuple[int, ...] = parameter(
        (), WIDE_APIS, "no other tokens may come; empty: all may"
    )
    bad_words_ids: tuple[tuple[int, ...], ...] = parameter(
        (), WIDE_APIS, "token sequences that must not be completed"
    )
    logprobs: int | None = parameter(
        None, WIDE_APIS, "return logprobs, with this many alternatives", Bounds(0, MAX_LOGPROBS)
    )
    prompt_logprobs: int | None = parameter(
        None,
        WIDE_APIS,
        "the same for the tokens of the prompt; tokens of all prompts, times (1 + alternatives), "
        f"times answers: at most {MAX_PROMPT_SCORES}",
        Bounds(0, MAX_LOGPROBS),
    )
    structured: StructuredSpec | None = parameter(
        None, SHAPED_APIS, "the shape that the answer must have"
    )
    context_policy: str | None = parameter(None, WIDE_APIS, CONTEXT_POLICY_HELP)
    sinks: int | None = parameter(
        None, WIDE_APIS, "sink_window: first tokens, which stay visible", Bounds(1, MAX_SINKS)
    )
    window: int | None = parameter(None, WIDE_APIS, "sink_window: newest visible tokens", FROM_1)
    roll: int | None = parameter(
        None, WIDE_APIS, "sink_window: tokens by which the window moves at once", FROM_1
    )
    moe_mode: str | None = parameter(
        None, WIDE_APIS, "of cached experts: exact, or the mode of the server, the default"
    )
    speculate: bool | None = parameter(
        None, WIDE_APIS, "false: no draft tokens for this answer; its tokens are the same"
    )

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
        _at_most(MAX_STOP_STRINGS, "strings", "stop", self.stop)
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise RequestError(
                    f"each stop string has 1 to {MAX_STOP_CHARS} characters", param="stop"
                )
        _at_most(MAX_STOP_TOKEN_IDS, "ids", "stop_token_ids", self.stop_token_ids)
        _ids_in_vocabulary("stop_token_ids", self.stop_token_ids, vocab_size)
        self._check_edits(vocab_size)
        if self.structured is not None and (problem := self.structured.problem()) is not None:
            raise RequestError(f"{self.structured.param} {problem}", param=self.structured.param)

    def _check_edits(self, vocab_size: int) -> None:
        _at_most(MAX_LOGIT_BIAS, "tokens", "logit_bias", self.logit_bias)
        _ids_in_vocabulary("logit_bias", [each[0] for each in self.logit_bias], vocab_size)
        for _, bias in self.logit_bias:
            _in_range("logit_bias", bias, LOGIT_BIAS_BOUNDS)
        if len(self.allowed_token_ids) > vocab_size:
            raise RequestError(
                "allowed_token_ids is longer than the vocabulary", param="allowed_token_ids"
            )
        _ids_in_vocabulary("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _at_most(MAX_BAD_WORDS, "words", "bad_words", self.bad_words_ids)
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


PARAMETERS = parameters_of(SamplingParams)
PARAMETER_BOUNDS = {name: each.bounds for name, each in PARAMETERS.items() if each.bounds}
_SEED = "seed must fit in a signed 64-bit integer"
# For numbers below and above the range, where the range alone would be less clear.
_TOO_LOW = {
    "top_k": "top_k must be 0 (off) or a positive integer",
    "seed": _SEED,
    "max_tokens": "max_tokens must be at least 1",
    "min_tokens": "min_tokens must be at least 0",
}
_TOO_HIGH = {"seed": _SEED}


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
    wait_until_s: float | None = None  # the same clock: dropped if it has never been computed then
    priority: int = 0  # lower is scheduled first, and preempted last
    may_decline: bool = False  # a worker without room may return the error `declined`
    # It was admitted once, on a worker that was lost: a full queue does not refuse it. So many are
    # bounded by what that worker had admitted.
    is_continued: bool = False
    embeds: bool = False  # nothing is generated: its last delta has the `embedding` of the prompt
    cache_domain: bytes = b""  # cached prefixes are shared within a domain only
    adapter: str = ""  # the name of a LoRA adapter; "": the model itself


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
    num_draft_tokens: int = 0  # that steps have verified so far
    num_accepted_tokens: int = 0  # of those, part of the answer
    moe_mode: str = "exact"  # with the last delta: how exact the experts were
    num_neurons: int = 0  # with the last delta: sparse, of the experts that answer tokens had
    num_skipped_neurons: int = 0  # of those, skipped
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, if requested
    # Of the prompt's tokens from the second on, with the first delta, if requested.
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    times: FirstTokenTimes | None = None  # with the first delta
    events: list[MemoryEvent] = field(default_factory=list)  # since the last delta
    # Of a request that embeds, with its only delta: the pooled hidden state after the final norm,
    # not normalised, as little-endian fp32.
    embedding: bytes = b""
    engine: str = ""  # address of the worker, where there are several
    computes: str = ""  # at an ingress: WorkerInfo.computes of the worker
    is_replayed: bool = False  # at an ingress: from the journal of a stream that is continued


def check_prompt_scores(num_scores: int, param: str = "prompt_logprobs") -> None:
    """Raise RequestError if the scores of a call's prompts name more tokens than they may.

    `num_scores`: tokens of the prompts, times (1 + alternatives), times answers. `param`: the field
    that asks for them."""
    if num_scores > MAX_PROMPT_SCORES:
        raise RequestError(
            f"{param}: the scores of the prompt would name {num_scores} tokens (tokens of all "
            f"prompts, times 1 + alternatives, times n), and may name {MAX_PROMPT_SCORES}: ask for "
            "fewer alternatives, or send the prompt in parts",
            param=param,
        )


def check_input_length(num_tokens: int, most: int) -> None:
    """Raise RequestError unless a text of `num_tokens` that is embedded fits a model that takes
    `most`: no answer follows it."""
    if num_tokens > most:
        raise RequestError(
            f"the text has {num_tokens} tokens, and this model takes at most {most}: send it in "
            "parts, or keep its end with truncate_prompt_tokens",
            param="input",
            code="context_length_exceeded",
        )


def _at_most(most: int, noun: str, name: str, values: Sized) -> None:
    if len(values) > most:
        raise RequestError(f"{name} takes at most {most} {noun}", param=name)


def _ids_in_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    if any(not 0 <= token_id < vocab_size for token_id in ids):
        raise RequestError(f"{name}: token ids must lie in [0, {vocab_size})", param=name)


def _in_range(name: str, value: float, bounds: Bounds) -> None:
    if not bounds.has(value):
        messages = _TOO_HIGH if value > bounds.high else _TOO_LOW
        raise RequestError(messages.get(name, f"{name} must lie in {bounds}"), param=name)
