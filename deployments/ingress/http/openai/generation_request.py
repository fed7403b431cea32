"""What OpenAI's bodies of chat and completions have in common."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.deployments.ingress.core.call import MAX_PRIORITY, CallOptions
from penstock.deployments.ingress.http.body import sampling_field, sampling_params, strings
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.deployments.ingress.http.openai.parts import ShapeFields, StreamOptions
from penstock.workers.request import RequestError, SamplingParams
from penstock.workers.sampling_defaults import SamplingDefaults


class GenerationRequest(ShapeFields):
    """The fields of both; each of them has its own prompt."""

    model: str | None = Field(None, description="as /v1/models names it; default: the first one")
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
    moe_mode: Literal["exact", "quantized", "sparse", "streamed"] | None = sampling_field(
        "moe_mode"
    )
    speculate: bool | None = sampling_field("speculate")
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
        None,
        description="keep only this many tokens of the prompt, the last ones; -1: as many as fit",
    )
    include_stop_str_in_output: bool | None = Field(None, description="default false")
    return_token_ids: bool | None = Field(
        None, description="send token_ids of the answer and prompt_token_ids; default false"
    )
    skip_special_tokens: bool | None = Field(None, description="default true")
    stream: bool | None = Field(None, description="send server-sent events; default false")
    stream_options: StreamOptions | None = None

    def sampling(
        self, defaults: SamplingDefaults, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        return sampling_params(
            self,
            defaults,
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
    def wants_running_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        options = self.stream_options
        return self.wants_usage_chunk and bool(options and options.continuous_usage_stats)

    @property
    def hides_reasoning(self) -> bool:
        """Whether the reasoning is no part of the answer."""
        return False

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @classmethod
    def cleaned(
        cls, values: dict[str, Any], left_out: IgnoredFields | None = None
    ) -> dict[str, Any]:
        """`values` of a body without what is ignored inside them. Raises RequestError."""
        return values


def _bias(item: tuple[str, float]) -> tuple[int, float]:
    """A token id and its bias. Raises RequestError unless the id is written as JSON would."""
    name, bias = item
    if not (name.isascii() and name.isdigit() and len(name) <= 10 and str(int(name)) == name):
        raise RequestError("the keys of logit_bias must be token ids", param="logit_bias")
    return int(name), bias
