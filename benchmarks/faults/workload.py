"""Calls of every feature that a continuation has to keep, and what a client gets of each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from penstock.deployments.ingress.core.call import Call, CallContext, CallOptions, ChatPrompt
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
    *("sink_window", "long", "unseeded"),
)


@dataclass
class Answer:
    """All that a client gets of one call, by choice."""

    text: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    scored: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)  # (token id, rank)
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
    feature, prompt, fields = make_fields(number)
    given: Any = prompt
    params: dict[str, Any] = dict(fields)
    num_choices = params.pop("n", 1)
    context = CallContext()
    if "stop" in params:
        params["stop"] = tuple(params["stop"])
    if feature == "json_schema":
        params["structured"] = JSON
    elif feature == "tools":
        given = ChatPrompt(({"role": "user", "content": prompt},), tools=Toolset((TOOL,)))
    elif feature == "unseeded":  # as an ingress does that keeps journals: the seed is its choice
        context = CallContext(seed=random.Random(-number).getrandbits(63))
    return feature, Call(given, SamplingParams(**params), CallOptions(), context), num_choices


def make_fields(number: int) -> tuple[str, str, dict[str, Any]]:
    """The same for clients: its feature, its prompt, and its parameters as all dialects name them.

    What they do not name alike, the schema and the tools, is left to the caller.
    """
    rng = random.Random(number)
    feature = FEATURES[number % len(FEATURES)]
    prompt = f"The {rng.choice(WORDS)} and the {rng.choice(WORDS)} were"
    params: dict[str, Any] = {"temperature": 1.0, "seed": number, "ignore_eos": True}
    params["max_tokens"] = rng.randrange(20, 200)
    if feature == "greedy":
        params["temperature"] = 0.0
    elif feature == "n":
        params["n"] = 3
    elif feature == "penalties":
        params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    elif feature == "stop string":
        params |= {"stop": ["e w", "ing t"], "max_tokens": 300}
    elif feature == "logprobs":
        params |= {"logprobs": 2}
    elif feature in ("json_schema", "tools"):
        params["ignore_eos"] = False
    elif feature == "sink_window":
        params |= {"context_policy": "sink_window", "sinks": 4, "window": 48, "roll": 16}
        params["max_tokens"] = 300
    elif feature == "long":
        params["max_tokens"] = 700
    elif feature == "unseeded":
        del params["seed"]
    return feature, prompt, params


def where(got: Answer, expected: Answer) -> str:
    """The first difference, in words."""
    for index, ids in expected.ids.items():
        pairs = zip(got.ids.get(index, []), ids)
        for place, (its, right) in enumerate(pairs):
            if its != right:
                return f"at token {place} of choice {index}: {its} for {right}"
        if len(got.ids.get(index, [])) != len(ids):
            return f"in length: {len(got.ids.get(index, []))} for {len(ids)}"
    for name in ("text", "scored", "tool_calls", "ends"):
        if getattr(got, name) != getattr(expected, name):
            return f"in {name}: {getattr(got, name)} for {getattr(expected, name)}"
    return "nowhere"
