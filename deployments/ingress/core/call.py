"""The types that all front ends share: what a client asks for (`Call`) and gets (`TextDelta`)."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pydantic_core

from penstock.deployments.ingress.core.logprobs import DecodedLogprob
from penstock.deployments.ingress.core.tools import Toolset
from penstock.deployments.ingress.core.tracing import RequestTrace
from penstock.deployments.options import ANY_NAME
from penstock.workers.request import FinishReason, RequestError, SamplingParams
from penstock.workers.sampling_defaults import SamplingDefaults
from penstock.workers.text.pair_template import Pair
from penstock.workers.text.tool_forms import PLAIN

_SEED_STEP = 0x9E3779B97F4A7C15  # odd: seeds of several prompts differ
MAX_PRIORITY = 100  # 0 is the best that a client may ask for, and what all have


def new_request_id() -> str:
    """Names a call within the server and in its logs; no client chooses it."""
    return secrets.token_hex(12)


class LoraNames:
    """The LoRA adapters of a model that all its workers have; the heartbeat replaces `names`."""

    def __init__(self, names: Sequence[str] = (), *, may_change: bool = False):
        """`may_change`: clients may load and drop adapters."""
        self.names, self.may_change = tuple(names), may_change


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients may know of a model. `max_model_len`: most tokens of prompt and answer.

    Answers bear its `name`, also where the request has one of `other_names`. ANY_NAME among these:
    requests may have any name.
    `sampling_defaults`: for requests that do not say how to sample. `tool_call_parser`: the form in
    which its tool calls are read; plain: tools are described in the system message; unknown.
    `scores_pairs`: it is a reranker, which embeds nothing.
    """

    name: str
    vocab_size: int
    max_model_len: int
    has_chat_template: bool = False
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created_s: int = field(default_factory=lambda: int(time.time()))
    other_names: tuple[str, ...] = ()
    tool_call_parser: str = PLAIN
    scores_pairs: bool = False
    parent: str = ""  # of an adapter: the name of its model
    adapters: LoraNames = field(default_factory=LoraNames, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Those that clients are told, of adapters, too."""
        own = (name for name in self.other_names if name != ANY_NAME)
        return (self.name, *own, *self.adapters.names)

    @property
    def model(self) -> str:
        """The name of the model itself."""
        return self.parent or self.name

    def adapter(self, name: str | None) -> str:
        """`name` if that is an adapter; "": it is the model's."""
        own = name in (None, "", self.name) or name in self.other_names
        return "" if own or name not in self.adapters.names else name or ""

    def named(self, name: str | None) -> ServedModel:
        """What clients know under `name`: an adapter has answers of its own name."""
        adapter = self.adapter(name)
        return replace(self, name=adapter, other_names=(), parent=self.name) if adapter else self

    @property
    def has_any_name(self) -> bool:
        """Whether requests may have any name."""
        return ANY_NAME in self.other_names

    def answers_to(self, name: str) -> bool:
        """Whether requests may have this name."""
        return self.has_any_name or name in self.names


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, for the model's chat template. Each message has `role` and `content`.

    `variables` are for the template, which must know them; their values are plain. With
    `continues_last` the answer goes on with the text of the last message, the assistant's.
    """

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    continues_last: bool = False
    tools: Toolset | None = None
    variables: Mapping[str, bool | int | float | str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a request asks for in addition to its prompt and its sampling parameters.

    `model` None or "" means the first one served. The last `truncate_prompt_tokens` tokens of the
    prompt are used; of -1 as many as leave room for the answer. With `echo` the prompt is part of
    the text, and `max_tokens` may then be 0: the prompt is scored and not answered. `bad_words` are
    added to `SamplingParams.bad_words_ids`.
    Of waiting requests the lowest `priority` is admitted first; None: the best that the API key
    permits, which is 0 without keys. `tenant` is the end user that the
    client names: waiting requests share by principal, or without API keys by tenant.
    `cache_salt` separates cached prefixes further than by principal; "": it does not.
    With `splits_reasoning` a chat answer's reasoning is kept apart, where the model marks it. With
    `embeds` nothing is generated: the only piece has the embedding of the prompt, or its score.
    """

    model: str | None = None
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    echo: bool = False
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    tenant: str = ""
    priority: int | None = None
    cache_salt: str = ""
    splits_reasoning: bool = False
    embeds: bool = False


@dataclass(frozen=True, slots=True)
class CallContext:
    """Where a call comes from: what its connection and headers say, in contrast to its body.

    `deadline_s` is a point on time.monotonic(). `principal` is the tenant of the API key, who alone
    may cancel the call; `key_id` names the key, with which the call ends, and `max_priority` is the
    smallest number that it may have as its priority. `front` and `client_id` are for the access log
    only. With `wants_timings` the usage has the duration of each phase. `seed` is that of a request
    that gives none, where it must be the same at a later try. `is_continued`: it was begun, and
    counted, by an earlier call. `trace`: of the request; None: it is not traced.
    """

    request_id: str = field(default_factory=new_request_id)
    client_id: str | None = None
    principal: str = ""
    key_id: str = ""
    max_priority: int = 0
    deadline_s: float | None = None
    front: str = ""
    wants_timings: bool = False
    seed: int | None = None
    is_continued: bool = False
    trace: RequestTrace | None = field(default=None, compare=False, repr=False)

    def of_prompt(self, index: int, num_prompts: int) -> CallContext:
        """The context of one of several prompts of a call; each is a request of its own."""
        if num_prompts == 1:
            return self
        seed = None if self.seed is None else (self.seed + index * _SEED_STEP) % (1 << 63)
        return replace(self, request_id=f"{self.request_id}-{index}", seed=seed)


@dataclass(frozen=True, slots=True)
class Call:
    """One generation that a client asks for, as a front end understood it."""

    prompt: str | tuple[int, ...] | ChatPrompt | Pair
    params: SamplingParams = field(default_factory=SamplingParams)
    options: CallOptions = field(default_factory=CallOptions)
    context: CallContext = field(default_factory=CallContext)


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where the time of one answer went, in seconds. None: it did not come so far.

    `queue_s` and `prefill_s` are the worker's; `first_token_s` also has what lies between the
    client and the worker, both ways. `decode_s` goes from the first token to the last.
    """

    queue_s: float | None
    prefill_s: float | None
    first_token_s: float | None
    decode_s: float | None
    total_s: float


@dataclass(slots=True)
class TokenUsage:
    """Tokens of one answer. `cached_tokens` of the prompt came from the prefix cache.

    `reasoning_tokens` of the answer came up to the end of the reasoning, its marks included.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    evicted_tokens: int = 0  # put out of sight for good by a sink window
    moe_mode: str = ""  # how exact the experts were, if not exact, or if that was asked for
    neurons: int = 0  # sparse: of the experts that tokens of the answer had
    skipped_neurons: int = 0  # of those, the ones left out
    draft_tokens: int = 0  # that were verified
    accepted_draft_tokens: int = 0  # of those, right, and so part of the answer
    timings: RequestTimings | None = None  # with the last piece, where wanted
    shares_prompt: bool = False  # with another answer of the same call, which counts it

    @classmethod
    def total(cls, usages: Iterable[TokenUsage]) -> TokenUsage:
        """Of all answers of a call; a prompt that some of them share is counted once."""
        sums = cls(0)
        for usage in usages:
            sums.completion_tokens += usage.completion_tokens
            sums.reasoning_tokens += usage.reasoning_tokens
            sums.evicted_tokens += usage.evicted_tokens
            sums.moe_mode = sums.moe_mode or usage.moe_mode
            sums.neurons += usage.neurons
            sums.skipped_neurons += usage.skipped_neurons
            sums.draft_tokens += usage.draft_tokens
            sums.accepted_draft_tokens += usage.accepted_draft_tokens
            if not usage.shares_prompt:
                sums.prompt_tokens += usage.prompt_tokens
                sums.cached_tokens += usage.cached_tokens
        return sums


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A piece of a call of a tool: `index` tells the calls of an answer apart.

    The first piece of a call has its id and name. `arguments` is JSON, in pieces to be joined.
    """

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


def earlier_call(call_id: str, name: str, arguments: str, param: str) -> dict[str, Any]:
    """A call that an earlier answer made, as templates expect it: its arguments are data, not text.

    Of arguments that the limit of tokens cut off, that which is there: an agent sends such a call
    back with a result that says so, and goes on. Raises RequestError, which names `param`, for
    what is no beginning of JSON.
    """
    try:
        data = pydantic_core.from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        raise RequestError(f"{param} is not valid JSON", param=param) from None
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": data}}


@dataclass(slots=True)
class TextDelta:
    """A piece of an answer. The last one has `finish_reason` (never ERROR) and `usage`.

    `text` may be empty while a character, or what may become a stop string, is incomplete.
    `reasoning` comes before all text of the answer.
    `stop_reason` is the stop string or the stop token that ended the answer, if one did.
    `logprobs`, where asked for, are of the tokens whose text this piece completes; over the whole
    answer there is one for every counted token, after those of the prompt with echo.
    `prompt_logprobs`, where asked for, come with the first piece.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: TokenUsage | None = None
    logprobs: list[DecodedLogprob] = field(default_factory=list)
    prompt_logprobs: list[DecodedLogprob] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = field(default_factory=list)
    ends_in_tool_calls: bool = False  # the last piece, where the answer stopped and made some
    embedding: bytes = b""  # as in Delta


_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def is_client_id(text: str) -> bool:
    """Whether `text` is a valid client request id: 1 to 128 of A-Z a-z 0-9 . _ -"""
    return _CLIENT_ID.fullmatch(text) is not None
