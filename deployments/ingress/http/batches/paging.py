"""Pages of the lists of files and batches, as OpenAI's API cuts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.deployments.ingress.http.body import refuse_unless_neutral
from penstock.workers.request import RequestError


@dataclass(frozen=True, slots=True)
class Page:
    """What a client asks for: `limit` items behind the one with the id `after`."""

    limit: int
    is_descending: bool
    after: str | None

    def of(self, ids: Sequence[str]) -> tuple[list[str], bool]:
        """The ids on this page of those in `ids`, the oldest first; whether there are more behind
        it. Raises RequestError."""
        ordered = list(reversed(ids)) if self.is_descending else list(ids)
        if self.after is not None:
            if self.after not in ordered:
                raise RequestError("after names none of these items", param="after")
            ordered = ordered[ordered.index(self.after) + 1 :]
        return ordered[: self.limit], len(ordered) > self.limit


def page_of(query: Mapping[str, str], default: int, most: int, others: Sequence[str] = ()) -> Page:
    """The page that `query` selects. `others`: further fields of it. Raises RequestError."""
    for name, value in query.items():
        if name not in ("limit", "order", "after", *others):
            refuse_unless_neutral(ascii(name[:100])[1:-1], value, ())
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most):
        raise RequestError(f"limit must lie in [1, {most}]", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", param="order")
    return Page(int(limit), order == "desc", query.get("after"))


def list_body(bodies: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(bodies),
        "first_id": bodies[0]["id"] if bodies else None,
        "last_id": bodies[-1]["id"] if bodies else None,
        "has_more": has_more,
    }
