"""OpenAI's request bodies as Calls: fields that are supported, refused by name, or ignored.

It makes no decision that the request core makes for all front ends.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from pydantic import Field

from penstock.deployments.ingress.core.call import CallOptions, ChatPrompt
from penstock.deployments.ingress.core.service import MAX_PROMPTS
from penstock.deployments.ingress.core.tools import Toolset, only_one, toolset_of
from penstock.deployments.ingress.http.body import body_values, json_object, validated
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.deployments.ingress.http.openai.generation_request import GenerationRequest
from penstock.deployments.ingress.http.openai.other_fields import (
    HINTS,
    IGNORED,
    UNSUPPORTED,
    in_our_words,
)
from penstock.deployments.ingress.http.openai.parts import (
    ChatMessage,
    NamedTool,
    ToolBody,
    ToolChoice,
    check_shapes,
    known_messages,
)
from penstock.deployments.ingress.http.template_fields import Effort, EffortLevel
from penstock.workers.request import MAX_LOGPROBS, RequestError, SamplingParams
from penstock.workers.sampling_defaults import SamplingDefaults
from penstock.workers.structured_spec import StructuredSpec

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's legacy endpoint


class ChatCompletionRequest(GenerationRequest):
    """A conversation to answer."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(None, description="the newer name of max_tokens")
    add_generation_prompt: bool | None = Field(None, description="default true")
    continue_final_message: bool | None = Field(
        None, description="go on with the text of the last message, the assistant's; default false"
    )
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
    reasoning_effort: EffortLevel | None = Field(
        None, description="how much to reason, where the model's chat template can be told"
    )
    include_reasoning: bool | None = Field(
        None, description="false: leave the reasoning out of the answer; default true"
    )
    separate_reasoning: bool | None = Field(
        None, description="false: leave the reasoning in the text; default true"
    )

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

    def params(self, defaults: SamplingDefaults) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        newer = self.max_completion_tokens
        return self.sampling(
            defaults,
            self.max_tokens if newer is None else newer,
            (self.top_logprobs or 0) if self.logprobs else None,
        )

    def prompt(self) -> ChatPrompt:
        continues = bool(self.continue_final_message)
        last = self.messages[-1] if self.messages else None
        if continues and (last is None or last.role != "assistant" or last.tool_calls):
            raise RequestError(
                "continue_final_message: the last message must be a text of the assistant",
                param="continue_final_message",
            )
        if continues and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        return ChatPrompt(
            tuple(each.plain(f"messages[{i}]") for i, each in enumerate(self.messages)),
            add_generation_prompt=not continues and self.add_generation_prompt is not False,
            continues_last=continues,
            tools=self.toolset,
            variables=self.chat_template_kwargs or {},
        )

    @property
    def hides_reasoning(self) -> bool:
        return self.include_reasoning is False

    @property
    def effort(self) -> Effort | None:
        """How much to reason; None: the request does not say."""
        level = self.reasoning_effort
        return None if level is None else Effort(level, "reasoning_effort")

    def options(self) -> CallOptions:
        return replace(super().options(), splits_reasoning=self.separate_reasoning is not False)


class CompletionRequest(GenerationRequest):
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

    def params(self, defaults: SamplingDefaults) -> SamplingParams:
        max_tokens = self.max_tokens
        if max_tokens is None and self.context_policy != "sink_window":
            max_tokens = DEFAULT_COMPLETION_TOKENS
        return self.sampling(defaults, max_tokens, self.logprobs)

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


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse(kind: type[RequestT], body: bytes, left_out: IgnoredFields | None = None) -> RequestT:
    """The request in a JSON body. Raises RequestError naming the first parameter that is wrong.

    `left_out`: called with the ignored fields; None: unknown fields are refused.
    """
    left_out = IgnoredFields() if left_out is None else left_out
    values = body_values(
        in_our_words(json_object(body), left_out, is_chat=kind is not CompletionRequest),
        kind.model_fields,
        UNSUPPORTED,
        IGNORED,
        left_out,
        hints=HINTS,
        conversations=("messages",),
    )
    check_shapes(values.get("structured_outputs"))
    request = validated(kind, kind.cleaned(values, left_out), left_out)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    return request
