"""The queries of the Responses API: of a retrieval, and of a list of items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.deployments.ingress.http.body import refuse_unless_neutral
from penstock.workers.request import RequestError

MAX_LISTED = 100  # items of one answer


def check_query(query: Mapping[str, str]) -> tuple[bool, int]:
    """(whether to stream, the number after which) of a retrieval. Raises RequestError."""
    for name, value in query.items():
        if name == "stream" and value not in ("true", "false"):
            raise RequestError("stream must be true or false", param="stream")
        if name == "starting_after" and not (value.isascii() and value.isdigit()):
            raise RequestError("starting_after must be a whole number", param="starting_after")
        if name not in ("stream", "starting_after", "include_obfuscation"):
            refuse_unless_neutral(ascii(name[:100])[1:-1], value, ())
    after = query.get("starting_after", "")[:18]
    return query.get("stream") == "true", int(after) if after else -1


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which items of a list are wanted. `after`: the id of the last one that the client has."""

    limit: int = 20
    is_ascending: bool = False
    after: str | None = None

    def page(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Of `items`, oldest first. Raises RequestError if `after` names none of them."""
        ordered = list(items) if self.is_ascending else list(reversed(items))
        if self.after is not None:
            ids = [item["id"] for item in ordered]
            if self.after not in ids:
                raise RequestError("after names none of these items", param="after")
            ordered = ordered[ids.index(self.after) + 1 :]
        shown = ordered[: self.limit]
        return {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(ordered) > len(shown),
        }


def list_query(query: Mapping[str, str]) -> ListQuery:
    """What the query of a list says. Raises RequestError."""
    for name, value in query.items():
        if name not in ("limit", "order", "after"):
            refuse_unless_neutral(ascii(name[:100])[1:-1], value, ())
    limit = query.get("limit", "20")
    is_number = limit.isascii() and limit.isdigit() and len(limit) < 9
    if not (is_number and 1 <= int(limit) <= MAX_LISTED):
        raise RequestError(f"limit must lie in [1, {MAX_LISTED}]", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", param="order")
    return ListQuery(int(limit), order == "asc", query.get("after"))
