"""Arguments that a form writes as bare text, as the JSON values that the tool's schema asks for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

MAX_REFERENCES = 8  # that lead from one to the next

_MISSING = object()


def types_of(schema: Any, root: Mapping[str, Any]) -> tuple[str, ...]:
    """The JSON types that a schema allows, in its order; none: it does not say.

    `root`: the whole schema, to which references within it refer.
    """
    return tuple(dict.fromkeys(_types(schema, root, MAX_REFERENCES)))


def _types(schema: Any, root: Mapping[str, Any], num_left: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or num_left == 0:
        return
    declared = schema.get("type")
    given = [declared] if isinstance(declared, str) else declared
    if isinstance(given, list):
        yield from (each for each in given if isinstance(each, str))
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema[name] if isinstance(schema.get(name), list) else ():
            yield from _types(part, root, num_left - 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(_target(reference, root), root, num_left - 1)
    if not given:
        listed = schema.get("enum")
        values = listed if isinstance(listed, list) else []
        values = [*values, schema["const"]] if "const" in schema else values
        yield from map(_type_of, values)
    if schema.get("nullable") is True:
        yield "null"


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference such as #/$defs/unit names; None: nothing."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def as_json(raw: str, types: tuple[str, ...]) -> str:
    """`raw` as JSON of the first of `types` that it fits; text that fits none is a string.

    Where the schema does not say, it is JSON if it is valid JSON.
    """
    for name in types or ("any",):
        value = _cast(raw, name)
        if value is not _MISSING:
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(raw, ensure_ascii=False)


def _cast(raw: str, name: str) -> Any:
    """`raw` as a value of that type; _MISSING: it is none."""
    text = raw.strip()
    if name == "boolean":
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), _MISSING)
    if name == "null":
        return None if text in ("null", "None") else _MISSING
    try:
        if name in ("integer", "number"):
            return _number(text, is_whole=name == "integer")
        if name in ("object", "array", "any"):
            value = json.loads(text, parse_constant=lambda _: _MISSING)
            wanted = {"object": dict, "array": list}.get(name, object)
            return value if isinstance(value, wanted) else _MISSING
    except (ValueError, OverflowError, RecursionError):
        pass
    return _MISSING


def _number(text: str, *, is_whole: bool) -> Any:
    """Raises ValueError, OverflowError."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
    if not math.isfinite(number) or (is_whole and not number.is_integer()):
        return _MISSING
    return int(number) if is_whole or (number.is_integer() and "." not in text) else number
