"""Any schema, expression or grammar: a matcher, or a RequestError that names the field."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.workers.request import RequestError
from penstock.workers.structured.grammar import GrammarCompiler
from penstock.workers.structured_spec import StructuredKind, StructuredSpec
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model
from tests.fuzzing import JSON, near

FUZZ = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]+$", "minLength": 1, "maxLength": 5},
        "b": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3},
        "c": {"enum": ["x", 1, None, True]},
        "d": {"anyOf": [{"const": 3}, {"type": "number", "minimum": 0, "multipleOf": 2}]},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer"}},
}
NAMES = ("oneOf", "allOf", "not", "if", "format", "prefixItems", "patternProperties", "default")
REGEX = st.lists(
    st.sampled_from(
        [
            *"ab01.*+?|()[]{}^$\\-",
            r"\d",
            r"\w",
            "[a-z]",
            "{2,5}",
            "{9999}",
            "(?:",
            "(?=",
            r"\1",
            "é",
        ]
    ),
    max_size=12,
).map("".join)
LARK = st.lists(
    st.sampled_from(
        [
            *('start: "a"', "\n", " ", "start:", "A:", "/[a-z]+/", '"x"', "|", "(", ")", "*", "+"),
            *(
                "?",
                "%json {}",
                "%ignore A",
                "%import common.INT",
                "a",
                "A",
                "~1..3",
                "[",
                "]",
                "//",
            ),
            *("root ::= [a-z]+", "::=", "%regex {}", "&", "start: start", "\\"),
        ]
    ),
    max_size=10,
).map(" ".join)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    tokenizer = Tokenizer.load(resolve_model("builtin"))
    made = GrammarCompiler(tokenizer.to_json, vocab_size=8192, eos_token_ids=(2,))
    yield made
    made.close()


def check(compiler: GrammarCompiler, kind: StructuredKind, text: str) -> None:
    spec = StructuredSpec(kind, text, param="field")
    try:
        compiler.matcher(spec)
    except RequestError as error:
        assert error.param == "field" and error.code in ("invalid_value", "overloaded")
        assert len(error.message) < 2000


def test_what_is_changed_is_good_itself(compiler):
    spec = StructuredSpec(StructuredKind.JSON_SCHEMA, json.dumps(SCHEMA), param="field")
    assert compiler.matcher(spec)


@FUZZ
@given(schema=near(SCHEMA, NAMES) | JSON)
def test_any_schema(compiler, schema):
    check(compiler, StructuredKind.JSON_SCHEMA, json.dumps(schema))


@FUZZ
@given(text=REGEX | st.text(max_size=20))
def test_any_expression(compiler, text):
    check(compiler, StructuredKind.REGEX, text)


@FUZZ
@given(text=LARK | st.text(max_size=30))
def test_any_grammar(compiler, text):
    check(compiler, StructuredKind.GRAMMAR, text)


@FUZZ
@given(kind=st.sampled_from(StructuredKind), text=st.text(max_size=30))
def test_any_text_of_any_kind(compiler, kind, text):
    check(compiler, kind, text)
