"""JSON and server-sent events as bytes."""

from __future__ import annotations

import json
from typing import Any

import orjson


def json_bytes(body: Any) -> bytes:
    """JSON in UTF-8, without spaces. By orjson, because it is called for every token."""
    try:
        return orjson.dumps(body)
    except TypeError:  # a number beyond 64 bits in a request, which the error repeats
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def server_sent(
    body: dict[str, Any], event: str | None = None, event_id: str | None = None
) -> bytes:
    """One server-sent event. `event` None: of no type, as OpenAI's older streams."""
    data = json_bytes(body)
    if event_id is not None:
        return b"id: %b\ndata: %b\n\n" % (event_id.encode(), data)
    if event is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (event.encode(), data)
