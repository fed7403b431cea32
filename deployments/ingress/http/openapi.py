"""/openapi.json: what the routes take and give, with every bound that the server enforces.

The bounds are those of the request core and of `SamplingParams.check`, which enforce them for all
front ends; they are only stated here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock.deployments.ingress.core.call import ServedModel
from penstock.deployments.ingress.core.prompts import MAX_MESSAGES, ROLES
from penstock.deployments.ingress.core.service import MAX_PROMPTS
from penstock.deployments.ingress.core.tools import MAX_TOOLS
from penstock.deployments.ingress.core.validation import (
    AS_MANY_AS_FIT,
    MAX_BAD_WORD_STRINGS,
    MAX_CHOICES,
    MAX_TRUNCATE,
)
from penstock.deployments.ingress.http.openai.schemas import SCHEMA_REF
from penstock.deployments.ingress.http.responses.requests import (
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARS,
)
from penstock.workers import structured_spec
from penstock.workers.parameters import Bounds
from penstock.workers.request import (
    LOGIT_BIAS_BOUNDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    PARAMETER_BOUNDS,
)

Limits = Mapping[str, Mapping[str, Any]]  # by JSON type; "items" and "values": of what is inside


def document_of(
    app: FastAPI, models: Iterable[ServedModel], bodies: Iterable[type[BaseModel]]
) -> dict[str, Any]:
    """The OpenAPI document, with `bodies`, which the routes read themselves."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    kinds: list[Any] = [(kind, "validation") for kind in bodies]
    _, definitions = models_json_schema(kinds, ref_template=SCHEMA_REF)
    schemas: dict[str, Any] = definitions["$defs"]
    _state_bounds(schemas, list(models))
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # bad values are 400 here, as at OpenAI
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    return document


def _state_bounds(schemas: Mapping[str, Any], models: list[ServedModel]) -> None:
    by_name = _limits(models)
    for schema_name, schema in schemas.items():
        if schema.get("additionalProperties") is not False:
            continue  # of an answer
        special = _SPECIAL.get(schema_name, {})
        for name, part in schema.get("properties", {}).items():
            if name in special or (name in by_name and schema_name.endswith("Request")):
                _state(part, special[name] if name in special else by_name[name])
    for form in schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]:
        if form.get("items", {}).get("type") in ("string", "array"):  # of several prompts
            form["maxItems"] = MAX_PROMPTS


def _state(part: dict[str, Any], limits: Limits) -> None:
    """Write `limits` into each alternative of a schema that they are for."""
    for alternative in part.get("anyOf", ()):
        _state(alternative, limits)
    kind = part.get("type")
    if kind in ("integer", "number"):
        part.update(limits.get("number", {}))
    elif isinstance(kind, str):
        part.update(limits.get(kind, {}))
    for name, inside in (
        ("items", part.get("items")),
        ("values", part.get("additionalProperties")),
    ):
        if isinstance(inside, dict) and name in limits:
            _state(inside, limits[name])


def _number(low: float, high: float, *, open_low: bool = False) -> Limits:
    return {"number": {"exclusiveMinimum" if open_low else "minimum": low, "maximum": high}}


def _within(bounds: Bounds) -> Limits:
    return _number(bounds.low, bounds.high, open_low=bounds.open_low)


def _limits(models: list[ServedModel]) -> dict[str, Limits]:
    """By the name of a field, whichever API has it."""
    longest = max(model.max_model_len for model in models)
    vocab_size = max(model.vocab_size for model in models)
    ids = _number(0, vocab_size - 1)
    names = {"enum": [name for model in models for name in model.names]}
    if any(model.has_any_name or model.adapters.may_change for model in models):
        names = {}
    a_stop = {"string": {"minLength": 1, "maxLength": MAX_STOP_CHARS}}
    stop: Limits = {**a_stop, "array": {"maxItems": MAX_STOP_STRINGS}, "items": a_stop}
    answer = _number(1, longest)
    # Neither empty, nor only spaces.
    bad_word = {"string": {"minLength": 1, "maxLength": MAX_STOP_CHARS, "pattern": "[^ ]"}}
    text_or_ids: Limits = {"array": {"minItems": 1}, "string": {"minLength": 1}, **ids}
    metadata_keys = {"maxLength": MAX_METADATA_KEY_CHARS}
    return {
        "model": {"string": names},
        **{name: _within(bounds) for name, bounds in PARAMETER_BOUNDS.items()},
        "top_k": _number(-1, PARAMETER_BOUNDS["top_k"].high),  # -1: off, as 0
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), answer),
        "min_tokens": _number(0, longest),
        "n": _number(1, MAX_CHOICES),
        "top_logprobs": _within(PARAMETER_BOUNDS["logprobs"]),
        "truncate_prompt_tokens": {
            "number": {"minimum": AS_MANY_AS_FIT, "maximum": MAX_TRUNCATE, "not": {"const": 0}}
        },
        **dict.fromkeys(("stop", "stop_sequences"), stop),
        "stop_token_ids": {"array": {"maxItems": MAX_STOP_TOKEN_IDS}, "items": ids},
        "allowed_token_ids": {"array": {"minItems": 1, "maxItems": vocab_size}, "items": ids},
        "tokens": {"items": ids},
        "bad_words": {"array": {"maxItems": MAX_BAD_WORD_STRINGS}, "items": bad_word},
        "logit_bias": {
            "object": {
                "maxProperties": MAX_LOGIT_BIAS,
                "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            },
            "values": _within(LOGIT_BIAS_BOUNDS),
        },
        "messages": {"array": {"minItems": 1, "maxItems": MAX_MESSAGES}},
        "input": {"array": {"minItems": 1, "maxItems": MAX_MESSAGES}},
        "tools": {"array": {"maxItems": MAX_TOOLS}},
        "metadata": {
            "object": {"maxProperties": MAX_METADATA_PAIRS, "propertyNames": metadata_keys},
            "values": {"string": {"maxLength": MAX_METADATA_VALUE_CHARS}},
        },
        "prompt": {**text_or_ids, "items": {**text_or_ids, "items": ids}},
        "guided_regex": _REGEX,
        "guided_grammar": _GRAMMAR,
        "guided_choice": _CHOICE,
    }


_REGEX: Limits = {"string": {"minLength": 1, "maxLength": structured_spec.MAX_REGEX_BYTES}}
_GRAMMAR: Limits = {"string": {"minLength": 1, "maxLength": structured_spec.MAX_SPEC_BYTES}}
_CHOICE: Limits = {
    "array": {"minItems": 1, "maxItems": structured_spec.MAX_CHOICES},
    "items": {"string": {"minLength": 1}},
}
_SOME_TEXTS: Limits = {"string": {"minLength": 1}, "array": {"minItems": 1}}
_TOOL_NAME: Limits = {"string": {"pattern": "^[A-Za-z0-9_-]{1,64}$"}}
# Fields of parts of a request, and of requests that have other bounds than the rest.
# With a sink window an answer may be longer than the context that the model was trained with.
_ENDLESS = _number(1, 2**31 - 1)
_SPECIAL: dict[str, dict[str, Limits]] = {
    "ChatCompletionRequest": {"max_tokens": _ENDLESS, "max_completion_tokens": _ENDLESS},
    "CompletionRequest": {"max_tokens": {"number": {"minimum": 0}}},  # where it echoes
    "TokenizeRequest": {"prompt": {}},
    "EmbeddingRequest": {"input": {**_SOME_TEXTS, "items": _SOME_TEXTS}},
    "ScoreRequest": {name: {**_SOME_TEXTS, "items": _SOME_TEXTS} for name in ("text_1", "text_2")},
    "RerankRequest": {"query": _SOME_TEXTS, "documents": {**_SOME_TEXTS, "items": _SOME_TEXTS}},
    "ChatMessage": {"role": {"string": {"enum": list(ROLES)}}},
    "StructuredOutputs": {"regex": _REGEX, "grammar": _GRAMMAR, "choice": _CHOICE},
    **{
        name: {"name": _TOOL_NAME}
        for name in ("FunctionBody", "FunctionTool", "CustomTool", "MessagesTool")
    },
}
