"""Reasoning split from answers, however the text is cut, and as clients read it.

Oracles: the same text in one piece; the official clients; json and jsonschema.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionStreamOptionsParam
from tokenizers import AddedToken

from penstock.deployments.ingress.core.answers.reasoning import after_reasoning, find_marks
from penstock.deployments.ingress.core.call import Call, CallOptions, ChatPrompt
from penstock.deployments.ingress.http.openai.schemas import ChatCompletion, ChatCompletionChunk
from penstock.workers.errors import ConfigError
from penstock.workers.request import FinishReason, RequestError, SamplingParams
from penstock.workers.structured_spec import StructuredKind, StructuredSpec, json_schema
from penstock.workers.text.reasoning import PUBLISHED, Marks, ReasoningReader, Start, start_of
from tests.deployments.ingress.core.answers.models import PLAIN, model_of
from tests.deployments.serving import (
    EngineBackend,
    ScriptedBackend,
    Serving,
    core_over,
    generated,
    tokenizer,
)

THINK = PUBLISHED[0]
MESSAGES: Any = [{"role": "user", "content": "What feeds the turbine?"}]
SEES = "{% if '</think>' in messages[-1].content %}{% endif %}" + PLAIN
OPENS = PLAIN + "{% if add_generation_prompt %}<think>\n{% endif %}"
CLOSES = PLAIN + "<think>\n\n</think>\n\n"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SAID = "<think>\nThe river.\n\nOr the mill?\n</think>\n\nThe penstock."
THOUGHT = "The river.\n\nOr the mill?"


def read(parts: list[str], start: Start = Start.MAYBE) -> tuple[str, str, int]:
    reader = ReasoningReader(THINK, start)
    found = [*map(reader.feed, parts), reader.finish()]
    thought, text = ("".join(each) for each in zip(*found))
    return thought, text, reader.num_taken


@pytest.mark.parametrize(
    ("start", "whole", "thought", "text"),
    [
        (Start.MAYBE, SAID, THOUGHT, "The penstock."),
        (Start.INSIDE, SAID, THOUGHT, "The penstock."),  # it repeats what the prompt has opened
        (Start.INSIDE, SAID.removeprefix("<think>"), THOUGHT, "The penstock."),
        (Start.AFTER, "a <think>b</think>", "", "a <think>b</think>"),
        (Start.MAYBE, "\n<think></think>ok\n", "", "ok\n"),
        (Start.MAYBE, " no <think>", "", " no <think>"),
        (Start.MAYBE, "<thi", "", "<thi"),
        (Start.MAYBE, "<think>never closed </thin\n", "never closed </thin", ""),
        (Start.INSIDE, "a</thin</think>\nb</think>\n", "a</thin", "b</think>\n"),
        (Start.INSIDE, "\n\n", "", ""),
        (Start.MAYBE, "", "", ""),
        (Start.MAYBE, " " * 400 + "<think>", "", " " * 400 + "<think>"),
    ],
)
def test_however_it_is_cut(start: Start, whole: str, thought: str, text: str) -> None:
    expected = (thought, text, len(whole) - len(text))
    assert read(list(whole), start) == expected
    for seed in range(60):
        rng = random.Random(seed)
        cuts = sorted(rng.choices(range(len(whole) + 1), k=4))
        parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]
        if len(whole) < 256:  # in one long piece a mark may come after much white space
            assert read(parts, start) == expected


def test_text_is_not_held_back_for_long() -> None:
    reader = ReasoningReader(THINK, Start.INSIDE)
    assert [reader.feed(part)[0] for part in ("a", "b <", "/t", "h", "x\n", "y")] == [
        *("a", "b ", "", "", "</thx", "\ny")
    ]
    assert reader.is_inside


@pytest.mark.parametrize(
    ("tail", "start"),
    [
        ("<assistant>", Start.MAYBE),
        ("<assistant><think>\n", Start.INSIDE),
        ("<think>\n\n</think>\n\n", Start.AFTER),
        ("say <think>\n<assistant>", Start.MAYBE),
    ],
)
def test_where_an_answer_begins(tail: str, start: Start) -> None:
    assert start_of(THINK, tail) is start


def test_marks_are_found() -> None:
    assert find_marks("auto", model_of(None)) is None
    assert find_marks("auto", model_of(PLAIN)) is None
    assert find_marks("auto", model_of(SEES)) == THINK
    assert find_marks(None, model_of(SEES)) is None
    tokens = [AddedToken(mark, special=True) for mark in ("[THINK]", "[/THINK]")]
    assert find_marks("auto", model_of(PLAIN, *tokens)) == Marks("[THINK]", "[/THINK]")
    assert find_marks("auto", model_of(PLAIN, tokens[0])) is None
    assert find_marks("<a> </a>", model_of(None)) == Marks("<a>", "</a>")
    for wrong in ("<a>", "<a> <b> <c>", "<a> <a>", " <a>"):
        with pytest.raises(ConfigError, match="reasoning_marks"):
            find_marks(wrong, model_of(None))


# As clients see it


def server_of(
    template: str, text: str, *tokens: AddedToken, marks: Marks | None = THINK, group: int = 1
) -> Serving:
    """A server whose model says `text`, `group` tokens at once."""
    known = model_of(template, *tokens)
    ids = known.encode(text, add_special_tokens=False)
    steps = [ids[i : i + group] for i in range(0, len(ids), group)]
    backend = ScriptedBackend(*steps, FinishReason.STOP)
    return Serving(backend, max_model_len=1024, of=known, marks=marks)


def chat(serving: Serving, **body: Any) -> Any:
    """Answer of one choice as (reasoning, content, finish_reason, usage), streamed or not."""
    known = {"model": "builtin", "messages": MESSAGES, **body}
    with openai.OpenAI(base_url=f"{serving.base_url}/v1", api_key="none", max_retries=0) as client:
        if not known.get("stream"):
            answer = client.chat.completions.create(**known)
            ChatCompletion.model_validate(answer.model_dump(exclude_unset=True))
            [choice] = answer.choices
            said = choice.message.model_dump()
            assert said.get("reasoning") == said.get("reasoning_content")
            return said.get("reasoning"), said["content"], choice.finish_reason, answer.usage
        options: ChatCompletionStreamOptionsParam = {"include_usage": True}
        *chunks, last = client.chat.completions.create(**known, stream_options=options)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True))
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    thoughts = [delta.get("reasoning_content") or "" for delta in deltas]
    texts = [delta["content"] or "" for delta in deltas]
    assert not any(any(texts[:i]) for i, each in enumerate(thoughts) if each), "it comes first"
    reason = chunks[-1].choices[0].finish_reason
    return "".join(thoughts) or None, "".join(texts) or None, reason, last.usage


SPECIAL = [AddedToken(mark, special=True) for mark in ("<think>", "</think>")]
ADDED = [AddedToken(mark, special=False) for mark in ("<think>", "</think>")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("tokens", [[], SPECIAL, ADDED], ids=["text", "special", "added"])
def test_it_is_kept_apart(tokens: list[AddedToken], group: int, stream: bool) -> None:
    with server_of(SEES, SAID, *tokens, group=group) as server:
        thought, text, reason, usage = chat(server, stream=stream)
    known = model_of(None, *tokens)
    num = len(known.encode(SAID.partition("</think>")[0] + "</think>", add_special_tokens=False))
    assert (thought, text, reason) == (THOUGHT, "The penstock.", "stop")
    # A token that completes the mark may also hold text that follows it.
    assert usage.completion_tokens_details.reasoning_tokens in (num - 1, num, num + 1)
    assert usage.completion_tokens == len(known.encode(SAID, add_special_tokens=False))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("template", "said", "expected"),
    [
        (OPENS, "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.", "stop")),
        (OPENS, "Hm, no end", ("Hm, no end", None, "stop")),
        (CLOSES, "Yes. <think>", (None, "Yes. <think>", "stop")),
        (SEES, "Just so.", (None, "Just so.", "stop")),
    ],
)
def test_what_the_template_opens(template: str, said: str, expected: Any, stream: bool) -> None:
    with server_of(template, said) as server:
        assert chat(server, stream=stream)[:3] == expected


SWITCH = "{% if think %}" + OPENS + "{% else %}" + CLOSES + "{% endif %}{{ bos_token }}"


def test_reasoning_can_be_switched_off_in_the_template() -> None:
    with server_of(SWITCH.removesuffix("{{ bos_token }}"), "Yes.") as server:
        for think, expected in ((True, ("Yes.", None)), (False, (None, "Yes."))):
            extra = {"chat_template_kwargs": {"think": think}}
            assert chat(server, extra_body=extra)[:2] == expected


@pytest.mark.parametrize(
    ("variables", "param"),
    [
        ({"thin": True}, "chat_template_kwargs.thin"),
        ({"messages": "a"}, "chat_template_kwargs.messages"),
        ({"bos_token": "a"}, "chat_template_kwargs.bos_token"),
        ({"think": "a" * 257}, "chat_template_kwargs.think"),
        ({"think": [1]}, "chat_template_kwargs.think"),
        ({str(i): 1 for i in range(17)}, "chat_template_kwargs"),
    ],
)
def test_variables_that_are_refused(variables: Any, param: str) -> None:
    """Also the ones that are the server's own, which a request must not replace."""
    with server_of(SWITCH, "Yes.") as server, pytest.raises(openai.BadRequestError) as refused:
        chat(server, extra_body={"chat_template_kwargs": variables})
    assert refused.value.param == param


def test_cut_off_while_it_reasons() -> None:
    known = model_of(OPENS)
    ids = known.encode("Hm, let me see", add_special_tokens=False)
    backend = ScriptedBackend(*([i] for i in ids), FinishReason.LENGTH)
    with Serving(backend, of=known, marks=THINK) as server:
        thought, text, reason, usage = chat(server, max_tokens=len(ids))
    assert (thought, text, reason) == ("Hm, let me see", None, "length")
    assert usage.completion_tokens_details.reasoning_tokens == len(ids)


def test_stop_strings_are_of_the_answer() -> None:
    with server_of(SEES, SAID) as server:
        assert chat(server, stop=["mill", "stock"])[:3] == (THOUGHT, "The pen", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_scores_are_whole(stream: bool) -> None:
    """One for each token, the reasoning's and the marks' among them."""
    backend = EngineBackend()
    known = model_of(SEES)
    try:
        with (
            Serving(backend, of=known, marks=Marks("e", "th")) as server,
            openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client,
        ):
            fields: Any = {"max_tokens": 30, "seed": 5, "logprobs": True, "stream": stream}
            answer = client.chat.completions.create(model="builtin", messages=MESSAGES, **fields)
            choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    finally:
        backend.stop()
    scores = [
        score for each in choices for score in ((each.logprobs and each.logprobs.content) or ())
    ]
    assert len(scores) == 30


def test_without_marks_it_is_text() -> None:
    with server_of(SEES, SAID, marks=None) as server:
        assert chat(server)[:2] == (None, SAID)


def test_only_where_it_is_requested() -> None:
    """Completions, and front ends that have no place for it, get the text as it is."""
    known = model_of(SEES)
    ids = known.encode(SAID, add_special_tokens=False)
    core = core_over(ScriptedBackend(ids, FinishReason.STOP), of=known, marks=THINK)

    async def text(call: Call) -> str:
        return "".join([piece.text async for piece in generated(core, call)])

    assert asyncio.run(text(Call(ChatPrompt(tuple(MESSAGES))))) == SAID
    assert asyncio.run(text(Call("The", options=CallOptions(splits_reasoning=True)))) == SAID


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_behind_it(stream: bool) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
    said = f"<think>\nI could {call}.\n</think>\n\n{call}"
    tools: Any = [{"type": "function", "function": {"name": "look"}}]
    with server_of(SEES, said) as server:
        thought, text, reason, _ = chat(server, tools=tools, stream=stream)
    assert (thought, text, reason) == (f"I could {call}.", None, "tool_calls")


def test_it_may_be_sent_back() -> None:
    shows = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}\n{% endfor %}"
    with server_of(shows, "Ja.") as server:
        for name in ("reasoning", "reasoning_content"):
            answer = {"role": "assistant", "content": "So.", name: "Because."}
            chat(server, messages=[*MESSAGES, answer, *MESSAGES])
            prompt = server.core.named(None).tokenizer.decode(
                server.backend.requests[-1].prompt_ids
            )
            assert "Because.|So." in prompt


# Structured answers after reasoning


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineBackend]:
    backend = EngineBackend()
    yield backend
    backend.stop()


def spec_of(kind: StructuredKind, text: str = "") -> StructuredSpec:
    return StructuredSpec(kind, text, param="guided")


SPECS = {
    "json": (json_schema(CITY, param="guided"), None),
    "object": (spec_of(StructuredKind.JSON_OBJECT), None),
    "regex": (spec_of(StructuredKind.REGEX, r"[ab/]{2}/\d::="), r"[ab/]{2}/\d::="),
    "choice": (spec_of(StructuredKind.CHOICE, '["r/ed", "blue::="]'), "r/ed|blue::="),
    "grammar": (spec_of(StructuredKind.GRAMMAR, 'start: "<" A ">"\nA: /[a-z]{3}/'), "<[a-z]{3}>"),
}
# Marks that the built-in model, which has learned none, is led to by a grammar and by chance.
CHANCE = Marks("<|", "e")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("template", [PLAIN, PLAIN + "<|\n"], ids=["maybe", "inside"])
def test_a_shape_holds_behind_it(engine: EngineBackend, name: str, template: str) -> None:
    spec, pattern = SPECS[name]
    core = core_over(engine, of=model_of(template), marks=CHANCE, max_model_len=1024)
    params = SamplingParams(max_tokens=160, seed=2, structured=spec)
    call = Call(ChatPrompt(tuple(MESSAGES)), params, CallOptions(splits_reasoning=True))

    async def answer() -> Any:
        pieces = [piece async for piece in generated(core, call)]
        thought = "".join(piece.reasoning for piece in pieces)
        return thought, "".join(piece.text for piece in pieces), pieces[-1].finish_reason

    thought, text, reason = asyncio.run(answer())
    if "<|" in template:  # it has been opened
        assert thought, "the model says something before its first e"
    if name == "object" and reason is not FinishReason.STOP:
        assert text.lstrip().startswith("{")
    elif pattern is None:
        assert reason is FinishReason.STOP
        jsonschema.validate(json.loads(text), CITY if name == "json" else {"type": "object"})
    else:
        assert re.fullmatch(pattern, text) and reason is FinishReason.STOP


def test_forced_calls_come_behind_it(engine: EngineBackend) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": CITY}}
    with Serving(engine, of=model_of(PLAIN + "<|"), marks=CHANCE, max_model_len=1024) as server:
        thought, text, reason, usage = chat(
            server, tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=1
        )
    assert thought and (text, reason) == (None, "tool_calls")
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_what_a_grammar_cannot_be_part_of() -> None:
    gbnf = spec_of(StructuredKind.GRAMMAR, 'root ::= "a"')
    with pytest.raises(RequestError, match="Lark") as refused:
        after_reasoning(gbnf, THINK, Start.MAYBE, tokenizer())
    assert refused.value.param == "guided"
    assert after_reasoning(gbnf, THINK, Start.AFTER, tokenizer()) is gbnf


def test_a_special_closing_mark_in_a_grammar() -> None:
    """What the engine's own compiler makes of it, with the marks as control tokens."""
    from penstock.workers.structured.grammar import GrammarCompiler

    known = model_of(PLAIN, *SPECIAL)
    compiler = GrammarCompiler(known.to_json, vocab_size=9000, eos_token_ids=known.eos_token_ids)
    spec = spec_of(StructuredKind.CHOICE, '["red"]')
    for start, text in ((Start.INSIDE, "hm </think>\nred"), (Start.MAYBE, "<think>hm</think>red")):
        shaped = after_reasoning(spec, THINK, start, known)
        matcher = compiler.matcher(shaped, known.encode(text, add_special_tokens=False))
        assert matcher.is_complete
    compiler.close()
