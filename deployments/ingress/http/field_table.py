"""What each API makes of each field of its bodies: the tables of all parsers as one.

The reference is generated from it, and tests hold the official clients' request types against it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from penstock.deployments.ingress.http.anthropic import requests as anthropic
from penstock.deployments.ingress.http.embeddings import requests as embeddings
from penstock.deployments.ingress.http.openai import other_fields as openai
from penstock.deployments.ingress.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
)
from penstock.deployments.ingress.http.responses import requests as responses


class Verdict(StrEnum):
    """What becomes of a field."""

    SERVED = "served"
    MAPPED = "mapped"
    IGNORED = "ignored"
    HINT = "ignored, or refused"  # as the setting unknown_fields says
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Row:
    """`about`: what the field means, stands for, or may be."""

    verdict: Verdict
    about: str


def field_table() -> dict[str, dict[str, Row]]:
    """By path of the API and by name of the field."""
    named = dict(openai.MAPPED)
    of_chat = {name: named.pop(name) for name in openai.MAPPED_IN_CHAT}
    ignored = openai.IGNORED
    return {
        "/v1/chat/completions": _rows(
            ChatCompletionRequest, named | of_chat, ignored, openai.HINTS, openai.UNSUPPORTED
        ),
        "/v1/completions": _rows(
            CompletionRequest,
            named,
            ignored | {"reasoning_effort"},
            openai.HINTS,
            openai.UNSUPPORTED,
        ),
        "/v1/messages": _rows(
            anthropic.MessagesRequest, {}, anthropic.IGNORED, anthropic.HINTS, anthropic.UNSUPPORTED
        ),
        "/v1/messages/count_tokens": _rows(
            anthropic.CountTokensRequest,
            {},
            anthropic.IGNORED,
            anthropic.HINTS,
            anthropic.UNSUPPORTED,
        ),
        "/v1/responses": _rows(
            responses.ResponsesRequest,
            {},
            responses.IGNORED,
            responses.HINTS,
            responses.UNSUPPORTED,
        ),
        **{path: _of_texts(kind) for path, kind in embeddings.BODIES.items()},
    }


def _of_texts(kind: type[embeddings.TextsRequest]) -> dict[str, Row]:
    named = {theirs: f"another name of `{ours}`" for theirs, ours in kind.OTHER_NAMES.items()}
    tables = (embeddings.IGNORED, embeddings.HINTS, embeddings.UNSUPPORTED)
    return _rows(kind, named, *tables)


def _rows(
    model: type[BaseModel],
    mapped: Mapping[str, str],
    ignored: Collection[str],
    hints: Mapping[str, tuple[Any, ...]],
    unsupported: Mapping[str, tuple[Any, ...]],
) -> dict[str, Row]:
    fields = model.model_fields
    rows = {name: Row(Verdict.SERVED, each.description or "") for name, each in fields.items()}
    others = {
        **{name: Row(Verdict.MAPPED, about) for name, about in mapped.items()},
        **{name: Row(Verdict.IGNORED, "") for name in ignored},
        **{name: Row(Verdict.HINT, _unless(values)) for name, values in hints.items()},
        **{name: Row(Verdict.REFUSED, _unless(values)) for name, values in unsupported.items()},
    }
    return rows | {name: others[name] for name in sorted(others.keys() - rows.keys())}


def _unless(neutral: tuple[Any, ...]) -> str:
    """At which values a field changes nothing."""
    return "unless " + " or ".join(f"`{json.dumps(value)}`" for value in neutral)
