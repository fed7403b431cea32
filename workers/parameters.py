"""The metadata of request parameters: help, bounds, and the APIs that offer each.

`SamplingParams` states them once, in its fields. Its checks, the fields of HTTP bodies, the OpenAPI
document and the parameters of the other front ends are derived from them.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any

MAX_INT32 = 2**31 - 1


class Api(StrEnum):
    """An API of the server. The Python client uses `grpc`."""

    CHAT = "chat"  # /v1/chat/completions
    COMPLETIONS = "completions"  # /v1/completions
    RESPONSES = "responses"  # /v1/responses
    MESSAGES = "messages"  # /v1/messages
    GRPC = "grpc"  # penstock.v1
    OPEN_INFERENCE = "open inference"


EVERY_API = frozenset(Api)
MOST_APIS = EVERY_API - {Api.MESSAGES}
SHAPED_APIS = EVERY_API - {Api.OPEN_INFERENCE}
WIDE_APIS = frozenset((Api.CHAT, Api.COMPLETIONS, Api.GRPC))  # they offer every parameter


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a numeric parameter, inclusive but for `low` where `open_low`."""

    low: float
    high: float
    open_low: bool = False

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low:.10g}, {self.high:.10g}]"

    def has(self, value: float) -> bool:
        """Whether `value` lies within; False for NaN. An int may exceed any float."""
        above = self.low < value if self.open_low else self.low <= value
        return above and value <= self.high


FROM_0, FROM_1 = Bounds(0, MAX_INT32), Bounds(1, MAX_INT32)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field with its metadata. `kind`: its type as it is written, None left out."""

    name: str
    kind: str
    default: Any
    help: str
    apis: frozenset[Api]
    bounds: Bounds | None = None
    of_model: bool = False  # the model may state a default of its own

    @property
    def description(self) -> str:
        """Help, range and default, as /openapi.json has them."""
        parts = [self.help]
        if self.bounds is not None and self.bounds.high < MAX_INT32:
            parts.append(str(self.bounds))
        if isinstance(self.default, bool):
            parts.append(f"default {str(self.default).lower()}")
        elif isinstance(self.default, int | float):
            own = "the model's own, else " if self.of_model else ""
            parts.append(f"default {own}{self.default:g}")
        return "; ".join(parts)


def parameter(
    default: Any,
    apis: frozenset[Api],
    help: str,
    bounds: Bounds | None = None,
    *,
    of_model: bool = False,
) -> Any:
    """A dataclass field with the metadata of a parameter."""
    metadata = {"help": help, "bounds": bounds, "apis": apis, "of_model": of_model}
    return field(default=default, metadata=metadata)


def parameters_of(kind: type[Any]) -> dict[str, Parameter]:
    """The parameters of a dataclass by name. Raises KeyError for a field without metadata."""
    found = {}
    for each in fields(kind):
        assert each.default is not MISSING
        type_name = str(each.type).removesuffix(" | None")
        found[each.name] = Parameter(each.name, type_name, each.default, **each.metadata)
    return found
