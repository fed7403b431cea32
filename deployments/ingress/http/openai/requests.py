"""OpenAI's request bodies as Calls: fields that are supported, refused by name, or ignored.

It makes no decision that the request core makes for all front ends.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import Field

from penstock.deployments.ingress.core.call import MAX_PRIORITY, CallOptions, ChatPrompt
from penstock.deployments.ingress.core.service import MAX_PROMPTS
from penstock.deployments.ingress.core.tools import Toolset, only_one, toolset_of
from penstock.deployments.ingress.http.body import (
    Strict,
    body_values,
    json_object,
    sampling_field,
    sampling_params,
    strings,
    validated,
)
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.deployments.ingress.http.openai.parts import (
    ChatMessage,
    NamedTool,
    ShapeFields,
    ToolBody,
    ToolChoice,
    known_messages,
)
from penstock.workers.request import MAX_LOGPROBS, RequestError, SamplingParams
from penstock.workers.structured_spec import StructuredSpec

# Harmless to ignore: they tell the provider about the caller, or hint at something we do not have.
IGNORED = frozenset(
    (
        *("metadata", "store", "service_tier", "safety_identifier", "verbosity"),
        *("prompt_cache_key", "prompt_cache_retention", "session_id", "request_id"),
    )
)

# Known to clients but not served. At these values they change nothing, so they may be sent.
_OFF = (None, False)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    **dict.fromkeys(("echo", "continue_final_message", "use_beam_search"), _OFF),
    **dict.fromkeys(("functions", "documents"), (None, [])),
    "function_call": (None, "none", "auto"),
    "chat_template": (None,),
    "modalities": (None, ["text"]),
    **dict.fromkeys(("audio", "prediction", "web_search_options"), (None,)),
    "reasoning_effort": (None, "none"),
    **dict.fromkeys(("suffix",), (None, "")),
    **dict.fromkeys(("kv_transfer_params", "thinking_token_budget"), (None,)),
    "stream_interval": (None, 1),
}
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's legacy endpoint


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="send usage in a last chunk of its own")
    include_obfuscation: bool | None = Field(None, description="ignored")


class _GenerationRequest(ShapeFields):
    """What chat and completions have in common."""

    model: str | None = Field(None, description="as /v1/models names it; default: the one served")
    temperature: float | None = sampling_field("temperature")
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = sampling_field("top_k")
    min_p: float | None = sampling_field("min_p")
    seed: int | None = sampling_field("seed")
    stop: str | list[str] | None = sampling_field("stop")
    stop_token_ids: list[int] | None = sampling_field("stop_token_ids")
    max_tokens: int | None = sampling_field("max_tokens")
    min_tokens: int | None = sampling_field("min_tokens")
    ignore_eos: bool | None = sampling_field("ignore_eos")
    repetition_penalty: float | None = sampling_field("repetition_penalty")
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    logit_bias: dict[str, float] | None = sampling_field("logit_bias")
    allowed_token_ids: list[int] | None = sampling_field("allowed_token_ids", min_length=1)
    bad_words: list[str] | None = Field(None, description="up to 64 words that must not come")
    context_policy: Literal["full", "sink_window"] | None = sampling_field("context_policy")
    sinks: int | None = sampling_field("sinks")
    window: int | None = sampling_field("window")
    roll: int | None = sampling_field("roll")
    moe_mode: Literal["exact", "quantized", "sparse"] | None = sampling_field("moe_mode")
    n: int | None = Field(None, description="answers to each prompt; 1 to 8; default 1")
    priority: int | None = Field(
        None, ge=0, le=MAX_PRIORITY, description="of those that wait, lower goes first; default 0"
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        description="share computed prompts only with requests that have the same salt",
    )
    user: str | None = Field(
        None, description="whom it is for: without API keys, those that wait share by it"
    )
    prompt_logprobs: int | None = sampling_field("prompt_logprobs")
    truncate_prompt_tokens: int | None = Field(
        None, description="keep only this many tokens of the prompt, the last ones"
    )
    include_stop_str_in_output: bool | None = Field(None, description="default false")
    return_token_ids: bool | None = Field(
        None, description="send token_ids of the answer and prompt_token_ids; default false"
    )
    skip_special_tokens: bool | None = Field(None, description="default true")
    stream: bool | None = Field(None, description="send server-sent events; default false")
    stream_options: StreamOptions | None = None

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        return sampling_params(
            self,
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=strings(self.stop),
            logit_bias=tuple(map(_bias, (self.logit_bias or {}).items())),
            structured=self.shape(),
        )

    def options(self) -> CallOptions:
        return CallOptions(
            model=self.model,
            priority=self.priority,
            cache_salt=self.cache_salt or "",
            tenant=self.user or "",
            skip_special_tokens=self.skip_special_tokens is not False,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            bad_words=tuple(self.bad_words or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
        )

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @classmethod
    def cleaned(
        cls, values: dict[str, Any], left_out: IgnoredFields | None = None
    ) -> dict[str, Any]:
        """`values` of a body without what is ignored inside them. Raises RequestError."""
        return values


class ChatCompletionRequest(_GenerationRequest):
    """A conversation to answer."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(None, description="the newer name of max_tokens")
    add_generation_prompt: bool | None = Field(None, description="default true")
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = Field(
        None, description="variables of the model's chat template, such as enable_thinking"
    )
    logprobs: bool | None = Field(None, description="return the logprob of each token")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="how many of the likeliest alternatives"
    )
    tools: list[ToolBody] | None = Field(None, description="functions that the model may call")
    tool_choice: ToolChoice | None = Field(None, description="default auto, where there are tools")
    parallel_tool_calls: bool | None = Field(None, description="several calls; default true")

    @classmethod
    def cleaned(
        cls, values: dict[str, Any], left_out: IgnoredFields | None = None
    ) -> dict[str, Any]:
        messages = values.get("messages")
        return values | {"messages": known_messages(messages, left_out)} if messages else values

    @cached_property
    def toolset(self) -> Toolset | None:
        """The tools, parsed and checked once. Raises RequestError naming what is wrong."""
        chosen = self.tool_choice
        return toolset_of(
            tuple(tool.tool() for tool in self.tools or ()),
            mode=chosen if isinstance(chosen, str) else None,
            only=chosen.function.name if isinstance(chosen, NamedTool) else None,
            is_parallel=self.parallel_tool_calls is not False,
        )

    def shape(self) -> StructuredSpec | None:
        calls = self.toolset
        specs = (super().shape(), None if calls is None else calls.spec())
        return only_one([spec for spec in specs if spec is not None], "tool_choice")

    def params(self) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        newer = self.max_completion_tokens
        return self.sampling(
            self.max_tokens if newer is None else newer,
            (self.top_logprobs or 0) if self.logprobs else None,
        )

    def prompt(self) -> ChatPrompt:
        return ChatPrompt(
            tuple(each.plain(f"messages[{i}]") for i, each in enumerate(self.messages)),
            add_generation_prompt=self.add_generation_prompt is not False,
            tools=self.toolset,
            variables=self.chat_template_kwargs or {},
        )

    def options(self) -> CallOptions:
        return replace(super().options(), splits_reasoning=True)


class CompletionRequest(_GenerationRequest):
    """Prompts to continue: text or token ids, one or several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    add_special_tokens: bool | None = Field(None, description="default true")
    logprobs: int | None = Field(
        None, description="tell how likely each token was, with up to 20 alternatives"
    )
    echo: bool | None = Field(
        None, description="begin with the prompt; max_tokens may then be 0; default false"
    )

    @classmethod
    def cleaned(
        cls, values: dict[str, Any], left_out: IgnoredFields | None = None
    ) -> dict[str, Any]:
        """Raises RequestError for more prompts than are served; token ids are one prompt."""
        prompt = values.get("prompt")
        if (
            isinstance(prompt, list)
            and len(prompt) > MAX_PROMPTS
            and not isinstance(prompt[0], int)
        ):
            raise RequestError(f"send at most {MAX_PROMPTS} prompts in one call", param="prompt")
        return values

    def params(self) -> SamplingParams:
        max_tokens = self.max_tokens
        if max_tokens is None and self.context_policy != "sink_window":
            max_tokens = DEFAULT_COMPLETION_TOKENS
        return self.sampling(max_tokens, self.logprobs)

    def options(self) -> CallOptions:
        return replace(
            super().options(),
            add_special_tokens=self.add_special_tokens is not False,
            echo=bool(self.echo),
        )

    def prompts(self) -> list[str | tuple[int, ...]]:
        """One per choice of the answer. Raises RequestError if there are none."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        if isinstance(prompt[0], int):
            return [tuple(prompt)]
        return [each if isinstance(each, str) else tuple(each) for each in prompt]


def _bias(item: tuple[str, float]) -> tuple[int, float]:
    """A token id and its bias. Raises RequestError unless the id is written as JSON would."""
    name, bias = item
    if not (name.isascii() and name.isdigit() and len(name) <= 10 and str(int(name)) == name):
        raise RequestError("the keys of logit_bias must be token ids", param="logit_bias")
    return int(name), bias


RequestT = TypeVar("RequestT", bound=_GenerationRequest)


def parse(
    kind: type[RequestT], body: bytes, left_out: IgnoredFields | None = None
) -> RequestT:
    """The request in a JSON body. Raises RequestError naming the first parameter that is wrong.

    `left_out`: is told what is ignored; None: what is unknown is refused.
    """
    left_out = IgnoredFields() if left_out is None else left_out
    values = body_values(
        json_object(body),
        kind.model_fields,
        UNSUPPORTED,
        IGNORED,
        left_out,
        conversations=("messages",),
    )
    request = validated(kind, kind.cleaned(values, left_out), left_out)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    return request
