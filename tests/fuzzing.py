"""Random data for parsers: JSON values, near misses of a given one, and protobuf messages."""

from __future__ import annotations

import copy
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

ODD_NUMBERS = st.sampled_from(
    [0, -1, 1, 2**31 - 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 5e-324, 1e308, -1e308]
)
ODD_TEXTS = st.sampled_from(
    [
        "",
        " ",
        "\0",
        "\n",
        "a" * 300,
        "é",
        "\U0001f600",
        "\ud800",
        "{{",
        "{% for",
        "<|im_end|>",
        "../x",
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-5, 20)
    | ODD_NUMBERS
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | ODD_TEXTS
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def near(draw: st.DrawFn, value: Any, names: tuple[str, ...] = ()) -> Any:
    """A near miss of `value`, plain JSON: parts of it replaced, dropped, repeated or added, under
    names of it or of `names`."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        value = _changed(draw, value, names)
    return value


def _changed(draw: st.DrawFn, value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict) and draw(st.integers(0, 5)):
        known = sorted({*map(str, value), *names})
        name = draw(st.sampled_from(known)) if known else draw(st.text(max_size=8))
        if name in value and draw(st.booleans()):
            value[name] = _changed(draw, value[name], names)
        elif name in value and draw(st.booleans()):
            del value[name]
        else:
            value[name] = draw(JSON)
        return value
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        place = draw(st.integers(0, len(value) - 1))
        if draw(st.booleans()):
            value[place] = _changed(draw, value[place], names)
        else:
            value.append(copy.deepcopy(value[place]))
        return value
    return draw(JSON)


_INTEGERS: dict[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


@st.composite
def messages(draw: st.DrawFn, /, kind: type[Message], depth: int = 3, **given: Any) -> Any:
    """A message of `kind` with some fields set, to anything that their types allow.

    `given`: strategies of fields by name; None: never set."""
    message = kind()
    fill(draw, message, depth, given)
    return message


def fill(draw: st.DrawFn, message: Message, depth: int, given: dict[str, Any]) -> None:
    """Set some fields of `message`, and of the messages in it, `depth` levels deep."""
    fields: list[FieldDescriptor] = list(message.DESCRIPTOR.fields)  # type: ignore[arg-type]
    chosen = (
        draw(st.lists(st.sampled_from(fields), unique_by=lambda each: each.number))
        if fields
        else []
    )
    wanted = {each.name for each in chosen} | {
        name for name, each in given.items() if each is not None
    }
    for field in fields:
        if field.name not in wanted or given.get(field.name, ...) is None:
            continue
        if field.message_type is not None and field.name not in given:
            if depth:
                _fill_message(draw, message, field, depth, given)
            continue
        values = given.get(field.name)
        if values is None:
            values = _values(field)
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values, max_size=4)))
        else:
            setattr(message, field.name, draw(values))


def _fill_message(
    draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int, given: dict[str, Any]
) -> None:
    kind = field.message_type
    assert kind is not None
    if kind.GetOptions().map_entry:
        return
    if not field.is_repeated:
        part = getattr(message, field.name)
        part.SetInParent()
        fill(draw, part, depth - 1, given)
        return
    for _ in range(draw(st.integers(0, 2))):
        fill(draw, getattr(message, field.name).add(), depth - 1, given)


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        return st.integers(max(low, -3), 20) | st.sampled_from([low, high, 0, 1])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return st.integers(0, 9)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.floats(width=32) | st.sampled_from([0.0, 1.0, float("nan"), float("inf")])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
