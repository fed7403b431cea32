"""A `penstock serve` of its own for a benchmark: started on free ports, found, watched, ended.

Linux: processes are read from /proc.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from penstock.deployments.supervision.processes import descendants

START_S = 240
LOOK_S = 0.05
PORTS = range(20_000, 32_000)
TITLES = ("penstock:Ingress", "penstock:Worker")  # in what Ray names the processes


@dataclass(frozen=True)
class Server:
    """A running `penstock serve`."""

    pid: int
    folder: Path  # its temporary files, among them Ray's logs
    ports: tuple[int, int]  # HTTP, gRPC

    def output(self) -> str:
        """What it has printed so far."""
        return _log(self.folder).read_text()


@contextlib.contextmanager
def served(
    model: str, flags: Sequence[str], source: Path | None = None
) -> Iterator[tuple[dict[str, str], list[int]]]:
    """A `penstock serve` on free ports: its addresses by path, and the pids of TITLES.

    source: the folder with the package penstock to run; None: the one that runs here.
    """
    with started(model, flags, source) as server:
        urls = {
            "HTTP, SSE": f"http://127.0.0.1:{server.ports[0]}",
            "gRPC": f"grpc://127.0.0.1:{server.ports[1]}",
        }
        yield urls, [_find(server.pid, title) for title in TITLES]


@contextlib.contextmanager
def started(model: str, flags: Sequence[str], source: Path | None = None) -> Iterator[Server]:
    """A `penstock serve` on free ports, once it is ready; ended with the block. `source`: as for
    `served`. Raises RuntimeError, with what it printed, for one that does not start."""
    ports = [free_port() for _ in range(3)]
    names = ("--http-port", "--grpc-port", "--metrics-port")
    command = [sys.executable, "-m", "penstock.deployments.cli", "serve", model, *flags]
    command += [part for name, port in zip(names, ports) for part in (name, str(port))]
    with tempfile.TemporaryDirectory(prefix="pst-", dir="/tmp") as name:
        folder = Path(name)
        # The gate of each run begins with nothing learnt.
        env = {**os.environ, "TMPDIR": name, "XDG_STATE_HOME": name}
        if source is not None:
            env["PYTHONPATH"] = str(source.absolute())
        with _log(folder).open("wb") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                cwd=folder,  # not a checkout: `penstock` is what PYTHONPATH has
                env=env,
                process_group=0,
            )
        server = Server(process.pid, folder, (ports[0], ports[1]))
        before = signal.signal(signal.SIGTERM, _end)  # or the server would outlive the benchmark
        try:
            deadline_s = time.monotonic() + START_S
            while "ready after" not in server.output():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"the server did not start:\n{server.output()}")
                time.sleep(LOOK_S)
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
            signal.signal(signal.SIGTERM, before)


def _log(folder: Path) -> Path:
    return folder / "serve.log"


def _end(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


def free_port() -> int:
    """Not one that the system hands out while the cluster starts, as all from 32768 on may be."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError(f"none of 100 ports in {PORTS} was free")


def _find(pid: int, title: str) -> int:
    for each in descendants(pid):
        if title in " ".join(psutil.Process(each).cmdline()):
            return each
    raise RuntimeError(f"no process named {title} runs below {pid}")


def cpu_s(pid: int) -> float:
    """CPU seconds that the live threads of a process have used, user and system, to the ns."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9
