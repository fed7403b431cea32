"""Probes of the metrics port: answered while the event loop stands still, which they then say."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest

from penstock.deployments.ingress.core.request_metrics import RequestMetrics
from penstock.deployments.ingress.metrics.collector import PenstockCollector
from penstock.deployments.ingress.metrics.probes import LATE_S, STUCK_S, Probes
from penstock.deployments.ingress.metrics.server import MetricsServer
from penstock.workers.progress import LOADING, Progress


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_a_loop_that_is_late_is_not_ready_and_one_that_stands_still_is_not_live(clock):
    probes = Probes(lambda: True, clock)
    assert "no worker" in probes.why_not_ready()  # nothing was noted yet
    probes.note()
    assert probes.why_not_ready() == probes.why_not_live() == ""
    clock.now_s += LATE_S + 0.1
    assert "2.1 s late" in probes.why_not_ready()
    assert probes.why_not_live() == ""
    clock.now_s += STUCK_S
    assert "stood still for 32 s" in probes.why_not_live()
    probes.note()
    assert probes.why_not_ready() == probes.why_not_live() == ""


def test_readiness_is_that_of_the_last_note(clock):
    state = [False]
    probes = Probes(lambda: state[0], clock)
    probes.note()
    assert "no worker" in probes.why_not_ready()
    state[0] = True
    assert "no worker" in probes.why_not_ready()
    probes.note()
    assert probes.why_not_ready() == ""


def test_who_is_not_ready_says_how_far_workers_that_start_have_got(clock):
    starts = [Progress(LOADING, 30, 100)]
    probes = Probes(lambda: not starts, clock, lambda: starts[0] if starts else None)
    probes.note()
    assert probes.why_not_ready() == (
        "no worker is ready yet: loading weights 30 % (30 bytes of 100 bytes)"
    )
    starts.clear()
    probes.note()
    assert probes.why_not_ready() == ""


def test_probes_are_answered_while_the_event_loop_is_blocked():
    """The loop sleeps for 3 s; another thread asks meanwhile."""
    seen: list[tuple[str, int, float]] = []

    async def scenario() -> None:
        probes = Probes(lambda: True)
        collector = PenstockCollector(RequestMetrics("m", 9), tuple)
        server = await asyncio.to_thread(MetricsServer, collector, "127.0.0.1", 0, probes)
        noting = asyncio.ensure_future(probes.run())
        await asyncio.sleep(0.2)

        def ask() -> None:
            for after_s, path in ((0.0, "/ready"), (2.5, "/ready"), (0.0, "/live")):
                time.sleep(after_s)
                began_s = time.monotonic()
                status = httpx.get(f"http://{server.address}{path}").status_code
                seen.append((path, status, time.monotonic() - began_s))

        asking = threading.Thread(target=ask)
        asking.start()
        blocked_s = time.monotonic() + 3.0
        while asking.is_alive() or time.monotonic() < blocked_s:
            time.sleep(0.01)  # of the loop's thread
        asking.join()
        noting.cancel()
        await asyncio.to_thread(server.close)

    asyncio.run(scenario())
    assert [(path, status) for path, status, _ in seen] == [
        ("/ready", 200),
        ("/ready", 503),
        ("/live", 200),
    ]


def test_without_probes_the_port_has_metrics_only():
    server = MetricsServer(PenstockCollector(RequestMetrics("m", 9), tuple), "127.0.0.1", 0)
    try:
        assert httpx.get(f"http://{server.address}/ready").status_code == 404
    finally:
        server.close()
