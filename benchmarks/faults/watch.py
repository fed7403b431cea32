"""Watches a live cluster from the side: what its processes hold, and how fast health answers.

The health probe is a process of its own, so that it does not measure the load's own event loop.
"""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import psutil

from benchmarks.faults.cluster import LiveCluster
from benchmarks.faults.figures import Sample

HEALTH_PATHS = ("/health", "/ready", "/live")
PROBE_TIMEOUT_S = 5.0
CLUSTER = "cluster"  # the role of what belongs to no process
MIB = float(1 << 20)


def sample_cluster(cluster: LiveCluster, *, with_blocks: bool = True) -> list[Sample]:
    """One sample of each process, and one of what belongs to none (pid 0, role CLUSTER)."""
    now_s, wall_s, found = time.monotonic(), time.time(), []
    for role, pids in cluster.by_role().items():
        for pid in pids:
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                values = {
                    "rss_mib": process.memory_info().rss / MIB,
                    "cpu_s": sum(process.cpu_times()[:2]),
                    "descriptors": float(process.num_fds()),
                    "threads": float(process.num_threads()),
                }
                age_s = wall_s - process.create_time()
                found.append(Sample(now_s, age_s, role, pid, values))
    shared = {"shm_mib": shm_bytes() / MIB, "shm_files": float(len(os.listdir("/dev/shm")))}
    status = cluster.status() if with_blocks else None
    if status is not None:
        workers = status["workers"]
        shared["live_blocks"] = float(sum(each["num_live_blocks"] for each in workers))
        shared["requests"] = float(sum(w["num_running"] + w["num_waiting"] for w in workers))
    found.append(Sample(now_s, now_s - cluster.started_s, CLUSTER, 0, shared))
    return found


def shm_bytes() -> int:
    """Of /dev/shm as a whole: also files that other programs of the machine have there."""
    total = os.statvfs("/dev/shm")
    return (total.f_blocks - total.f_bfree) * total.f_frsize


def largest(samples: list[Sample], name: str) -> dict[str, float]:
    """By role: the largest sum of a figure over the processes that ran at one time."""
    sums: dict[tuple[str, float], float] = defaultdict(float)
    for sample in samples:
        sums[sample.role, sample.at_s] += sample.values.get(name, 0.0)
    found: dict[str, float] = {}
    for (role, _), value in sums.items():
        found[role] = max(found.get(role, 0.0), value)
    return {role: round(value, 1) for role, value in found.items() if value}


def cores_used(samples: list[Sample]) -> dict[str, float]:
    """By role: seconds of CPU a second, from the first to the last sample of each process."""
    by_process: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        if "cpu_s" in sample.values:
            by_process[sample.role, sample.pid].append(sample)
    used: dict[str, float] = defaultdict(float)
    seconds = max(each.at_s for each in samples) - min(each.at_s for each in samples)
    for (role, _), mine in by_process.items():
        used[role] += (mine[-1].values["cpu_s"] - mine[0].values["cpu_s"]) / seconds
    return {role: round(value, 2) for role, value in used.items() if value >= 0.005}


@dataclass
class Sampler:
    """Samples in a thread, each `every_s`; a context manager."""

    cluster: LiveCluster
    every_s: float
    with_blocks: bool = True
    samples: list[Sample] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.samples += sample_cluster(self.cluster, with_blocks=self.with_blocks)
            self._stop.wait(self.every_s)


@dataclass(frozen=True)
class Probe:
    """One health request. `status` 0: no answer within PROBE_TIMEOUT_S."""

    at_s: float  # of time.monotonic(), which processes of a machine share
    path: str
    status: int
    took_s: float


@contextlib.contextmanager
def health_probe(ports: Mapping[str, int], every_s: float) -> Iterator[list[Probe]]:
    """Ask each health path of each port in turn, each `every_s`; the list is filled when the
    context ends. `ports`: by a prefix that tells their paths apart.

    A kept connection for each path, as a load balancer has; a new one after a failure.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_probe, args=(theirs, dict(ports), every_s), daemon=True)
    process.start()
    ours.recv()
    probes: list[Probe] = []
    try:
        yield probes
    finally:
        ours.send("stop")
        probes += ours.recv()
        process.join(10)


def _probe(pipe: Connection, ports: dict[str, int], every_s: float) -> None:
    pipe.send("ready")
    connections: dict[str, http.client.HTTPConnection] = {}
    probes: list[Probe] = []
    due_s = time.monotonic()
    while not pipe.poll(max(0.0, due_s - time.monotonic())):
        due_s = max(due_s + every_s, time.monotonic())
        for prefix, port in ports.items():
            for path in HEALTH_PATHS:
                probes.append(_ask(connections, prefix, port, path))
    pipe.send(probes)


def _ask(
    connections: dict[str, http.client.HTTPConnection], prefix: str, port: int, path: str
) -> Probe:
    began_s, status = time.monotonic(), 0
    connection = connections.pop(prefix + path, None)
    if connection is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        status = answer.status
        connections[prefix + path] = connection
    except (OSError, http.client.HTTPException):
        connection.close()
    return Probe(began_s, prefix + path, status, time.monotonic() - began_s)
