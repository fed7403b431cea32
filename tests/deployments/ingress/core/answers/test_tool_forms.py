"""Calls in each form, as the published chat templates write them, however the text is cut.

Oracles: transformers' ResponseParser with a response template of the form, where one can describe
it; json; and the same text in one piece.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from penstock.deployments.ingress.core.answers.tool_forms.form_parser import (
    MAX_BLOCK_CHARS,
    ToolParser,
)
from penstock.deployments.ingress.core.answers.tool_forms.table import ToolForm, support_of
from penstock.deployments.ingress.core.tools import Tool, Toolset
from penstock.workers.text.harmony import HarmonyReader
from penstock.workers.text.reasoning import Start
from penstock.workers.text.tool_forms import FORMS, TEMPLATE, form_named
from tests.deployments.ingress.core.answers.models import RENDERS, model_of, read_calls

PLACES = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "filter": {"type": "object"},
        "tags": {"type": "array"},
        "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
}
TOOLS = Toolset((Tool("look", None, PLACES), Tool("get-time")))
# Unicode, quotes, brackets, line breaks, and marks of other forms within a string.
RICH = {
    "place": 'Köln "Süd" {}]; \\ 橋\nsecond line <b> 🌊',
    "days": 3,
    "exact": True,
    "filter": {"near": {"km": [1, 2.5, {"x": None}]}, "name": "a}b"},
    "tags": ["x", "y;z"],
    "limit": None,
}
SIMPLE = {"place": "12"}


def js(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tagged(arguments: dict[str, Any], written: str) -> str:
    """Each argument in its tags: text as it is, any other value as JSON."""
    return "".join(
        written.format(key=key, value=value if isinstance(value, str) else js(value))
        for key, value in arguments.items()
    )


def gemma(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(each, quote) for each in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else js(value)


QWEN = "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"
QWEN_VALUE = "<parameter={key}>\n{value}\n</parameter>\n"
GLM_VALUE = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
MINIMAX = '<minimax:tool_call>\n<invoke name="{name}">\n{arguments}</invoke>\n</minimax:tool_call>'
MINIMAX_VALUE = '<parameter name="{key}">{value}</parameter>\n'
HARMONY = "<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"


def hermes(*calls: tuple[str, Any]) -> str:
    each = (f'<tool_call>\n{{"name": "{n}", "arguments": {js(a)}}}\n</tool_call>' for n, a in calls)
    return "\n".join(each)


def llama(*calls: tuple[str, Any]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {js(a)}}}' for name, a in calls)


def listed(*calls: tuple[str, Any]) -> str:
    return js([{"name": name, "arguments": a} for name, a in calls])


def mistral_list(*calls: tuple[str, Any]) -> str:
    with_ids = [{"name": name, "arguments": a, "id": "a1b2c3d4e"} for name, a in calls]
    return f"[TOOL_CALLS]{js(with_ids)}"


def qwen(*calls: tuple[str, Any]) -> str:
    each = (QWEN.format(name=n, arguments=tagged(a, QWEN_VALUE)) for n, a in calls)
    return "\n".join(each)


def glm(*calls: tuple[str, Any]) -> str:
    each = (f"<tool_call>{n}\n{tagged(a, GLM_VALUE)}</tool_call>" for n, a in calls)
    return "\n".join(each)


def minimax(*calls: tuple[str, Any]) -> str:
    each = (MINIMAX.format(name=n, arguments=tagged(a, MINIMAX_VALUE)) for n, a in calls)
    return "\n".join(each)


def gemma_of(opener: str, quote: str, closer: str) -> Any:
    def written(*calls: tuple[str, Any]) -> str:
        return "".join(f"{opener}call:{n}{gemma(a, quote)}{closer}" for n, a in calls)

    return written


def harmony(*calls: tuple[str, Any]) -> str:
    return "".join(HARMONY.format(name=n) + js(a) + "<|call|>" for n, a in calls)


# By a name: the form, and how it writes calls.
WAYS: dict[str, tuple[str, Any]] = {
    "hermes": ("hermes", hermes),
    "llama3_json": ("llama3_json", llama),
    "llama3_json, mark": ("llama3_json", lambda *calls: "<|python_tag|>" + llama(*calls)),
    "mistral, list": ("mistral", mistral_list),
    "mistral, names": (
        "mistral",
        lambda *calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{js(a)}" for n, a in calls),
    ),
    "mistral, ids": (
        "mistral",
        lambda *calls: "".join(f"[TOOL_CALLS]{n}[CALL_ID]a1b2c3d4e[ARGS]{js(a)}" for n, a in calls),
    ),
    "mistral, bare": (
        "mistral",
        lambda *calls: "".join(f"[TOOL_CALLS]{n}{js(a)}" for n, a in calls),
    ),
    "qwen3_coder": ("qwen3_coder", qwen),
    "seed_oss": ("seed_oss", lambda *calls: qwen(*calls).replace("tool_call>", "seed:tool_call>")),
    "minimax_m2": ("minimax_m2", minimax),
    "glm45": ("glm45", glm),
    "glm45, one line": ("glm45", lambda *calls: glm(*calls).replace(">\n<", "><")),
    "phi4": ("phi4", lambda *calls: f"functools{listed(*calls)}"),
    "phi4, marks": ("phi4", lambda *calls: f"<|tool_call|>{listed(*calls)}<|/tool_call|>"),
    "granite": ("granite", lambda *calls: f"<|tool_call|>{listed(*calls)}"),
    "granite, newer": ("granite", lambda *calls: f"<tool_call>{listed(*calls)}"),
    "functiongemma": (
        "functiongemma",
        gemma_of("<start_function_call>", "<escape>", "<end_function_call>"),
    ),
    "gemma4": ("gemma4", gemma_of("<|tool_call>", '<|"|>', "<tool_call|>")),
    "harmony": ("harmony", harmony),
}
ANCHOR = {"start_anchor": "<assistant>", "defaults": {"role": "assistant"}}
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
ITEM = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
INNER = {
    "type": "function",
    "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
}


def template(**calls: Any) -> dict[str, Any]:
    """A response template with text and calls."""
    return {
        **ANCHOR,
        "fields": {
            "content": {"repeats": True, "join": ""},
            "tool_calls": {"repeats": True, **calls},
        },
    }


def xml(pattern: str) -> dict[str, Any]:
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern}, "transform": CALL}


# How transformers reads the same texts. It has no way to say where bare calls of Llama begin.
ORACLES = {
    "hermes": template(open="<tool_call>", close="</tool_call>", content="json", transform=INNER),
    "mistral, list": template(
        open="[TOOL_CALLS]", content="json", transform=ITEM, transform_each=True
    ),
    "mistral, names": template(
        open_pattern=r"\[TOOL_CALLS\](?P<name>[\w.-]+)\[ARGS\]",
        close_pattern=r"(?=\[TOOL_CALLS\])",
        content="json",
        transform=CALL,
    ),
    "qwen3_coder": template(
        open_pattern=r"<tool_call>\n<function=(?P<name>[\w.-]+)>\n",
        close="</function>\n</tool_call>",
        **xml(r"<parameter=(?P<key>[^>]+)>\n(?P<value>.*?)\n</parameter>"),
    ),
    "glm45": template(
        open_pattern=r"<tool_call>(?P<name>[\w.-]+)\n",
        close="</tool_call>",
        **xml(r"<arg_key>(?P<key>[^<]+)</arg_key>\n<arg_value>(?P<value>.*?)</arg_value>"),
    ),
    "minimax_m2": template(
        open_pattern=r'<minimax:tool_call>\n<invoke name="(?P<name>[\w.-]+)">\n',
        close="</invoke>\n</minimax:tool_call>",
        **xml(r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'),
    ),
    "phi4": template(open="functools", content="json", transform=ITEM, transform_each=True),
    "granite": template(open="<|tool_call|>", content="json", transform=ITEM, transform_each=True),
    "functiongemma": template(
        open_pattern=r"<start_function_call>call:(?P<name>[\w.-]+)",
        close="<end_function_call>",
        content="json",
        content_args={"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
        transform=CALL,
    ),
    "gemma4": template(
        open_pattern=r"<\|tool_call>call:(?P<name>[\w.-]+)",
        close="<tool_call|>",
        content="json",
        content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        transform=CALL,
    ),
    "harmony": template(
        open_pattern=r"<\|start\|>assistant<\|channel\|>commentary to=functions\."
        r"(?P<name>[\w-]+) <\|constrain\|>json<\|message\|>",
        close="<|call|>",
        content="json",
        transform=CALL,
    ),
}


@functools.cache
def form(name: str) -> ToolForm:
    found = support_of(name, model_of(RENDERS)).form
    assert found is not None
    return found


Calls = list[tuple[str, str]]


def read(name: str, parts: list[str]) -> tuple[str, Calls, ToolParser]:
    """Text, and name and arguments of each call."""
    parser = form(name).parser(TOOLS, "answer")
    return *read_calls(parser, parts), parser


def given_calls(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    said, calls, _ = read(name, [text])
    return said, [(called, json.loads(arguments)) for called, arguments in calls]


def test_all_forms_are_here() -> None:
    assert {name for name, _ in WAYS.values()} == set(FORMS) - {TEMPLATE}
    assert form_named("phi4_mini_json") == "phi4" and form_named("openai") == "harmony"


@pytest.mark.parametrize("way", WAYS)
def test_calls_and_the_text_around_them(way: str) -> None:
    name, written = WAYS[way]
    calls = [("look", RICH), ("get-time", {}), ("look", SIMPLE)]
    assert given_calls(name, written(*calls)) == ("", calls)
    assert given_calls(name, "I look.\n" + written(*calls)) == ("I look.\n", calls)
    [one] = [("look", RICH)]
    said, found = given_calls(name, f"I look.\n{written(one)}\nDone.")
    assert (said, found) == ("I look.\nDone.", [one])


@pytest.mark.parametrize("way", ORACLES)
def test_transformers_reads_the_same(way: str) -> None:
    name, written = WAYS[way]
    for calls in ([("look", RICH)], [("look", SIMPLE), ("look", {"days": 2})]):
        text = "I look. " + written(*calls)
        tools = [tool.as_json() for tool in TOOLS.tools]
        message = parse_response(text, ORACLES[way], prefix="", tools=tools)
        theirs = message["tool_calls"]
        theirs = theirs[0] if isinstance(theirs[0], list) else theirs
        named = [(each["function"]["name"], each["function"]["arguments"]) for each in theirs]
        assert given_calls(name, text)[1] == named == calls
        assert message["content"] == read(name, [text])[0].strip()


# Texts that are no calls, or are cut off: nothing of them is lost.
BROKEN = {
    "hermes": "<tool_call>\n{look}\n</tool_call>",
    "llama3_json": '<|python_tag|>look.call(place="Rome")',
    "mistral, list": '[TOOL_CALLS][{"name": look}]',
    "mistral, names": "[TOOL_CALLS]look[ARGS]place=Rome",
    "qwen3_coder": "<tool_call>\n<function=look\n</tool_call>",
    "seed_oss": "<seed:tool_call>\nlook",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look">place</invoke>',
    "glm45": "<tool_call>look\nplace: Rome</tool_call>",
    "phi4": "functools[look]",
    "granite": '<|tool_call|>{"look": 1}',
    "functiongemma": "<start_function_call>call:look{place:<escape>Rome}<end_function_call>",
    "gemma4": "<|tool_call>look<tool_call|>",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.look<|message|>Rome<|call|>",
}


@pytest.mark.parametrize("way", BROKEN)
def test_what_cannot_be_read_is_text(way: str) -> None:
    name, written = WAYS[way]
    for text in (BROKEN[way], f"So: {BROKEN[way]} and on", written(("rm", {"place": "/"}))):
        said, calls, parser = read(name, [text])
        assert (said, calls) == (text, [])
        assert parser.num_unread == 1
    # A call after it is found.
    text = f"{BROKEN[way]}\n{written(('look', SIMPLE))}"
    if way not in ("mistral, list", "phi4", "granite"):
        assert given_calls(name, text) == (f"{BROKEN[way]}\n", [("look", SIMPLE)])


@pytest.mark.parametrize("way", WAYS)
def test_one_block_after_a_good_one(way: str) -> None:
    name, written = WAYS[way]
    text = written(("look", SIMPLE), ("rm", {}))
    said, calls, parser = read(name, [text])
    assert [(called, json.loads(a)) for called, a in calls] == [("look", SIMPLE)]
    assert "rm" in said and parser.num_unread == 1


TEXTS = [
    text
    for way, (name, written) in WAYS.items()
    for text in (
        (name, written(("look", RICH), ("get-time", {}))),
        (name, f"a < b {{ c [ d\n{written(('look', SIMPLE), ('rm', {}))}\n and on"),
        (name, written(("look", RICH))[:-60]),
        (name, written(("look", RICH))[:40] + " and on"),
        (name, BROKEN.get(way, "no call") + "\n" + written(("look", SIMPLE))),
    )
]


@pytest.mark.parametrize(("name", "text"), TEXTS, ids=range(len(TEXTS)))
def test_however_it_is_cut_in_two(name: str, text: str) -> None:
    expected = read(name, [text])[:2]
    assert read(name, list(text))[:2] == expected
    for at in range(len(text)):
        assert read(name, [text[:at], text[at:]])[:2] == expected


@given(which=st.sampled_from(TEXTS), data=st.data())
def test_however_it_is_cut(which: tuple[str, str], data: st.DataObject) -> None:
    name, text = which
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert read(name, parts)[:2] == read(name, [text])[:2]


MARKS = sorted({mark for name, _ in WAYS.values() for mark in form(name).marks})
NOISE = st.lists(
    st.sampled_from(
        (
            *MARKS,
            *("look", "call:", "{", "}", "[", "]", '"', '{"name": "look", "', 'parameters": {'),
            *('arguments": {', "<function=look>", ">", "\n", " ", "a", "functools[", ", ", ";"),
        )
    ),
    max_size=14,
)


@given(name=st.sampled_from(sorted(set(FORMS) - {TEMPLATE})), parts=NOISE)
def test_any_text_gives_the_same_in_any_pieces(name: str, parts: list[str]) -> None:
    whole = "".join(parts)
    expected = read(name, [whole])[:2]
    assert read(name, list(whole))[:2] == expected
    assert read(name, parts)[:2] == expected
    if not expected[1]:
        assert expected[0] == whole, "without a call it is all text"


@pytest.mark.parametrize("way", [way for way in WAYS if "gemma" not in way])
def test_arguments_go_out_before_they_are_complete(way: str) -> None:
    name, written = WAYS[way]
    before, _, _ = written(("look", {"place": "river"})).partition("river")
    parser = form(name).parser(TOOLS, "answer")
    parser.feed(before)
    assert [piece.arguments for piece in parser.feed("river")[1]] == ["river"]


@pytest.mark.parametrize("name", sorted(set(FORMS) - {TEMPLATE}))
def test_what_is_held_back_is_bounded(name: str) -> None:
    for mark in form(name).marks:
        parser = form(name).parser(TOOLS, "answer")
        text = mark + '{"' * (MAX_BLOCK_CHARS + 10)
        said = parser.feed(text)[0]
        assert len(said) > 100


@pytest.mark.parametrize(
    ("raw", "schema", "expected"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12.0", {"type": "integer"}, 12),
        ("12.5", {"type": "integer"}, "12.5"),
        ("12.5", {"type": "number"}, 12.5),
        ("nan", {"type": "number"}, "nan"),
        ("1e999", {"type": "number"}, "1e999"),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("7", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 7),
        ("[1, {}]", {"type": "array"}, [1, {}]),
        ("{1}", {"type": "object"}, "{1}"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"$ref": "#/$defs/n"}, 2),
        ("2", {"$ref": "#/$defs/loop"}, 2),
        ("2", {}, 2),
        ("two", {}, "two"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
    ],
)
@pytest.mark.parametrize("way", ["qwen3_coder", "glm45"])
def test_values_have_the_type_that_the_schema_says(
    way: str, raw: str, schema: Any, expected: Any
) -> None:
    name, written = WAYS[way]
    defs = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    tool = Tool("f", None, {"properties": {"a": schema}, "$defs": defs})
    parser = form(name).parser(Toolset((tool,)), "answer")
    _, pieces = parser.feed(written(("f", {"a": raw})))
    found = json.loads("".join(piece.arguments for piece in pieces))["a"]
    assert found == expected and type(found) is type(expected)


def test_an_argument_that_is_cut_off_does_not_look_whole() -> None:
    _, [(_, arguments)], _ = read("qwen3_coder", [qwen(("look", {"place": "Rome"}))[:60]])
    assert arguments.startswith('{"place": "')
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(arguments)


# gpt-oss

ANSWERS = {
    "reasoning and answer": (
        "<|channel|>analysis<|message|>Hm.\nOr?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>The river.<|return|>",
        ("Hm.\nOr?", "The river."),
    ),
    "answer alone": ("<|channel|>final<|message|>The river.", ("", "The river.")),
    "several": (
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B"
        "<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}",
        ("A\nB", "I look.\n{}"),
    ),
    "recipient first": (
        " to=functions.look<|channel|>commentary json<|message|>{}<|call|>",
        ("", "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>"),
    ),
    "cut in a header": ("<|channel|>analysis<|message|>A<|end|><|start|>assist", ("A", "")),
    "no harmony": ("Hello <|channel|>", ("", "Hello <|channel|>")),
    "no message": ("<|channel|>analysis" + "x" * 600, ("", "<|channel|>analysis" + "x" * 600)),
}


def split(parts: list[str], start: Start = Start.MAYBE) -> tuple[str, str]:
    reader = HarmonyReader(start)
    found = [*map(reader.feed, parts), reader.finish()]
    thought, text = ("".join(each) for each in zip(*found))
    assert reader.num_taken == sum(map(len, parts)) - len(text)
    return thought, text


@pytest.mark.parametrize("name", ANSWERS)
def test_channels_of_harmony(name: str) -> None:
    whole, expected = ANSWERS[name]
    assert split([whole]) == split(list(whole)) == expected
    for at in range(len(whole)):
        assert split([whole[:at], whole[at:]]) == expected


def test_a_prompt_may_have_begun_a_message() -> None:
    assert split(["so", "<|end|>"], Start.INSIDE) == ("so", "")
    assert split(["so", "<|end|>"], Start.AFTER) == ("", "so")


def test_a_call_in_harmony_after_reasoning() -> None:
    whole = (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.look <|constrain|>json<|message|>{"place": "Köln"}'
    )
    thought, text = split(list(whole))
    assert thought == "I look."
    assert given_calls("harmony", text) == ("", [("look", {"place": "Köln"})])
