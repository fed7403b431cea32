"""Attacks that need no key: heads, silent connections, health watchers, small requests.

V1, V6, V15, V19, V21 of the review.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import httpx

from benchmarks.faults.findings.server import Finding, Server, probing
from benchmarks.faults.watch import MIB

HEAD = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
FLOODS = {
    "V1 A": ("headers of 1 KB without an end", HEAD, (b"x-a: " + b"v" * 1000 + b"\r\n") * 256, 128),
    "V1 B": ("headers of 4 bytes without an end", HEAD, b"a:\r\n" * 65536, 16),
    "V1 C": ("a URL without an end", b"GET /", b"a" * (1 << 18), 48),
}
OPEN_S = 40.0  # longer than a head or a pause in a body may take
NUM_IDLE = 3000
NUM_WATCHERS = 2000
WATCHER = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
channel = grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}")
stub, calls, refused = health_pb2_grpc.HealthStub(channel), [], 0
for _ in range(int(sys.argv[2])):
    call = stub.Watch(health_pb2.HealthCheckRequest())
    try:
        next(call)
        calls.append(call)
    except grpc.RpcError:
        refused += 1
print(len(calls), refused, flush=True)
sys.stdin.readline()
"""


def run(server: Server) -> Iterator[Finding]:
    for name, (attack, head, block, size_mib) in FLOODS.items():
        yield _flood(server, name, attack, head, block, size_mib)
    yield _held_open(server)
    yield _idle(server)
    yield _watchers(server)
    yield _odd_limits(server)
    yield _headers(server)


def _flood(
    server: Server, name: str, attack: str, head: bytes, block: bytes, size_mib: int
) -> Finding:
    """Send a head that does not end, until the server has closed the connection."""
    before, sent, answer = server.rss_mib(), 0, b""
    with (
        probing(server) as waits,
        socket.create_connection(("127.0.0.1", server.http_port)) as client,
    ):
        client.settimeout(20)
        with contextlib.suppress(OSError):
            client.sendall(head)
            while sent < size_mib << 20:
                client.sendall(block)
                sent += len(block)
        with contextlib.suppress(OSError):
            answer = client.recv(200)
        time.sleep(0.5)
    grown = waits.peak_mib - before
    status = answer[9:12].decode() or "closed"
    after = (
        f"{status} after at most {sent / MIB:.1f} MiB were sent, RSS {grown:+.1f} MiB, /live "
        f"{1e3 * waits.worst_s:.0f} ms at most"
    )
    figures = {"sent MiB": round(sent / MIB, 2), "RSS growth MiB": round(grown, 1)}
    return Finding(name, attack, after, {**figures, "status": status, "live s": waits.worst_s})


def _held_open(server: Server) -> Finding:
    """Connections that say nothing, half a head, half a body with a key."""
    key = server.keys["mallory"].encode()
    body = POST + b"authorization: Bearer " + key + b"\r\ncontent-type: application/json\r\n"
    beginnings = {
        "silent": b"",
        "half a head": POST + b"author",
        "half a body": body + b"content-length: 1000\r\n\r\n{",
    }
    sockets = {name: _connections(server, 5, said) for name, said in beginnings.items()}
    time.sleep(OPEN_S)
    still = {name: sum(map(_is_open, each)) for name, each in sockets.items()}
    for each in sockets.values():
        for client in each:
            client.close()
    told = ", ".join(f"{name} {number} of 5" for name, number in still.items())
    return Finding(
        "V6 A", "connections that say nothing or half", f"open after {OPEN_S:.0f} s: {told}", still
    )


def _idle(server: Server) -> Finding:
    """Thousands of idle connections; then a health check."""
    sockets = _connections(server, NUM_IDLE, b"")
    with server.client() as client:
        began_s = time.monotonic()
        status = client.get("/live").status_code
        took_s = time.monotonic() - began_s
    for each in sockets:
        each.close()
    after = f"/live {status} within {1e3 * took_s:.0f} ms beside {NUM_IDLE} idle connections"
    return Finding("V6 B", "descriptors used up", after, {"status": status, "took s": took_s})


def _connections(server: Server, num: int, said: bytes) -> list[socket.socket]:
    made = []
    for _ in range(num):
        made.append(socket.create_connection(("127.0.0.1", server.http_port), timeout=20))
        made[-1].sendall(said)
    return made


def _is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        while said := client.recv(4096):  # an answer, 408 for one, and then the end
            del said
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def _watchers(server: Server) -> Finding:
    """Four clients, each with as many health.Watch as it gets."""
    command = [sys.executable, "-c", WATCHER, str(server.grpc_port), str(NUM_WATCHERS // 4)]
    clients = [_started(command) for _ in range(4)]
    lines = [_line(each) for each in clients]
    before = sum(server.ingress.cpu_times()[:2])
    time.sleep(5.0)
    used = (sum(server.ingress.cpu_times()[:2]) - before) / 5.0
    for each in clients:
        each.kill()
        each.communicate()
    num_open, num_refused = (sum(int(line.split()[i]) for line in lines) for i in (0, 1))
    after = f"{num_open} watch, {num_refused} refused; {100 * used:.0f} % of a core"
    figures = {"watchers": num_open, "refused": num_refused, "cores": round(used, 3)}
    return Finding("V15", f"{NUM_WATCHERS} calls of health.Watch, no key", after, figures)


def _started(command: Sequence[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _odd_limits(server: Server) -> Finding:
    """Numbers whose first digits are small."""
    with server.client("operator") as client:
        made = client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 4})
        paths = (
            f"/v1/responses/{made.json()['id']}/input_items?limit=000000001" + "9" * 5000,
            "/v1/penstock/queue?limit=0000000019999999999",
            "/v1/penstock/queue?limit=000000001" + "9" * 5000,
        )
        statuses = [client.get(path).status_code for path in paths]
    return Finding(
        "V19", "`limit=000000001` and 5,000 digits", f"{statuses}", {"statuses": statuses}
    )


def _headers(server: Server) -> Finding:
    with server.client("operator") as client:
        docs, models = client.get("/docs"), client.get("/v1/models")
    kept = {name: _names(each) for name, each in (("/docs", docs), ("/v1/models", models))}
    after = "; ".join(f"{name}: {', '.join(each) or 'none'}" for name, each in kept.items())
    return Finding("V21", "answers that a page may frame or sniff", after, kept)


def _names(answer: httpx.Response) -> list[str]:
    policy = answer.headers.get("content-security-policy", "")
    found = ["frame-ancestors"] if "frame-ancestors" in policy else []
    return found + [n for n in ("x-frame-options", "x-content-type-options") if n in answer.headers]
