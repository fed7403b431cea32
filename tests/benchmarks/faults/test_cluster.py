"""Processes are found by role, and the guard of random kills lets one of each pair live.

The processes are real, and only their titles are those of a cluster; an HTTP server says what an
ingress would say of it. `python -m benchmarks.faults.random_kills --cluster` is the real thing.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.faults.cluster import TITLES, ClusterSetup, LiveCluster, is_stopped
from benchmarks.faults.cluster_kills import Killer
from penstock.deployments.cli.main import build_parser
from penstock.deployments.supervision.processes import is_running
from tests.deployments.waiting import eventually

ROLES = ("worker", "worker", "ingress", "ingress", "gate", "registry", "controller")


class Status(http.server.BaseHTTPRequestHandler):
    body: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        content = json.dumps(self.body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LiveCluster]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Status)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = [subprocess.Popen([*sleep, TITLES[role]]) for role in ROLES]
    Status.body = reach(2, 2)
    (tmp_path / "serve.log").write_text("")
    yield LiveCluster(
        ClusterSetup(), os.getpid(), {"http": server.server_address[1]}, tmp_path, None, None
    )
    for process in processes:
        process.kill()
        process.wait()
    server.shutdown()
    server.server_close()


def reach(*num_workers: int) -> dict[str, Any]:
    """The status of a cluster whose ingresses are connected with so many workers."""
    return {
        "workers": [{"num_live_blocks": 0}] * 2,
        "ingresses": [{"num_workers": number} for number in num_workers],
    }


def killer(cluster: LiveCluster) -> Killer:
    return Killer(cluster, ("worker",), 1, 60.0, 1.0, 0.0, 0)


def test_processes_are_found_by_role(cluster: LiveCluster) -> None:
    eventually(lambda: not cluster.why_not_whole(), 30.0, "the processes are there")
    found = cluster.by_role()
    assert {role: len(pids) for role, pids in found.items() if pids} == {
        "serve": 1,
        **cluster.setup.expected,
    }
    assert len({pid for pids in found.values() for pid in pids}) == 1 + len(ROLES)


def test_what_is_missing_is_named(cluster: LiveCluster) -> None:
    eventually(lambda: not cluster.why_not_whole(), 30.0, "the processes are there")
    (gate,) = cluster.pids("gate")
    cluster.kill(gate, signal.SIGSTOP)
    eventually(lambda: is_stopped(gate), 10.0)
    cluster.fault_s = time.monotonic()
    assert cluster.why_not_whole().startswith("the last fault was 0.")
    cluster.fault_s = 0.0
    assert cluster.why_not_whole() == f"process {gate} of role gate is stopped"
    cluster.kill(gate)
    eventually(lambda: not is_running(gate), 10.0)
    cluster.fault_s = 0.0
    assert cluster.why_not_whole() == "0 of 1 processes of role gate"
    with pytest.raises(TimeoutError, match="0 of 1 processes of role gate"):
        cluster.await_whole(0.1)


def test_a_worker_dies_only_while_every_ingress_reaches_another_one(cluster: LiveCluster) -> None:
    eventually(lambda: not cluster.why_not_whole(), 30.0, "the processes are there")
    it = killer(cluster)
    assert sorted(it._mortal("worker")) == sorted(cluster.pids("worker"))
    Status.body = reach(2, 1)
    assert not it._mortal("worker")
    Status.body = reach(2)
    assert it._mortal("worker")
    assert not it._mortal("ingress")
    assert it._mortal("gate") == cluster.pids("gate")


def test_after_a_kill_the_guard_waits_until_the_view_can_be_trusted(cluster: LiveCluster) -> None:
    eventually(lambda: not cluster.why_not_whole(), 30.0, "the processes are there")
    it = killer(cluster)
    it._last_s["worker"] = time.monotonic()
    assert not it._mortal("worker")
    assert it._mortal("ingress")


def test_the_command_is_one_that_penstock_understands() -> None:
    ports = {"http": 1, "grpc": 2, "metrics": 3}
    setup = ClusterSetup(model="builtin-moe", expert_cache_gb=0.02, flags=("--drain-s", "3"))
    command = setup.command(ports, "redis://127.0.0.1:4/0")
    given = vars(build_parser().parse_args(command[command.index("serve") :]))
    assert (given["http_port"], given["grpc_port"], given["metrics_port"]) == ("1", "2", "3")
    assert given["num_ingress"] == "2"
    assert given["expert_cache_gb"] == "0.02"
    assert setup.expected["expert-store"] == 1
