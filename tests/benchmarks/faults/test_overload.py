"""The parts of the overload run: its arrivals, what counts as good, and when it has recovered."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest

from benchmarks.faults.figures import Sample
from benchmarks.faults.overload import Phase, about, arrivals, health, recovery_s
from benchmarks.faults.watch import HEALTH_PATHS, PROBE_TIMEOUT_S, health_probe, largest
from penstock.deployments.bench.figures import Chunk, Outcome
from penstock.deployments.bench.load import Job
from tests.deployments.waiting import eventually


def outcome(sent_s: float, ttft_s: float, error: str | None = None) -> Outcome:
    chunks = [] if error else [Chunk(sent_s + ttft_s, 1, 1)]
    return Outcome(
        Job(0.0, 8, 8), sent_s, sent_s + ttft_s + 1.0, chunks=chunks, error=error, held_s=0.0
    )


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(50.0, 60.0, np.random.default_rng(0))
    assert times == sorted(times)
    assert times[0] > 0.0 and times[-1] < 60.0
    assert 2700 < len(times) < 3300
    gaps = np.diff(times)
    assert 0.9 < gaps.std() / gaps.mean() < 1.1


def test_goodput_counts_what_was_in_time() -> None:
    seen = [outcome(0, 0.5), outcome(1, 30.0), outcome(2, 0.1, "429 overloaded"), outcome(9.5, 0.4)]
    found = about(Phase("overload", 1.0, 0.0, 10.0, seen), slo_ttft_s=10.0)
    assert found["goodput a second"] == 0.1  # one is late, one refused, one ended after the phase
    assert found["ends"] == {"whole": 3, "429 overloaded": 1}
    assert found["a refusal took s"]["n"] == 1


def test_recovery_ends_with_the_last_bad_request() -> None:
    good = [outcome(100.0 + n, 0.2) for n in range(30)]
    assert recovery_s(good, 100.0, limit_s=0.5) == 0.0
    slow = [*good, outcome(104.0, 2.0), outcome(106.5, 0.1, "503 no_worker")]
    assert recovery_s(slow, 100.0, limit_s=0.5) == 6.5
    assert recovery_s([*good, outcome(140.0, 2.0)], 100.0, limit_s=0.5) is None  # not measured


def test_the_largest_is_of_processes_of_one_time() -> None:
    samples = [
        Sample(at_s, 1.0, "worker", pid, {"rss_mib": value})
        for at_s, pid, value in ((0.0, 1, 10.0), (0.0, 2, 20.0), (1.0, 2, 25.0))
    ]
    assert largest(samples, "rss_mib") == {"worker": 30.0}


class Slow(http.server.BaseHTTPRequestHandler):
    """/ready says 503, and after 50 ms."""

    protocol_version = "HTTP/1.1"
    num_live: ClassVar[int] = 0  # requests for /live, the last path of a round

    def do_GET(self) -> None:
        Slow.num_live += self.path == "/live"
        if self.path == "/ready":
            time.sleep(0.05)
        self.send_response(503 if self.path == "/ready" else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_health_is_probed_from_another_process(port: int) -> None:
    began_s, num_before = time.monotonic(), Slow.num_live
    with health_probe({"": port}, 0.05) as probes:
        eventually(lambda: Slow.num_live - num_before >= 3)
        assert not probes
    found = health(probes, Phase("calm", 1.0, began_s, time.monotonic(), []))
    assert set(found) == set(HEALTH_PATHS)
    assert set(found["/ready"]["statuses"]) == {503}
    assert set(found["/health"]["statuses"]) == {200}
    assert 50.0 <= found["/ready"]["ms"]["p50"] < 1e3 * PROBE_TIMEOUT_S
    assert found["/live"]["ms"]["n"] >= 3
