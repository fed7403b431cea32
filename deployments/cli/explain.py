"""`penstock explain`: where one request has been, for how long, and what was decided about it."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from penstock.deployments.cli.server import ServerError, connect_http
from penstock.deployments.cli.status import WHY_IT_WAITS
from penstock.deployments.cli.tables import aligned
from penstock.deployments.client.tls import ClientTls

TRIES_PER_INGRESS = 4  # new connections: the system chooses the ingress of each
_RETURNED = {"new": "asks for a worker"}
_BRANCHES = {
    "free": "its newest tokens stay without KV blocks: they are below the ridge and add no time",
    "cheaper": "its newest tokens stay without KV blocks: computing them again costs less than "
    "{other}",
    "dearer": "its newest tokens are not deferred: computing them again would cost more than "
    "{other}",
    "limit": "its newest tokens are not deferred: one request may not have that many",
}


def run_explain(url: str, api_key: str | None, tls: ClientTls | None, request_id: str) -> int:
    """Print the history of the request; the exit status. Raises ConfigError or ServerError."""
    print(explain_text(_found(url, api_key, tls, request_id)))
    return 0


def _found(url: str, api_key: str | None, tls: ClientTls | None, request_id: str) -> dict[str, Any]:
    """The server's answer. Behind one address may be several ingresses, and one had the request."""
    path = f"/v1/penstock/requests/{quote(request_id, safe='')}"
    num_tries = 1
    while True:
        with connect_http(url, "explain", api_key, tls) as server:
            try:
                return server.get(path)
            except ServerError as error:
                if error.code != "not_found":
                    raise
                if num_tries == 1:
                    num_ingresses = len(server.get("/v1/penstock/status")["ingresses"])
                if num_tries >= (TRIES_PER_INGRESS * num_ingresses if num_ingresses > 1 else 1):
                    raise
        num_tries += 1


def explain_text(found: dict[str, Any]) -> str:
    """The lines for the terminal. `found`: the answer of /v1/penstock/requests/REQUEST."""
    return "\n\n".join(_answer_text(each) for each in found["answers"])


def _answer_text(answer: dict[str, Any]) -> str:
    state = f"ended with {answer['finish']}" if answer["finish"] else "runs"
    tenant = f", tenant {answer['tenant']}" if answer["tenant"] else ""
    lines = [
        f"request {answer['request_id']} of {answer['model']}{tenant}, priority "
        f"{answer['priority']}: {state}, {answer['total_s']:.3f} s",
        f"{answer['prompt_tokens']:,} prompt tokens ({answer['cached_tokens']:,} cached), "
        f"{answer['completion_tokens']:,} answer tokens"
        + (f", {answer['evicted_tokens']:,} evicted" if answer["evicted_tokens"] else ""),
    ]
    rows = [("at", "what", "")]
    for at_s, what, about in sorted(_history(answer), key=lambda row: row[0]):
        rows.append((f"{at_s:.3f} s", what, about))
    return "\n".join([*lines, *aligned(rows)])


def _history(answer: dict[str, Any]) -> list[tuple[float, str, str]]:
    rows = []
    for each in answer["admissions"]:
        waited_s = each["waited_s"]
        waited = "no worker yet" if waited_s is None else f"waited {waited_s:.3f} s"
        rows.append((each["at_s"], _RETURNED.get(each["why"], f"again: {each['why']}"), waited))
    rows += [(each["at_s"], *_event(each["name"], each["about"])) for each in answer["events"]]
    if answer["first_token_s"] is not None:
        parts = [
            f"{name} {answer[key]:.3f} s"
            for name, key in (("queue", "queue_s"), ("prefill", "prefill_s"))
            if answer[key] is not None
        ]
        rows.append((answer["first_token_s"], "first token", "at the worker: " + ", ".join(parts)))
    if answer["finish"] and answer["last_token_s"] is not None:
        rows.append((answer["last_token_s"], "last token", _pace(answer)))
    if answer["waits"]:
        wait = answer["waits"]
        expected = wait["expected_s"]
        when = "" if expected is None else f", admission expected in {expected:.1f} s"
        why = WHY_IT_WAITS.get(wait["reason"], wait["reason"])
        rows.append((answer["total_s"], "waits at the gate", why + when))
    return rows


def _event(name: str, about: dict[str, Any]) -> tuple[str, str]:
    num = f"{about.get('emitted_tokens', 0):,} tokens emitted"
    match name:
        case "sent":
            return "sent to a worker", str(about["worker"])
        case "preempted":
            tokens = f"{about['tokens']:,} computed tokens lose their KV blocks"
            return "preempted", f"{tokens}; {num}"
        case "commit_decision":
            other = "a preemption" if about["is_pressed"] else "reading K and V"
            why = _BRANCHES[about["branch"]].format(other=other)
            numbers = (
                f"{about['tokens']} pending, {about['other_rows']} other rows, nt "
                f"{about['nt']:.0f}, td {about['td_s'] * 1e3:.2f} ms, tl "
                f"{about['tl_s'] * 1e3:.2f} ms; {num}"
            )
            return "commit or recompute", f"{why} ({numbers})"
    return name.replace("_", " "), num


def _pace(answer: dict[str, Any]) -> str:
    steps = answer["completion_tokens"] - 1
    if steps < 1:
        return ""
    pace_s = (answer["last_token_s"] - answer["first_token_s"]) / steps
    return f"{pace_s * 1e3:.1f} ms a token"
