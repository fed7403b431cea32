"""Valid requests that cost the server much: V2, V5 A, V7, V9 of the review."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx

from benchmarks.faults.findings.server import (
    Finding,
    Server,
    chat_with_arguments,
    error_code,
    probing,
    words,
)
from benchmarks.faults.watch import MIB

NUM_AT_ONCE = 16
JSON = {"content-type": "application/json"}
COSTLY_SCHEMA = {"type": "integer", "minimum": 0, "maximum": 10**18}
PRIME = 999_983


def run(server: Server) -> Iterator[Finding]:
    yield _one_chat(server)
    yield _many_chats(server)
    yield _schemas(server)
    yield _prompt_scores(server)
    ids = b"[" + b",".join([b"7"] * 2_000_000) + b"]"
    text = words(3_900_000)
    for letter, (attack, path, body) in {
        "A": ("3.9 MB to /tokenize with strings", "/tokenize", _tokenize(text)),
        "B": ("2,000,000 ids to /detokenize", "/detokenize", b'{"tokens":' + ids + b"}"),
        "C": ("2,000,000 ids as a prompt", "/v1/completions", b'{"prompt":' + ids + b"}"),
    }.items():
        yield _one(server, f"V9 {letter}", attack, path, body)


def _tokenize(text: str) -> bytes:
    return json.dumps({"prompt": text, "return_token_strs": True}).encode()


def _one_chat(server: Server) -> Finding:
    body = chat_with_arguments(words(1_000_000))
    attack = "one chat with 1 MB in tool_calls.arguments"
    return _one(server, "V2 A", attack, "/v1/chat/completions", body)


def _one(server: Server, name: str, attack: str, path: str, body: bytes) -> Finding:
    with server.client("mallory") as client, probing(server) as waits:
        began_s = time.monotonic()
        answer = client.post(path, content=body, headers=JSON)
        took_s = time.monotonic() - began_s
    after = (
        f"{answer.status_code} {error_code(answer)} in {took_s:.2f} s; /live "
        f"{1e3 * waits.worst_s:.0f} ms at most"
    )
    return Finding(name, attack, after, {"status": answer.status_code, "live s": waits.worst_s})


class _Victim:
    """A stream of another tenant: its pauses, and how it ends."""

    def __init__(self, server: Server):
        self.gaps_s: list[float] = []
        self.error = ""
        self._server = server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Victim:
        self._thread.start()
        while len(self.gaps_s) < 20:
            time.sleep(0.01)
        self.gaps_s.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(60)

    def _run(self) -> None:
        body = {"prompt": "The sea", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with self._server.client("alice") as client:
            while not self._is_over.is_set() and not self.error:
                self._stream(client, body)

    def _stream(self, client: httpx.Client, body: dict[str, Any]) -> None:
        last_s = time.monotonic()
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if self._is_over.is_set():
                    return
                if '"error"' in line:
                    self.error = line[:160]
                if line.startswith("data: {"):
                    now_s = time.monotonic()
                    self.gaps_s.append(now_s - last_s)
                    last_s = now_s


def _many_chats(server: Server) -> Finding:
    """Sixteen at once, each but for its last byte; then all last bytes."""
    body = chat_with_arguments(words(1_000_000, seed=2))
    with _Victim(server) as victim, probing(server) as waits:
        clients = [_all_but_one_byte(server, body) for _ in range(NUM_AT_ONCE)]
        time.sleep(1.5)
        waits.worst_s = 0.0
        victim.gaps_s.clear()
        began_s = time.monotonic()
        for each in clients:
            each.send(body[-1:])
        statuses = sorted({each.getresponse().status for each in clients})
        took_s = time.monotonic() - began_s
        time.sleep(1.0)
        worst_s = max(victim.gaps_s)
    after = (
        f"answers {statuses} in {took_s:.1f} s; /live {1e3 * waits.worst_s:.0f} ms at most; the "
        f"neighbour's stream {victim.error or 'goes on'}, longest pause {1e3 * worst_s:.0f} ms"
    )
    figures = {"live s": waits.worst_s, "longest pause s": worst_s, "error": victim.error}
    return Finding("V2 B", f"{NUM_AT_ONCE} such chats at once", after, figures)


def _all_but_one_byte(server: Server, body: bytes) -> http.client.HTTPConnection:
    client = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=120)
    client.putrequest("POST", "/v1/chat/completions")
    client.putheader("authorization", f"Bearer {server.keys['mallory']}")
    client.putheader("content-type", "application/json")
    client.putheader("content-length", str(len(body)))
    client.endheaders()
    client.send(body[:-1])
    return client


def _schemas(server: Server) -> Finding:
    """A neighbour's harmless expression behind eight schemas that take all the time there is."""

    def hostile(number: int) -> None:
        schema = {**COSTLY_SCHEMA, "multipleOf": PRIME + 2 * number}
        with server.client("mallory") as client:
            client.post("/v1/completions", json=_constrained({"json": schema}))

    threads = [threading.Thread(target=hostile, args=(number,)) for number in range(8)]
    with server.client("alice") as client:
        client.post("/v1/completions", json=_constrained({"regex": "[0-9]a"}))
        for each in threads:
            each.start()
        time.sleep(0.3)
        began_s = time.monotonic()
        answer = client.post("/v1/completions", json=_constrained({"regex": "[0-9]+"}))
        took_s = time.monotonic() - began_s
    for each in threads:
        each.join(120)
    after = f"{answer.status_code} after {took_s:.2f} s"
    attack = "a harmless regex behind 8 schemas of 80 bytes"
    return Finding("V5 A", attack, after, {"status": answer.status_code, "took s": took_s})


def _constrained(outputs: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "1", "max_tokens": 2, "structured_outputs": outputs}


def _prompt_scores(server: Server) -> Finding:
    """The most alternatives of the longest prompt, in as many prompts as are allowed."""
    body = {
        "prompt": [[(7 * i + j) % 8000 for j in range(2000)] for i in range(15)],
        "max_tokens": 1,
        "prompt_logprobs": 20,
    }
    content = json.dumps(body).encode()
    before, num_bytes = server.rss_mib(), 0
    with (
        server.client("mallory") as client,
        probing(server) as waits,
        client.stream("POST", "/v1/completions", content=content, headers=JSON) as answer,
    ):
        for chunk in answer.iter_raw():
            num_bytes += len(chunk)
    grown = waits.peak_mib - before
    after = f"{answer.status_code}, {num_bytes / MIB:.2f} MiB, RSS {grown:+.0f} MiB"
    figures = {"status": answer.status_code, "bytes": num_bytes, "RSS growth MiB": round(grown, 1)}
    return Finding("V7", "30,000 prompt tokens with 20 alternatives", after, figures)
