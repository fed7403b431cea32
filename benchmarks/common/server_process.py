"""The processes of a `penstock serve` that a benchmark has started: found, and watched.

Linux: processes are read from /proc.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from penstock.deployments.bench.own_server import started
from penstock.deployments.supervision.processes import descendants

TITLES = ("penstock:Ingress", "penstock:Worker")  # in what Ray names the processes


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
