"""Which form a model's calls are read in, and what a server does where the form is not known.

The chat templates are short ones that write calls as the published ones do. Oracles: the calls that
a template has written; the official client; jsonschema; the engine's own grammar compiler.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import openai
import pytest
from tokenizers import AddedToken

from penstock.deployments.config import config_from
from penstock.deployments.ingress.core.answers.reasoning import after_reasoning, find_marks
from penstock.deployments.ingress.core.answers.tool_forms.table import ToolSupport, support_of
from penstock.deployments.ingress.core.tools import Tool, Toolset
from penstock.workers.errors import ConfigError
from penstock.workers.request import FinishReason, SamplingParams
from penstock.workers.structured.grammar import GrammarCompiler
from penstock.workers.text import harmony
from penstock.workers.text.reasoning import HARMONY, Start
from penstock.workers.text.tool_forms import FORMS, TEMPLATE, form_in
from tests.deployments.ingress.core.answers.models import PLAIN, RENDERS, model_of
from tests.deployments.serving import EngineBackend, ScriptedBackend, Serving

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLSET = Toolset((Tool("look", "Looks.", CITY), Tool("clock", None, CITY)))
TOOLS: Any = [tool.as_json() for tool in TOOLSET.tools]
GIVEN = [("look", {"city": 'K "öln"\n{', "days": 2}), ("clock", {"city": "橋 12", "days": 1})]
MESSAGES: Any = [{"role": "user", "content": "How is it?"}]

_EACH = "{% for c in m.tool_calls or [] %}"
_NAME, _ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
_ITEM = f'{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}'
_LIST = _EACH + _ITEM + "{{ ', ' if not loop.last }}{% endfor %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_GEMMA = (
    "call:{{ c.function.name ~ '{' }}{% for k, v in c.function.arguments | items %}"
    "{{ k }}:{{ Q ~ v ~ Q if v is string else v }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
)
_OF_NINE = "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"


def _functions(wrapper: str) -> str:
    return (
        f"{_EACH}<{wrapper}>\n<function={_NAME}>\n"
        "{% for k, v in c.function.arguments | items %}"
        f"<parameter={{{{ k }}}}>\n{_VALUE}\n</parameter>\n{{% endfor %}}"
        f"</function>\n</{wrapper}>\n{{% endfor %}}"
    )


# How the calls of a turn are written, by form.
WRITTEN = {
    "hermes": f"{_EACH}<tool_call>\n{_ITEM}\n</tool_call>{{% endfor %}}",
    "llama3_json": _EACH
    + f'{{"name": "{_NAME}", "parameters": {_ARGUMENTS}}}'
    + "{{ '; ' if not loop.last }}{% endfor %}",
    "mistral": f"[TOOL_CALLS] [{_EACH}{_OF_NINE}{_ITEM[:-1]}"
    + ', "id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]',
    "mistral, names": f"{_EACH}{_OF_NINE}[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}{{% endfor %}}",
    "qwen3_coder": _functions("tool_call"),
    "seed_oss": _functions("seed:tool_call"),
    "minimax_m2": f'<minimax:tool_call>\n{_EACH}<invoke name="{_NAME}">\n'
    "{% for k, v in c.function.arguments | items %}"
    f'<parameter name="{{{{ k }}}}">{_VALUE}</parameter>\n{{% endfor %}}</invoke>\n{{% endfor %}}'
    "</minimax:tool_call>",
    "glm45": f"{_EACH}<tool_call>{_NAME}\n"
    "{% for k, v in c.function.arguments.items() %}"
    f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n{{% endfor %}}"
    "</tool_call>\n{% endfor %}",
    "phi4": f"functools[{_LIST}]",
    "granite": f"<|tool_call|>[{_LIST}]",
    "functiongemma": "{% set Q = '<escape>' %}"
    f"{_EACH}<start_function_call>{_GEMMA}<end_function_call>{{% endfor %}}",
    "gemma4": "{% set Q = '<|\"|>' %}" + f"{_EACH}<|tool_call>{_GEMMA}<tool_call|>{{% endfor %}}",
    "harmony": f"{_EACH}<|start|>assistant<|channel|>commentary to=functions.{_NAME} "
    f"<|constrain|>json<|message|>{_ARGUMENTS}<|call|>{{% endfor %}}",
}


def template_of(way: str) -> str:
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content }}{% if m.tool_calls %}" + WRITTEN[way] + "{% endif %}"
        "{{ m.tool_call_id }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )


def read(support: ToolSupport, parts: Any, toolset: Toolset = TOOLSET) -> Any:
    """Text, and the calls as data."""
    parser = support.parser(toolset, "answer")
    found = [*map(parser.feed, parts), parser.finish()]
    calls: list[list[str]] = []
    for _, pieces in found:
        for piece in pieces:
            if piece.name is not None:
                calls.append([piece.name, piece.arguments])
            else:
                calls[piece.index][1] += piece.arguments
    text = "".join(text for text, _ in found)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("way", WRITTEN)
def test_what_a_template_writes_is_read(way: str) -> None:
    """Calls go to the template as objects, with ids that it takes, and come back the same."""
    known = model_of(template_of(way))
    support = support_of("auto", known)
    assert support.name == way.partition(",")[0]
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(GIVEN)
    ]
    turn = {"role": "assistant", "content": "I look.\n", "tool_calls": calls}
    result = {"role": "tool", "content": "well", "tool_call_id": "call_1"}
    prompt = known.render_chat(
        support.for_template([*MESSAGES, turn, result]), tools=TOOLS, add_generation_prompt=False
    )
    said, _, told = prompt.partition("<assistant>")[2].rpartition("\n<tool>")
    assert read(support, [said]) == ("I look.\n", GIVEN)
    id_told = told.strip().removeprefix("well")
    assert len(id_told) == 9 if way.startswith("mistral") else id_told == "call_1"


def test_marks_that_are_parts_of_others() -> None:
    assert form_in("{% if tools %}<tool_call>{% endif %}<|start_of_role|>") == "granite"
    assert form_in("<|start_of_role|><tool_call>\n</tool_call>") == "hermes"
    assert form_in('"{\\"name\\": name, \\"parameters\\": dictionary}"') == "llama3_json"
    assert form_in('{"name": x} <tool_call></tool_call> "parameters": {}') == "hermes"
    assert form_in(RENDERS) is None


def test_an_unknown_form_is_said_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert support_of("auto", model_of(RENDERS)).name == "unknown"
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "tool_call_parser" in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert support_of("auto", model_of(PLAIN)).name == "plain"
        assert support_of("plain", model_of(RENDERS)).name == "plain"
        assert support_of("openai", model_of(RENDERS)).name == "harmony"
        assert support_of("hermes", model_of(PLAIN)).name == "plain"
    assert {record.levelno for record in caplog.records} == {logging.INFO}


@pytest.mark.parametrize(
    ("setting", "template", "says"),
    [
        ("llama3_json", PLAIN, "renders no tools"),
        ("jamba", PLAIN, "hermes, llama3_json, mistral"),
        (TEMPLATE, RENDERS, "has none"),
    ],
)
def test_settings_that_cannot_be(setting: str, template: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        support_of(setting, model_of(template))
    if setting == "jamba":
        with pytest.raises(ConfigError, match=says):
            config_from({"tool_call_parser": setting})


# Over HTTP


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineBackend]:
    backend = EngineBackend()
    yield backend
    backend.stop()


def chat(server: Serving, **body: Any) -> Any:
    known: dict[str, Any] = {"model": "builtin", "messages": MESSAGES, "tools": TOOLS, "seed": 3}
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:
        return client.chat.completions.create(**{**known, "max_tokens": 120, **body}).choices[0]


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    called = [each.function for each in choice.message.tool_calls]
    return [(each.name, json.loads(each.arguments)) for each in called]


def test_a_request_is_refused_where_a_call_would_be_text(engine: EngineBackend) -> None:
    with Serving(engine, of=model_of(RENDERS), max_model_len=1024) as server:
        with pytest.raises(openai.BadRequestError, match="tool_call_parser") as refused:
            chat(server)
        assert refused.value.param == "tools"
        named: Any = {"type": "function", "function": {"name": "look"}}
        [(name, given)] = calls_of(chat(server, tool_choice=named))
        assert chat(server, tool_choice="none").message.tool_calls is None
        with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client:
            [model] = client.models.list().data
    assert name == "look"
    jsonschema.validate(given, CITY)
    assert model.model_dump()["tool_call_parser"] == "unknown"
    assert server.core.runtimes[0].tool_note.startswith(
        "WARNING: the chat template renders tools"
    ), "is shown"


def test_plain_asks_in_the_system_message() -> None:
    known = model_of(RENDERS)
    said = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
    script = ScriptedBackend(known.encode(said), FinishReason.STOP)
    tools = support_of("plain", known)
    with Serving(script, of=known, tools=tools, max_model_len=1024) as server:
        assert calls_of(chat(server)) == [("look", {"city": "Rome"})]
    prompt = known.decode(script.requests[0].prompt_ids)
    assert "For each call give a JSON object" in prompt and '[{"type"' not in prompt


@pytest.mark.parametrize("way", WRITTEN)
def test_forced_calls_in_each_form(engine: EngineBackend, way: str) -> None:
    known = model_of(template_of(way))
    with Serving(engine, of=known, max_model_len=1024) as server:
        choice = chat(server, tool_choice="required", parallel_tool_calls=False)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [(name, given)] = calls_of(choice)
    assert name in ("look", "clock")
    jsonschema.validate(given, CITY)


SPECIAL = {
    "mistral": ("[TOOL_CALLS]",),
    "mistral, names": ("[TOOL_CALLS]", "[ARGS]"),
    "granite": ("<|tool_call|>",),
    "harmony": harmony.TOKENS,
}
FORCED = {
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"city": "K", "days": 1}}, '
    '{"name": "clock", "arguments": {"city": "", "days": 2}}]',
    "mistral, names": '[TOOL_CALLS]look[ARGS]{"city": "K", "days": 1}[TOOL_CALLS]clock[ARGS]'
    '{"city": "", "days": 2}',
    "granite": '<|tool_call|>[{"name": "look", "arguments": {"city": "K", "days": 1}}]',
    "harmony": "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>"
    'commentary to=functions.look <|constrain|>json<|message|>{"city": "K", "days": 1}',
}


@pytest.mark.parametrize("way", FORCED)
def test_grammars_name_special_tokens(way: str) -> None:
    """What the engine's own compiler makes of it, with the marks as control tokens."""
    known = model_of(template_of(way), *(AddedToken(t, special=True) for t in SPECIAL[way]))
    compiler = GrammarCompiler(known.to_json, vocab_size=9000, eos_token_ids=known.eos_token_ids)
    toolset = replace(TOOLSET, must_call=True)
    support = support_of("auto", known)
    spec = support.params(SamplingParams(), toolset, known).structured
    assert spec is not None
    if way == "harmony":
        spec = after_reasoning(spec, HARMONY, Start.MAYBE, known)
    matcher = compiler.matcher(spec, known.encode(FORCED[way], add_special_tokens=False))
    assert matcher.is_accepting
    said = FORCED[way]
    if way == "harmony":
        said = said.partition("<|start|>assistant")[2]
    text, calls = read(support, list(said), toolset)
    assert text == "" and calls[0] == ("look", {"city": "K", "days": 1})
    compiler.close()


def test_shapes_in_harmony_are_those_of_the_channel_final(engine: EngineBackend) -> None:
    known = model_of(template_of("harmony"))
    marks = find_marks("auto", known)
    assert marks == HARMONY == find_marks("openai_gptoss", known)
    with Serving(engine, of=known, marks=marks, max_model_len=1024) as server:
        schema: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
        choice = chat(server, tools=openai.NOT_GIVEN, response_format=schema, max_tokens=300)
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), CITY)


def test_an_answer_in_harmony_over_http() -> None:
    tokens = (AddedToken(text, special=True) for text in harmony.TOKENS)
    known = model_of(template_of("harmony") + "<|start|>assistant", *tokens)
    said = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
        '<|constrain|>json<|message|>{"city": "Köln"}'
    )
    steps = ([token_id] for token_id in known.encode(said, add_special_tokens=False))
    marks = find_marks("auto", known)
    with Serving(
        ScriptedBackend(*steps, FinishReason.STOP), of=known, marks=marks, max_model_len=1024
    ) as server:
        choice = chat(server)
        bare = chat(server, tools=openai.NOT_GIVEN)
    assert choice.message.model_dump()["reasoning_content"] == "Hm."
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert calls_of(choice) == [("look", {"city": "Köln"})]
    assert bare.message.content.endswith('<|message|>{"city": "Köln"}'), "nothing is lost"


def test_special_tokens_of_a_form_are_seen() -> None:
    known = model_of(template_of("mistral"), AddedToken("[TOOL_CALLS]", special=True))
    said = 'So.[TOOL_CALLS][{"name": "look", "arguments": {"city": "Köln"}}]'
    script = ScriptedBackend(known.encode(said, add_special_tokens=False), FinishReason.STOP)
    with Serving(script, of=known, max_model_len=1024) as server:
        choice = chat(server)
        turn = choice.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "12"}
        chat(server, messages=[*MESSAGES, turn, result])
    assert (choice.message.content, calls_of(choice)) == ("So.", [("look", {"city": "Köln"})])
    prompt = known.decode(script.requests[1].prompt_ids)
    assert '[{"name": "look", "arguments": {"city": "Köln"}, "id": "' in prompt


# A model's own response template

OWN = {
    "start_anchor": "<assistant>",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"@@(?P<name>[\w-]+) ",
            "close": "@!",
            "content": "json",
            "repeats": True,
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ('I look. @@look {"city": "K"}@! So.', ("I look. So.", [("look", {"city": "K"})])),
        ("@@look {}@!@@clock {}@!", ("", [("look", {}), ("clock", {})])),
        ("a @@look {city}@! b", ("a @@look {city}@! b", [])),
        ("a @@rm {}@! b", ("a @@rm {}@! b", [])),
        ("a @@look {", ("a @@look {", [])),
        ("a @ b @@", ("a @ b @@", [])),
    ],
)
def test_a_response_template_of_the_model(said: str, expected: Any) -> None:
    support = support_of("auto", model_of(RENDERS, response_template=OWN))
    assert support.name == TEMPLATE
    for at in range(len(said)):
        assert read(support, [said[:at], said[at:]]) == expected
    assert read(support, list(said)) == expected


@pytest.mark.parametrize("wrong", [{"fields": 1}, {"start_anchor": "a", "fields": {"content": {}}}])
def test_a_response_template_that_cannot_be_used(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="response_template"):
        support_of("auto", model_of(RENDERS, response_template=wrong))


def test_every_form_is_written_here() -> None:
    assert {way.partition(",")[0] for way in WRITTEN} == set(FORMS) - {TEMPLATE}
