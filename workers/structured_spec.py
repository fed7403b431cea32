"""Structured output as a request specifies it: `StructuredSpec`, and its cheap checks.

The checks take linear time and need no library, so the ingress and the worker both run them; they
keep specifications of hostile size or depth away from the compiler.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_SPEC_BYTES = 64 << 10  # of a schema, a grammar, or all choices together
MAX_REGEX_BYTES = 8 << 10
MAX_DEPTH = 32  # of brackets within each other
MAX_CHOICES = 1024
# White space allowed in one place of a JSON answer: a separator, or a line break with indentation.
# Without a bound a model may produce white space for ever, and small models do.
WHITE_SPACE = r"[\x20\x09]{1,2}|\x0D?\x0A[\x20\x09]{0,32}"

# Strings need no closing quote and do not backtrack: else many quotes would cost quadratic time.
_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_REGEX_TOKENS = re.compile(r"\\.|[\[(]|[\])]", re.DOTALL)
_ESCAPES = re.compile(r"\\.", re.DOTALL)
_ASCII_CLASSES = {
    **{r"\d": "[0-9]", r"\D": "[^0-9]"},
    **{r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"},
}
_GRAMMAR_TOKENS = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|\\.|[\[({]|[\])}]', re.DOTALL)


class StructuredKind(StrEnum):
    """What `StructuredSpec.text` is."""

    JSON_OBJECT = "json_object"  # any JSON object; no text
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # of the whole answer
    CHOICE = "choice"  # a JSON list of strings, one of which is the answer
    GRAMMAR = "grammar"  # in the compiler's dialect of Lark


@dataclass(frozen=True, slots=True)
class StructuredSpec:
    """The format that an answer must have. `param`: the name of this field in the client's request.

    `lenient`: schema keywords that cannot be enforced are ignored, rather than refused.
    """

    kind: StructuredKind
    text: str = ""
    lenient: bool = False
    param: str = "structured_outputs"

    def problem(self) -> str | None:
        """Why this is refused without compiling it; None if it is not."""
        limit = MAX_REGEX_BYTES if self.kind is StructuredKind.REGEX else MAX_SPEC_BYTES
        # Lengths are compared first: encoding may fail on half a surrogate pair.
        if len(self.text) > limit:
            return f"must not be longer than {limit} bytes"
        try:
            if len(self.text.encode()) > limit:
                return f"must not be longer than {limit} bytes"
        except UnicodeEncodeError:
            return "holds half a surrogate pair, which is no character"
        if "\0" in self.text:
            return "must not hold NUL characters"
        match self.kind:
            case StructuredKind.JSON_SCHEMA:
                return _schema_problem(self.text)
            case StructuredKind.CHOICE:
                return _choice_problem(self.text)
            case StructuredKind.REGEX if not self.text:
                return "must not be empty"
            case StructuredKind.REGEX if _depth(self.text, _REGEX_TOKENS) > MAX_DEPTH:
                return f"must not nest groups deeper than {MAX_DEPTH}"
            case StructuredKind.GRAMMAR if not self.text.strip():
                return "must not be empty"
            case StructuredKind.GRAMMAR if _depth(self.text, _GRAMMAR_TOKENS) > MAX_DEPTH:
                return f"must not nest deeper than {MAX_DEPTH}"
        return None


def json_schema(schema: Any, *, param: str, lenient: bool = False) -> StructuredSpec:
    """The spec of a schema that came as JSON data."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return StructuredSpec(StructuredKind.JSON_SCHEMA, text, lenient=lenient, param=param)


def with_ascii_classes(regex: str) -> str:
    r"""`regex`, in which \d and \w are ASCII as in a schema's `pattern` and in most engines.

    The compiler takes them for those of Unicode, whose digits no parser of the answer expects.
    """
    return _ESCAPES.sub(lambda match: _ASCII_CLASSES.get(match[0], match[0]), regex)


def json_in_grammar(value: Any) -> str:
    """`value` as JSON within a Lark grammar, in which nothing looks like the mark of a GBNF one."""
    return json.dumps(value).replace("::=", r":\u003a=")


def choice(choices: list[str], *, param: str) -> StructuredSpec:
    return StructuredSpec(StructuredKind.CHOICE, json.dumps(choices), param=param)


def _schema_problem(text: str) -> str | None:
    if _depth(text, _JSON_TOKENS) > MAX_DEPTH:
        return f"must not nest deeper than {MAX_DEPTH}"
    try:
        schema = json.loads(text)
    except ValueError:
        return "is not valid JSON"
    if not isinstance(schema, dict):
        return "must be a JSON object"
    return _schema_part_problem(schema)


def _schema_part_problem(part: Any) -> str | None:
    """The first problem in a schema of allowed depth, or in a part of it."""
    if isinstance(part, dict):
        pattern, reference = part.get("pattern"), part.get("$ref")
        if isinstance(pattern, str):
            if len(pattern.encode()) > MAX_REGEX_BYTES:
                return f"must not have a pattern longer than {MAX_REGEX_BYTES} bytes"
            if _depth(pattern, _REGEX_TOKENS) > MAX_DEPTH:
                return f"must not have a pattern that nests groups deeper than {MAX_DEPTH}"
        if isinstance(reference, str) and not reference.startswith("#"):
            return "must not refer to other documents; $ref starts with '#'"
        if "x-guidance" in part:
            return "must not have the keyword x-guidance"
        parts = list(part.values())
    else:
        parts = part if isinstance(part, list) else []
    return next((found for each in parts if (found := _schema_part_problem(each))), None)


def _choice_problem(text: str) -> str | None:
    if _depth(text, _JSON_TOKENS) > MAX_DEPTH:
        return "must be a list of strings"
    try:
        choices = json.loads(text)
    except ValueError:
        return "must be a list of strings"
    if not (isinstance(choices, list) and all(isinstance(each, str) for each in choices)):
        return "must be a list of strings"
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        return f"must have 1 to {MAX_CHOICES} choices, none of them empty"
    return None


def _depth(text: str, tokens: re.Pattern[str]) -> int:
    """Most brackets within each other; linear in the length of `text`."""
    depth = deepest = 0
    for match in tokens.finditer(text):
        first = match[0]
        if first in ("[", "{", "("):
            depth += 1
            deepest = max(deepest, depth)
        elif first in ("]", "}", ")"):
            depth = max(0, depth - 1)
    return deepest
