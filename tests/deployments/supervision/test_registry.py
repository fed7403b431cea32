"""The registry's table, with a clock that stands still; its actor is killed in whole_cluster."""

from __future__ import annotations

from dataclasses import replace

from penstock.deployments.supervision.registry import (
    MAX_FAILURES,
    START_EXPIRY_S,
    Registry,
)
from penstock.deployments.supervision.view import EXPIRY_S, IngressInfo, StartingWorker
from penstock.workers.progress import DOWNLOADING, LOADING, WAITING, Progress
from penstock.workers.stats import EngineStats, WorkerInfo


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def worker(epoch: int, address: str = "127.0.0.1:1") -> WorkerInfo:
    return WorkerInfo(address, epoch, token="secret", pid=epoch, model="m", max_model_len=64)


def ingress(name: str, num_workers: int = 0) -> IngressInfo:
    return IngressInfo(name, 1, "127.0.0.1:8000", "127.0.0.1:8001", num_workers)


def test_who_is_silent_is_forgotten_and_who_speaks_again_is_back():
    clock = Clock()
    registry = Registry(clock)
    registry.worker_beat(worker(1), EngineStats(num_running=1))
    registry.ingress_beat(ingress("a"))
    clock.now_s += EXPIRY_S - 0.1
    registry.worker_beat(worker(2), EngineStats())
    assert [info.epoch for info, _ in registry.view().workers] == [1, 2]
    clock.now_s += 0.2
    view = registry.view()
    assert [info.epoch for info, _ in view.workers] == [2]
    assert view.ingresses == ()
    registry.worker_beat(worker(1), EngineStats(num_running=3))
    assert {info.epoch: stats.num_running for info, stats in registry.view().workers} == {
        2: 0,
        1: 3,
    }


def test_a_worker_that_begins_anew_is_another_worker():
    registry = Registry(Clock())
    registry.worker_beat(worker(1), EngineStats())
    registry.worker_left(1)
    registry.worker_left(99)  # never seen: nothing to forget
    registry.worker_beat(worker(2), EngineStats())
    assert [info.epoch for info, _ in registry.view().workers] == [2]


def test_an_ingress_learns_of_the_others_and_of_draining():
    registry = Registry(Clock())
    registry.worker_beat(worker(1), EngineStats())
    view = registry.ingress_beat(ingress("a", num_workers=1))
    assert [info.epoch for info, _ in view.workers] == [1]
    assert view.ingresses == (ingress("a", num_workers=1),)
    assert not view.is_draining
    registry.drain()
    assert registry.ingress_beat(ingress("a")).is_draining
    registry.ingress_left("a")
    assert registry.view().ingresses == ()


def test_failures_are_kept_for_the_operator_and_forgotten_with_the_next_deployment():
    registry = Registry(Clock())
    for number in range(MAX_FAILURES + 5):
        registry.failed(f"failure {number}", "Worker-a" if number < 3 else "Worker-b")
    registry.drain()
    view = registry.view()
    assert view.num_failures == MAX_FAILURES + 5
    assert view.failures[-1] == f"failure {MAX_FAILURES + 4}"
    assert len(view.failures) == MAX_FAILURES
    assert dict(view.failures_of) == {"Worker-a": 3, "Worker-b": MAX_FAILURES + 2}
    registry.begin()
    view = registry.view()
    assert view.failures_of == ()
    assert (view.failures, view.num_failures) == ((), 0)
    assert view.is_draining  # a cluster that stops still stops


def test_a_workers_token_is_in_no_log_line():
    assert "secret" not in repr(worker(1))


def test_a_draining_worker_stays_listed_until_it_has_left_and_no_late_heartbeat_lists_it_again():
    registry = Registry(Clock())
    registry.worker_beat(worker(1), EngineStats())
    draining = replace(worker(1), is_draining=True)
    registry.worker_beat(draining, EngineStats(num_running=2))
    ((info, stats),) = registry.ingress_beat(ingress("a")).workers
    assert info.is_draining and stats.num_running == 2
    registry.worker_left(1)
    registry.worker_beat(draining, EngineStats())  # was under way
    assert registry.view().workers == ()


def test_a_worker_that_starts_is_listed_until_it_serves_or_is_silent():
    clock = Clock()
    registry = Registry(clock)
    assert registry.view().start is None
    loads = StartingWorker("", 1, Progress(LOADING, 30, 100))
    registry.worker_starts(StartingWorker("", 1, Progress(LOADING, 10, 100)))
    registry.worker_starts(loads)
    assert registry.view().starting == (loads,)
    registry.worker_starts(StartingWorker("", 2, Progress(LOADING, 20, 100)))
    assert registry.view().start == Progress(LOADING, 50, 200)
    registry.worker_beat(worker(1), EngineStats())  # its process is 1
    assert registry.view().start == Progress(LOADING, 20, 100)
    registry.worker_start_ended(StartingWorker("", 2, Progress(LOADING, 90, 100)))
    assert registry.view().start is None
    registry.worker_starts(loads)
    clock.now_s += START_EXPIRY_S + 0.1
    assert registry.view().starting == ()


def test_of_workers_in_several_phases_the_earliest_is_told():
    registry = Registry(Clock())
    for pid, progress in enumerate(
        (
            *(Progress(LOADING, 1, 2), Progress(WAITING)),
            *(Progress(DOWNLOADING, 3, 10), Progress(DOWNLOADING, 5, 10)),
        )
    ):
        registry.worker_starts(StartingWorker("node", pid, progress))
    assert registry.view().start == Progress(DOWNLOADING, 8, 20)
    assert str(registry.view().start) == "downloading 40 % (8 bytes of 20 bytes)"
