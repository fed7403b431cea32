"""Nodes of Ray on this machine, started by the commands of a manifest, and ended by process id."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from penstock.deployments.supervision.processes import descendants, end
from tests.deployments.ports import free_port

ROOT = Path(__file__).parents[3]
# What keeps a node apart from others on this machine, and its process in the foreground.
APART = ("--node-ip-address=127.0.0.1", "--object-store-memory=80000000", "--block")


@dataclass(frozen=True)
class Ports:
    """Free ports, for one cluster."""

    gcs: int = field(default_factory=free_port)
    dashboard: int = field(default_factory=free_port)
    agent: int = field(default_factory=free_port)
    http: int = field(default_factory=free_port)
    grpc: int = field(default_factory=free_port)


@dataclass
class LocalNodes:
    """Commands in shells with `home` as home folder and an environment for this machine."""

    home: Path
    ports: Ports
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            # Compiled kernels: to compile them takes a minute.
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.ports.dashboard}",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }

    def begin(self, command: str, variables: Mapping[str, str] | None = None) -> None:
        """Start a command that lasts; its output is in home/log.N."""
        with open(self.home / f"log.{len(self.processes)}", "w") as output:
            process = subprocess.Popen(
                ["bash", "-c", command],
                env=self.environment | dict(variables or {}),
                cwd=self.home,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)

    def run(self, command: str) -> str:
        """Run a command to its end; what it printed. Fails with that where it fails."""
        answer = subprocess.run(
            ["bash", "-c", command], env=self.environment, capture_output=True, text=True
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout + answer.stderr

    def connect(self) -> None:
        ray.init(address=f"127.0.0.1:{self.ports.gcs}", log_to_driver=False)

    def stop(self) -> None:
        """End the nodes, the last one first, and what they leave running."""
        ray.shutdown()
        left = [each for process in self.processes for each in descendants(process.pid)]
        for process in reversed(self.processes):
            end([process.pid], 10.0)
            process.wait()
        end(left, 2.0)


@contextlib.contextmanager
def local_nodes(home: Path) -> Iterator[LocalNodes]:
    nodes = LocalNodes(home, Ports())
    try:
        yield nodes
    finally:
        nodes.stop()


def alive() -> list[dict[str, float]]:
    """The resources of each living node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def fetch(url: str, key: str | None = None) -> int:
    """The HTTP status of `url`; 0 if nothing listens."""
    try:
        send(url, key)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
    return 200


def send(url: str, key: str | None, body: Any = None, method: str | None = None) -> Any:
    """The answer to a request with a JSON body, read as JSON where it is. Raises OSError."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as response:
        text = response.read()
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text
