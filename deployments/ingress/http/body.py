"""Reading a request's body: bytes to JSON to a pydantic model, with each refusal naming its field.

Each API brings its model and its tables of unsupported and ignored fields. body_limits.py has the
sizes.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, get_args

import pydantic_core
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from penstock.deployments.ingress.http.body_errors import as_request_error, problems_of
from penstock.deployments.ingress.http.body_limits import LIMITS, check_num_parts, check_sizes
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.workers.request import PARAMETERS, RequestError, SamplingParams
from penstock.workers.sampling_defaults import SamplingDefaults

ModelT = TypeVar("ModelT", bound=BaseModel)
MAX_EXACT = 2**53  # up to here a float is one integer


def _fail_fast(schema: Any) -> None:
    """Have all lists in a schema stop at their first problem."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Strict(BaseModel):
    """A part of a body: no other fields, and no value is bent into another type.

    One problem of each list is enough, and one unknown field: a client that sends a million of them
    would have all others wait while they are written down.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, values: Any) -> Any:
        fields = cls.model_fields
        if not isinstance(values, dict) or len(values) <= len(fields):
            return values
        known = {each.alias or name for name, each in fields.items()}
        unknown = next(name for name in values if name not in known)
        return {name: values[name] for name in (*known, unknown) if name in values}


def sampling_field(name: str, **constraints: Any) -> Any:
    """The optional field of a body that sets the parameter `name` of SamplingParams."""
    return Field(None, description=PARAMETERS[name].description, **constraints)


def sampling_params(request: BaseModel, defaults: SamplingDefaults, **given: Any) -> SamplingParams:
    """The parameters that `request` sets under their own names, and those `given`.

    `defaults`: the model's, for what the request does not set. -1 switches top_k off in bodies, as
    0 does.
    """
    values: dict[str, Any] = {}
    for name in PARAMETERS.keys() - given.keys():
        value = getattr(request, name, None)
        if value is not None:
            values[name] = tuple(value) if isinstance(value, list) else value
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return defaults.params({**values, **given})


def strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """A field that holds one string or several."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, perhaps after a byte order mark. Raises RequestError."""
    try:
        values = pydantic_core.from_json(body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(
            f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json"
        ) from None
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return values


def body_values(
    body: Mapping[str, Any],
    fields: Collection[str],
    unsupported: Mapping[str, tuple[Any, ...]],
    ignored: Collection[str],
    left_out: IgnoredFields,
    *,
    hints: Mapping[str, tuple[Any, ...]] | None = None,
    limits: Mapping[str, tuple[int, str]] | None = None,
    conversations: Collection[str] = (),
) -> dict[str, Any]:
    """The values of `fields` in a body, within LIMITS but not validated yet; 16.0 is 16.

    `unsupported`, `ignored`, `left_out`: as for `drop_ignored_fields`. `hints`: unsupported as
    well, unless `left_out` ignores what is unknown. `limits`: instead of LIMITS. `conversations`:
    the fields that hold messages or items. Raises RequestError.
    """
    if hints:
        body = {name: value for name, value in body.items() if value not in hints.get(name, ())}
        unsupported = unsupported if left_out.ignores_unknown else {**unsupported, **hints}
    values = drop_ignored_fields(body, fields, unsupported, ignored, left_out)
    check_sizes(values, LIMITS if limits is None else limits)
    for name in conversations:
        check_num_parts(values.get(name), name)
    return {name: _whole(value) for name, value in values.items()}


def _whole(value: Any) -> Any:
    """16 for 16.0: the same number in JSON, and what some languages write for an integer."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT:
        return int(value)
    return value


def drop_ignored_fields(
    values: Mapping[str, Any],
    fields: Collection[str],
    unsupported: Mapping[str, tuple[Any, ...]],
    ignored: Collection[str],
    left_out: IgnoredFields | None = None,
) -> dict[str, Any]:
    """`values` without what is ignored or neutral. Raises RequestError for the rest unknown.

    `unsupported` has the values at which a parameter changes nothing, so that it may be sent.
    `left_out`: called with the ignored fields, decides on unknown ones; None: these are refused.
    """
    left_out = IgnoredFields() if left_out is None else left_out
    ignores_unknown = left_out.ignores_unknown
    kept = {}
    for name, value in values.items():
        if name in fields:
            kept[name] = value
        elif name in unsupported:
            refuse_unless_neutral(name, value, unsupported[name])
        elif name in ignored or ignores_unknown:
            left_out.add(name, value)
        else:
            shown = ascii(name[:100])[1:-1]
            known = [*fields, *unsupported, *ignored]
            near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(
                f"unknown parameter '{shown}'{hint}", param=shown, code="unknown_parameter"
            )
    return kept


def refuse_unless_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Raise RequestError unsupported_parameter unless `value` is one of `neutral`."""
    # bool is an int in Python, but `n: true` is no number of answers.
    is_bool = isinstance(value, bool)
    if not any(value == each and is_bool == isinstance(each, bool) for each in neutral):
        raise RequestError(
            f"{name} is not supported by this server; leave it out",
            param=name,
            code="unsupported_parameter",
        )


def validated(
    kind: type[ModelT],
    values: Mapping[str, Any],
    left_out: IgnoredFields | None = None,
    *,
    path: str = "",
) -> ModelT:
    """The model with these values. Raises RequestError naming the first that is wrong.

    `left_out`: of the body, to leave out what is unknown; None: it is refused. `path`: where the
    values are in the body, for `left_out` alone.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        is_unknown = any(each["type"] == "extra_forbidden" for each in problems_of(error))
        if left_out is None or not left_out.ignores_unknown or not is_unknown:
            raise as_request_error(error, Strict) from None
    return validated(kind, _without_unknown(kind, values, path, left_out))


def _without_unknown(kind: type[BaseModel], values: Any, path: str, left_out: IgnoredFields) -> Any:
    """`values` without the fields that `kind`, and the models in it, do not have."""
    if not isinstance(values, Mapping):
        return values
    fields = {each.alias or name: each for name, each in kind.model_fields.items()}
    kept: dict[str, Any] = {}
    for name, value in values.items():
        where = f"{path}.{name}" if path else name
        if name not in fields:
            left_out.add(where, value)
            continue
        annotation: Any = fields[name].annotation
        part = _model_in(annotation)
        if part is not None and isinstance(value, list):
            value = [_without_unknown(part, each, where, left_out) for each in value]
        elif part is not None:
            value = _without_unknown(part, value, where, left_out)
        kept[name] = value
    return kept


@functools.cache
def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The only model that a field may hold. None: it holds none, or one of several."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = {model for each in get_args(annotation) if (model := _model_in(each)) is not None}
    return found.pop() if len(found) == 1 else None


def validated_at(
    path: str,
    kind: type[ModelT],
    values: Mapping[str, Any],
    left_out: IgnoredFields | None = None,
) -> ModelT:
    """The same for a part of a body, which is at `path` in it."""
    try:
        return validated(kind, values, left_out, path=path)
    except RequestError as error:
        where = f"{path}.{error.param}" if error.param else path
        message = f"{path}.{error.message}" if error.param else f"{path}: {error.message}"
        raise RequestError(message, param=where, code=error.code) from None


@contextlib.contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals of the request core name fields as this API calls them: `names` has core's first."""
    try:
        yield
    except RequestError as error:
        name = names.get(error.param or "")
        if name is None:
            raise
        message = re.sub(rf"\b{error.param}\b", name, error.message)
        raise RequestError(message, param=name, code=error.code) from None
