"""`penstock queue`: the requests that wait at a server's gate, and why, as a table."""

from __future__ import annotations

from typing import Any

from penstock.deployments.cli.server import HttpServer, connect
from penstock.workers.errors import ConfigError

_WHY = {
    "memory": "its predicted peak does not fit any worker yet",
    "slots": "all workers run max_num_seqs requests",
    "behind": "requests before it in the queue go first",
    "no_worker": "no worker has reported yet",
}


def run_queue(url: str, api_key: str | None, limit: int) -> int:
    """Print the table of at most `limit` waiting requests; the exit status.

    Raises ConfigError or ServerError.
    """
    with connect(url, api_key=api_key) as server:
        if not isinstance(server, HttpServer):
            raise ConfigError("penstock queue asks over HTTP; give --url http://host:port")
        print(queue_text(server.get("/v1/penstock/queue", limit=limit)))
    return 0


def queue_text(status: dict[str, Any]) -> str:
    """The lines for the terminal. `status`: as /v1/penstock/queue answers."""
    return "\n".join([*_summary(status), *_table(status["waiting"])])


def _summary(status: dict[str, Any]) -> list[str]:
    if status["admission"] == "optimistic":
        return ["admission is optimistic: there is no gate, and requests queue at the workers"]
    if not status["gate"]:
        breaker = (
            "" if status["breaker"] == "closed" else f" (circuit breaker: {status['breaker']})"
        )
        return [
            f"no connection to the gate{breaker}: requests go to the "
            "least-loaded worker and queue there"
        ]
    lines = [f"{status['num_waiting']} requests wait (admission {status['admission']})"]
    for worker in status["workers"]:
        share = 100 * worker["used_tokens"] / max(worker["capacity_tokens"], 1)
        closed = "" if worker["is_open"] else ", closed until its next report"
        lines.append(
            f"worker {worker['worker']}: {worker['num_held']} of {worker['slots']} slots, "
            f"{worker['used_tokens']:,} of {worker['capacity_tokens']:,} KV tokens "
            f"({share:.0f} %), headroom {100 * worker['headroom']:.1f} %{closed}"
        )
    return lines


def _table(waiting: list[dict[str, Any]]) -> list[str]:
    if not waiting:
        return []
    rows = [("request", "tenant", "waited", "admitted", "why")]
    for each in waiting:
        why = _WHY.get(each["reason"], each["reason"])
        if each["peak_tokens"] is not None:
            why += f" ({each['peak_tokens']:,} KV tokens; the limit is {each['limit_tokens']:,})"
        expected = "?" if each["expected_s"] is None else f"in {each['expected_s']:.1f} s"
        waited = f"{each['waited_s']:.1f} s"
        rows.append((each["request_id"], each["tenant"] or "-", waited, expected, why))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]])
        for row in rows
    ]
