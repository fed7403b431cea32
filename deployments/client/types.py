"""Arguments and results of the Python client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Required, TypedDict

Prompt = str | Sequence[int]
Message = Mapping[str, Any]  # role, content; also tool_calls, tool_call_id, reasoning


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # the model ended it, a stop string or token did, or it called tools
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # it was cancelled


class Sampling(TypedDict, total=False):
    """How to sample and when to stop; a missing key takes the server's default."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    logprobs: int
    prompt_logprobs: int
    include_stop_str_in_output: bool
    # The shape of the whole answer; one of these at most.
    json_schema: str | Mapping[str, Any]
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str
    # "full" or "sink_window"; with the latter an answer may go on without end.
    context_policy: str
    sinks: int
    window: int
    roll: int
    moe_mode: str  # "exact", or what the server is configured for
    speculate: bool  # False: no draft tokens; the answer is the same
    n: int  # answers, side by side
    truncate_prompt_tokens: int
    return_timings: bool
    priority: int  # 0 to 100; of those that wait, lower goes first
    cache_salt: str  # computed prompts are shared only with requests of the same salt
    echo: bool  # not for a conversation
    # For a conversation only. `tool_choice` is "auto", "none", "required" or a tool's name; its
    # answer's `tool_calls` go back in a message of the assistant, the result in one of role "tool"
    # with `tool_call_id`.
    tools: Sequence[Tool]
    tool_choice: str
    parallel_tool_calls: bool


class Tool(TypedDict, total=False):
    """A function that the model may call. `parameters`: a JSON schema, as text or as a mapping."""

    name: Required[str]
    description: str
    parameters: str | Mapping[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, or a piece of one: the first one has id and name.

    `index` tells the calls of an answer apart; `arguments` is JSON, in pieces to be joined.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each phase, of several answers the longest. None: it did not come."""

    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and how likely it was; `top` has the likeliest tokens there, best first.

    `logprob` is None for the first token of a prompt; `token` may be a part of a character.
    """

    token_id: int
    token: bytes
    logprob: float | None
    rank: int = 0
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer. `cached_tokens` of the prompt came from the prefix cache; a sink window
    has put `evicted_tokens` out of sight for good; `reasoning_tokens` are part of the completion.
    `moe_mode` says how exact the experts were if they were not, or if it was asked for; sparse ones
    left out `skipped_neurons` of `neurons`. Of `draft_tokens` that were verified,
    `accepted_draft_tokens` are part of the completion.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings: Timings | None = None  # where asked for
    evicted_tokens: int = 0
    reasoning_tokens: int = 0
    moe_mode: str = ""
    neurons: int = 0
    skipped_neurons: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer; the last one has finish_reason and usage, the first one request_id.

    `reasoning` is a conversation's, and comes before all text of its choice. `choice` tells which
    of several answers it belongs to; usage comes with the last piece of all.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    request_id: str = ""
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; with `n`, the first one, and `others` are the rest. `usage` is of all.

    An answer that called tools ends with STOP, and has its calls in `tool_calls`. What the model
    reasoned before it is in `reasoning`, not in `text`; completions have it in their text.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    request_id: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    others: tuple[Answer, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """A served model. `max_model_len`: most tokens of prompt and answer together."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
