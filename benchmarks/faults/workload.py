"""Calls of every feature that a continuation has to keep, and what a client gets of each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from penstock.deployments.ingress.core.call import Call, CallOptions, ChatPrompt
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.core.tools import Tool, Toolset
from penstock.workers.request import SamplingParams
from penstock.workers.structured_spec import StructuredKind, StructuredSpec

SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":30},'
    '"age":{"type":"integer"}},"required":["name","age"],"additionalProperties":false}'
)
JSON = StructuredSpec(StructuredKind.JSON_SCHEMA, SCHEMA, param="response_format")
TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "integer"}}})
WORDS = ("sea", "road", "letter", "winter", "house", "voice", "garden", "morning", "friend", "door")
FEATURES = (
    *("greedy", "seeded", "n", "penalties", "stop string", "logprobs", "json_schema", "tools"),
    *("sink_window", "long"),
)


@dataclass
class Answer:
    """All that a client gets of one call, by choice."""

    text: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    scored: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # (token id, rank)
    tool_calls: dict[int, str] = field(default_factory=dict)
    ends: dict[int, tuple[Any, ...]] = field(default_factory=dict)


async def answer(core: RequestCore, call: Call, num_choices: int) -> Answer:
    """Run a call to its end. Raises ServiceError and RequestError."""
    got = Answer()
    async for index, piece in core.run_many(await core.prepare_choices(call, num_choices)):
        got.text[index] = got.text.get(index, "") + piece.text
        got.ids.setdefault(index, []).extend(piece.token_ids)
        got.scored.setdefault(index, []).extend((e.token_id, e.rank) for e in piece.logprobs)
        for made in piece.tool_calls:
            told = (made.name or "") + made.arguments
            got.tool_calls[index] = got.tool_calls.get(index, "") + told
        if piece.finish_reason is not None:
            usage = piece.usage
            assert usage is not None
            # Not cached_tokens: they depend on which worker had the prompt.
            counts = (usage.prompt_tokens, usage.completion_tokens, usage.evicted_tokens)
            got.ends[index] = (piece.finish_reason, piece.stop_reason, *counts)
    return got


def make_call(number: int) -> tuple[str, Call, int]:
    """The call of that number: its feature, the call, and its choices."""
    rng = random.Random(number)
    feature = FEATURES[number % len(FEATURES)]
    prompt: Any = f"The {rng.choice(WORDS)} and the {rng.choice(WORDS)} were"
    params: dict[str, Any] = {"temperature": 1.0, "seed": number, "ignore_eos": True}
    params["max_tokens"] = rng.randrange(20, 200)
    num_choices = 1
    if feature == "greedy":
        params["temperature"] = 0.0
    elif feature == "n":
        num_choices = 3
    elif feature == "penalties":
        params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    elif feature == "stop string":
        params |= {"stop": ("e w", "ing t"), "max_tokens": 300}
    elif feature == "logprobs":
        params |= {"logprobs": 2}
    elif feature == "json_schema":
        params |= {"structured": JSON, "ignore_eos": False}
    elif feature == "tools":
        prompt = ChatPrompt(({"role": "user", "content": prompt},), tools=Toolset((TOOL,)))
        params["ignore_eos"] = False
    elif feature == "sink_window":
        params |= {"context_policy": "sink_window", "sinks": 4, "window": 48, "roll": 16}
        params["max_tokens"] = 300
    elif feature == "long":
        params["max_tokens"] = 700
    return feature, Call(prompt, SamplingParams(**params), CallOptions()), num_choices
