"""A live server with keys of two tenants and of an operator, and what the attacks measure of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import string
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.faults.cluster import ClusterSetup, LiveCluster, live_cluster
from benchmarks.faults.watch import MIB
from penstock.deployments.security.key_format import new_key
from penstock.deployments.security.records import KeyRecord
from penstock.deployments.security.roles import Role

_CLIENT = (Role.INFER, Role.QUEUE)
ROLES = {
    **dict.fromkeys(("alice", "mallory", "eve", "trudy"), _CLIENT),
    "operator": tuple(Role),
}
PROBE_S = 0.005


@dataclass(frozen=True)
class Finding:
    """What an attack did. after: in words, with `figures`, from which a machine may compare."""

    name: str  # V1 to V22, with a letter where there are several attacks
    attack: str
    after: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Server:
    """keys: by tenant."""

    cluster: LiveCluster
    keys: dict[str, str]

    @property
    def http_port(self) -> int:
        return self.cluster.ports["http"]

    @property
    def grpc_port(self) -> int:
        return self.cluster.ports["grpc"]

    @property
    def ingress(self) -> psutil.Process:
        return psutil.Process(self.cluster.pids("ingress")[0])

    def rss_mib(self) -> float:
        """Of the ingress."""
        return float(self.ingress.memory_info().rss / MIB)

    def client(self, tenant: str | None = None, timeout_s: float = 120.0) -> httpx.Client:
        """None: without a key."""
        headers = {} if tenant is None else {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.Client(base_url=self.cluster.http_url, timeout=timeout_s, headers=headers)


@contextlib.contextmanager
def server_with_keys() -> Iterator[Server]:
    """`penstock serve` with one worker, and the keys of ROLES."""
    keys, lines = {}, []
    for tenant, roles in ROLES.items():
        made = new_key()
        keys[tenant] = made.text
        record = KeyRecord(made.key_id, made.digest, tenant, frozenset(roles))
        lines.append(record.as_line())
    with tempfile.TemporaryDirectory(prefix="pst-") as folder:
        path = Path(folder) / "keys"
        path.write_text("".join(f"{each}\n" for each in lines))
        path.chmod(0o600)
        setup = ClusterSetup(
            num_workers=1,
            num_ingress=1,
            state="none",
            flags=("--api-keys-file", str(path), "--unknown-fields", "refuse"),
            key=keys["operator"],
        )
        with live_cluster(setup) as cluster:
            yield Server(cluster, keys)


@dataclass
class Waits:
    """How long `/live` took at most, in seconds, and the ingress's largest RSS in MiB."""

    worst_s: float = 0.0
    peak_mib: float = 0.0
    num: int = 0


@contextlib.contextmanager
def probing(server: Server) -> Iterator[Waits]:
    """Ask `/live` all the time, on a connection that is kept: what others wait meanwhile."""
    waits, is_over = Waits(), threading.Event()
    process = server.ingress

    def probe() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        while not is_over.is_set():
            began_s = time.monotonic()
            connection.request("GET", "/live")
            connection.getresponse().read()
            waits.worst_s = max(waits.worst_s, time.monotonic() - began_s)
            waits.peak_mib = max(waits.peak_mib, process.memory_info().rss / MIB)
            waits.num += 1
            time.sleep(PROBE_S)
        connection.close()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    while not waits.num:
        time.sleep(PROBE_S)
    waits.worst_s = 0.0
    try:
        yield waits
    finally:
        is_over.set()
        thread.join(60)


def words(num_characters: int, seed: int = 1) -> str:
    """Text of random words: no tokenizer has them in its cache."""
    rng, parts, size = random.Random(seed), [], 0
    while size < num_characters:
        parts.append("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))))
        size += len(parts[-1]) + 1
    return " ".join(parts)[:num_characters]


def chat_with_arguments(text: str) -> bytes:
    """A chat whose text is in the arguments of a tool call, which was in no count once."""
    user = {"role": "user", "content": "x"}
    function = {"name": "f", "arguments": json.dumps({"a": text})}
    call = {"id": "c", "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return json.dumps({"messages": [user, answer, user]}).encode()


def error_code(answer: httpx.Response) -> str:
    """The code of an error answer; empty for none."""
    with contextlib.suppress(ValueError, AttributeError):
        return str((answer.json().get("error") or {}).get("code") or "")
    return ""
