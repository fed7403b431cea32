"""`penstock status` and `penstock queue`: tables of a running server.

Nodes, replicas, the autoscaler's decisions and batches; and the requests that wait at the gate.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.deployments.cli.server import HttpServer, ServerError, connect_http
from penstock.deployments.cli.tables import aligned, duration
from penstock.deployments.client.tls import ClientTls
from penstock.deployments.security.api_keys import FORBIDDEN

MAX_CHANGES = 5
MAX_BATCHES = 10
WHY_IT_WAITS = {
    "memory": "its predicted peak does not fit any worker yet",
    "slots": "all workers run max_num_seqs requests",
    "behind": "requests before it in the queue go first",
    "no_worker": "no worker runs yet: one is being started",
}


def run_status(url: str, api_key: str | None, tls: ClientTls | None = None) -> int:
    """Print the tables; the exit status: 1 if the server is not ready.

    Raises ConfigError or ServerError.
    """
    with connect_http(url, "status", api_key, tls) as server:
        status = server.get("/v1/penstock/status")
        batches = _batches(server) if status["has_batches"] else []
        print(status_text(status, batches))
    return 0 if status["is_ready"] else 1


def run_queue(
    url: str, api_key: str | None, tls: ClientTls | None, limit: int, model: str | None = None
) -> int:
    """Print the table of at most `limit` waiting requests; the exit status. `model`: those of one
    model; None: of all.

    Raises ConfigError or ServerError.
    """
    with connect_http(url, "queue", api_key, tls) as server:
        asked = {"limit": limit, **({"model": model} if model else {})}
        print(queue_text(server.get("/v1/penstock/queue", **asked)))
    return 0


def status_text(status: dict[str, Any], batches: Sequence[dict[str, Any]] = ()) -> str:
    """The lines for the terminal. `status`: the answer of /v1/penstock/status."""
    state = "ready" if status["is_ready"] else "not ready: no worker takes requests"
    models = ", ".join(model["id"] for model in status["models"])
    lines = [f"penstock {status['version']} serves {models}: {state}"]
    if num := sum(each["num_waiting"] for each in status["ingresses"]):
        lines.append(f"{num} requests wait at the gate: penstock queue says why")
    if status["num_failed_starts"]:
        lines.append(f"{status['num_failed_starts']} replicas could not start: see Ray's logs")
    batch_table = _batch_table(batches)
    lines += _warnings(status["ingresses"])
    for table in (_nodes(status), _workers(status), _scaling(status), batch_table, _jobs(status)):
        lines += ["", *table] if table else []
    return "\n".join(lines)


def _batches(server: HttpServer) -> list[dict[str, Any]]:
    try:
        listed: list[dict[str, Any]] = server.get("/v1/batches", limit=MAX_BATCHES)["data"]
    except ServerError as error:
        if error.code != FORBIDDEN:
            raise
        return []  # the key has the role metrics, and no batches
    return listed


def _warnings(ingresses: Sequence[dict[str, Any]]) -> list[str]:
    """Each once, with the ingresses that have it where not all do."""
    having: dict[str, list[str]] = {}
    for each in ingresses:
        for text in each.get("warnings", ()):  # servers of earlier releases have none
            having.setdefault(text, []).append(each["id"])
    return [
        f"WARNING: {text}" + (f" (ingress {', '.join(ids)})" if len(ids) < len(ingresses) else "")
        for text, ids in having.items()
    ]


def _nodes(status: dict[str, Any]) -> list[str]:
    rows = [("node", "CPUs", "GPUs", "workers", "ingresses")]
    for each in status["nodes"]:
        name = each["node"] + (" (head)" if each["is_head"] else "")
        counts = [
            str(sum(replica["node"] == each["node"] for replica in replicas))
            for replicas in (_present(status["workers"]), status["ingresses"])
        ]
        rows.append((name, f"{each['num_cpus']:g}", f"{each['num_gpus']:g}", *counts))
    return aligned(rows)


def _present(workers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those that were lost; servers of earlier releases do not say which."""
    return [each for each in workers if not each.get("is_lost")]


def _workers(status: dict[str, Any]) -> list[str]:
    # Which model a worker has is said where they differ.
    has_several = len({each["model"] for each in status["workers"]}) > 1
    of = ("model",) if has_several else ()
    rows = [("worker", *of, "node", "state", "running", "waiting", "KV used", "preempted")]
    for each in status["workers"]:
        of = (each["model"],) if has_several else ()
        used = 100 * each["num_live_blocks"] / max(each["num_blocks"], 1)
        state = "lost" if each.get("is_lost") else "serves"
        state = "draining" if each["is_draining"] else state
        counts = (str(each["num_running"]), str(each["num_waiting"]))
        preempted = str(each["num_preemptions"])
        rows.append((each["id"], *of, each["node"], state, *counts, f"{used:.0f} %", preempted))
    return aligned(rows)


def _scaling(status: dict[str, Any]) -> list[str]:
    lines = [
        f"{each['deployment']}: {each['number']} wanted of {each['minimum']}:{each['maximum']}, "
        f"{each['ready']} ready; {each['reason']}"
        for each in status["scaling"]
    ]
    lines += [
        f"  {duration(each['age_s'])} ago: {each['deployment']} {each['kind']}: {each['reason']}"
        for each in status["scale_changes"][:MAX_CHANGES]
    ]
    return lines


def _batch_table(batches: Sequence[dict[str, Any]]) -> list[str]:
    rows = [("batch", "status", "answered", "failed", "requests", "")]
    for each in batches:
        counts = each["request_counts"]
        numbers = (str(counts[name]) for name in ("completed", "failed", "total"))
        rows.append((each["id"], each["status"], *numbers, _note(each, time.time())))
    return aligned(rows)


def _jobs(status: dict[str, Any]) -> list[str]:
    """Batches that run elsewhere: `penstock batch`, also as a job of Ray."""
    rows = [("job", "input", "host", "state", "answered", "failed", "requests", "")]
    for each in status["jobs"]:
        numbers = (str(each[f"num_{name}"]) for name in ("completed", "failed", "lines"))
        done = each["num_completed"] + each["num_failed"]
        note = f"{100 * done // max(each['num_lines'], 1)} %"
        if each["state"] == "running":
            note += f", {each['num_in_flight']} in flight"
        note += f", sent again: {each['cause']}" if each["cause"] else ""
        note += f", {duration(each['age_s'])} ago"
        rows.append((each["id"], each["name"], each["host"], each["state"], *numbers, note))
    return aligned(rows)


def _note(batch: dict[str, Any], now: float) -> str:
    """How far an unfinished batch is, and why one has failed."""
    match batch["status"]:
        case "in_progress" | "cancelling":
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            note = f"{100 * done // max(counts['total'], 1)} %"
            note += f", expires in {duration(max(batch['expires_at'] - now, 0.0))}"
            return note + (f", sent again: {batch['waits_for']}" if batch["waits_for"] else "")
        case "failed" if batch["errors"]:
            first, *others = batch["errors"]["data"]
            line = "" if first["line"] is None else f"line {first['line']}: "
            more = " (and others)" if others else ""
            return f"{line}{first['message']}{more}"
    return ""


def queue_text(queue: dict[str, Any]) -> str:
    """The lines for the terminal. `queue`: the answer of /v1/penstock/queue."""
    return "\n".join([*_gate(queue), *_waiting(queue["waiting"])])


def _gate(queue: dict[str, Any]) -> list[str]:
    if queue["admission"] == "optimistic":
        return ["admission is optimistic: there is no gate, and requests queue at the workers"]
    if not queue["gate"]:
        breaker = "" if queue["breaker"] == "closed" else f" (circuit breaker: {queue['breaker']})"
        return [
            f"no connection to the gate{breaker}: requests go to the "
            "least-loaded worker and queue there"
        ]
    lines = [f"{queue['num_waiting']} requests wait (admission {queue['admission']})"]
    for worker in queue["workers"]:
        share = 100 * worker["used_tokens"] / max(worker["capacity_tokens"], 1)
        closed = "" if worker["is_open"] else ", closed until its next report"
        lines.append(
            f"worker {worker['worker']}: {worker['num_held']} of {worker['slots']} slots, "
            f"{worker['used_tokens']:,} of {worker['capacity_tokens']:,} KV tokens "
            f"({share:.0f} %), headroom {100 * worker['headroom']:.1f} %{closed}"
        )
    return lines


def _waiting(waiting: Sequence[dict[str, Any]]) -> list[str]:
    rows = [("request", "tenant", "waited", "admitted", "why")]
    for each in waiting:
        why = WHY_IT_WAITS.get(each["reason"], each["reason"])
        if each["peak_tokens"] is not None:
            why += f" ({each['peak_tokens']:,} KV tokens; the limit is {each['limit_tokens']:,})"
        expected = "?" if each["expected_s"] is None else f"in {each['expected_s']:.1f} s"
        waited = f"{each['waited_s']:.1f} s"
        rows.append((each["request_id"], each["tenant"] or "-", waited, expected, why))
    return aligned(rows)
