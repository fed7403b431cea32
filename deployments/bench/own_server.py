"""A `penstock serve` that a benchmark starts for itself, on free ports, and ends."""

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

START_S = 240
LOOK_S = 0.05
PORTS = range(20_000, 32_000)


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
def started(model: str, flags: Sequence[str], source: Path | None = None) -> Iterator[Server]:
    """A `penstock serve` on free ports, once it is ready; ended with the block. `source`: the
    folder with the package penstock to run; None: the one that runs here. Raises RuntimeError, with
    what it printed, for one that does not start."""
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
