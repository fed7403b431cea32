"""`penstock.SamplingParams`: how to sample, under the names of vLLM and of the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

MAX_TOKENS = 16  # as vLLM's


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of an answer are chosen, and when the answer ends. None: the default, which
    for temperature, top_p, top_k, min_p and repetition_penalty is the model's own, if it has one.

    The fields, their bounds and defaults are those of the HTTP API (docs/reference/http-api.md);
    `LLM` checks them with the prompts. `max_tokens` None: until the model ends the answer or
    its context is full. `structured_outputs` is a mapping with one of json, json_object, regex,
    choice and grammar.
    """

    n: int = 1  # answers to each prompt, 1 to 8
    max_tokens: int | None = MAX_TOKENS
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Sequence[str] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    context_policy: str | None = None
    sinks: int | None = None
    window: int | None = None
    roll: int | None = None
    moe_mode: str | None = None
    speculate: bool | None = None

    def body(self) -> dict[str, Any]:
        """The fields that are set, as a body of the HTTP API has them."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "logit_bias" and isinstance(value, Mapping):
                value = {str(token): bias for token, bias in value.items()}
            elif isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, Mapping):
                value = dict(value)
            if value is not None:
                values[field.name] = value
        return values
