"""`penstock queue`: who waits at a server's gate, and why, as a table."""

from __future__ import annotations

from typing import Any

import httpx

from penstock.deployments.cli.server import START_ONE, ServerError

_WHY = {
    "memory": "no worker has memory for it yet",
    "slots": "no worker has a slot free",
    "behind": "others go first",
    "no_worker": "no worker has reported",
}


def fetch_queue(url: str, api_key: str | None, limit: int) -> dict[str, Any]:
    """What the server says. Raises ServerError."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/penstock/queue"
    try:
        answer = httpx.get(address, headers=headers, params={"limit": limit}, timeout=10)
        answer.raise_for_status()
        told: dict[str, Any] = answer.json()
    except httpx.ConnectError:
        raise ServerError(f"no server answers at {url}; {START_ONE}") from None
    except (httpx.HTTPError, ValueError) as error:
        raise ServerError(f"{address}: {error}") from None
    return told


def queue_text(told: dict[str, Any]) -> str:
    """For people."""
    return "\n".join([*_about(told), *_table(told["waiting"])])


def _about(told: dict[str, Any]) -> list[str]:
    if told["admission"] == "optimistic":
        return ["admission is optimistic: there is no gate, and requests wait at the workers"]
    if not told["gate"]:
        why = "" if told["breaker"] == "closed" else f" (breaker {told['breaker']})"
        return [
            f"the gate is away{why}: requests go to the worker with the least to do and wait there"
        ]
    lines = [f"{told['num_waiting']} wait (admission {told['admission']})"]
    for book in told["workers"]:
        share = 100 * book["used_tokens"] / max(book["capacity_tokens"], 1)
        closed = "" if book["is_open"] else ", closed until it reports"
        lines.append(
            f"worker {book['worker']}: {book['num_held']} of {book['slots']} slots, "
            f"{book['used_tokens']:,} of {book['capacity_tokens']:,} KV tokens ({share:.0f} %), "
            f"headroom {100 * book['headroom']:.1f} %{closed}"
        )
    return lines


def _table(waiting: list[dict[str, Any]]) -> list[str]:
    if not waiting:
        return []
    rows = [("request", "tenant", "waited", "goes in", "why")]
    for each in waiting:
        why = _WHY.get(each["reason"], each["reason"])
        if each["peak_tokens"] is not None:
            why += f": {each['peak_tokens']:,} tokens at the peak, {each['limit_tokens']:,} may be"
        expected = "?" if each["expected_s"] is None else f"in {each['expected_s']:.1f} s"
        waited = f"{each['waited_s']:.1f} s"
        rows.append((each["request_id"], each["tenant"] or "-", waited, expected, why))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]])
        for row in rows
    ]
