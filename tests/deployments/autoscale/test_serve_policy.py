"""The policies as Serve calls them, with a feed that the test fills: no Ray runs here."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve.config import AutoscalingPolicy

from penstock.deployments import app
from penstock.deployments.autoscale import serve_policy
from penstock.deployments.autoscale.feed import Sample
from penstock.deployments.config import ServeConfig
from penstock.deployments.gate.load_meter import GateLoad
from penstock.deployments.supervision.view import ClusterView, ScaleReport

IDLE = GateLoad(1, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, 1000.0)
BUSY = GateLoad(1, 500.0, 0.0, 500.0, 0.0, 200, 4, 3.0, 1000.0)


class Feed:
    """What LoadFeed gives, without its thread."""

    def __init__(self, app_name: str, gate_scope: str | None) -> None:
        self.asks = gate_scope
        self.sample: Sample | None = None
        self.reports: list[ScaleReport] = []

    def latest(self) -> Sample | None:
        return self.sample

    def report(self, report: ScaleReport) -> None:
        self.reports.append(report)


@pytest.fixture(autouse=True)
def feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_policy, "LoadFeed", Feed)
    monkeypatch.setattr(serve_policy, "DECIDE_S", 0.0)


def context(ready: int, target: int, low: int = 1, high: int = 8) -> Any:
    return SimpleNamespace(
        deployment_name="Worker",
        current_num_replicas=ready,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=low,
        capacity_adjusted_max_replicas=high,
    )


def sample(load: GateLoad | None, **of_view: Any) -> Sample:
    return Sample(time.monotonic(), ClusterView(**of_view), load, num_ingress_nodes=2)


def workers(load: GateLoad | None, **policy: Any) -> Any:
    made: Any = serve_policy.WorkerScaling("app", **policy)
    made._feed.sample = sample(load)
    return made


def test_work_that_waits_raises_the_number_and_the_reason_is_reported():
    scaling = workers(BUSY)
    number, state = scaling(context(1, 1))
    assert 1 < number <= 8 and state == {}
    (report,) = scaling._feed.reports
    assert (report.deployment, report.number, report.kind) == ("Worker", number, "up")
    assert "worker-seconds would wait in 30 s" in report.reason
    assert report.reason.endswith("max_workers is 8")


def test_without_figures_the_number_stays():
    for missing in (None, sample(None)):
        scaling = workers(None)
        scaling._feed.sample = missing
        assert scaling(context(2, 3))[0] == 3


def test_no_exception_reaches_serve(caplog):
    scaling = workers(BUSY)
    scaling._decide = lambda *_: 1 // 0
    assert scaling(context(2, 3)) == (3, {})
    assert "the number of replicas stays" in caplog.text


def test_between_two_decisions_the_number_is_the_last(monkeypatch):
    scaling = workers(BUSY)
    number, _ = scaling(context(1, 1))
    monkeypatch.setattr(serve_policy, "DECIDE_S", 60.0)
    scaling._feed.sample = sample(IDLE)
    assert scaling(context(1, number))[0] == number
    assert len(scaling._feed.reports) == 1


def test_failed_starts_of_the_last_ten_minutes_count():
    scaling = workers(IDLE)
    assert [scaling._failed_starts(num, now) for num, now in ((4, 0), (4, 1), (7, 2))] == [0, 0, 3]
    assert scaling._failed_starts(7, 2 + serve_policy.FAILURES_S + 1) == 0
    assert scaling._failed_starts(0, 700) == 0  # a new deployment forgets them


def test_of_several_models_each_asks_its_gate_and_counts_its_own_failed_starts():
    scaling = workers(IDLE, gate_scope="app:a")
    assert (scaling._feed.asks, workers(IDLE)._feed.asks) == ("app:a", "app")
    ingresses: Any = serve_policy.IngressScaling("app")
    assert ingresses._feed.asks is None
    view = ClusterView(num_failures=5, failures_of=(("Worker", 3), ("Worker-b", 2)))
    taken = replace(sample(IDLE), view=view)
    assert scaling._num_failures(context(1, 1), taken) == 3
    assert workers(IDLE)._num_failures(context(1, 1), taken) == 5


def test_a_batch_starts_a_worker_but_no_second_one():
    """1,000 worker-seconds within a day are a hundredth of a worker."""
    scaling = workers(replace(IDLE, batch_work_s=1000.0))
    assert scaling(context(0, 0, low=0))[0] == 1
    assert scaling(context(1, 1, low=0))[0] == 1


def test_ingresses_follow_the_nodes_within_bounds():
    scaling: Any = serve_policy.IngressScaling("app")
    assert scaling(context(1, 1))[0] == 1  # no figures
    scaling._feed.sample = sample(IDLE)
    assert scaling(context(1, 1))[0] == 2
    assert scaling(context(1, 2, high=1))[0] == 1


def test_serve_accepts_the_policies_and_their_arguments():
    config = ServeConfig(num_workers="0:4", num_ingress="1:3", scale_down_after_s=60)
    for options in (app.worker_scale(config), app.ingress_scale(config)):
        policy = options["autoscaling_config"]["policy"]
        made = AutoscalingPolicy(**policy)
        cls = cloudpickle.loads(made.get_serialized_policy_def())
        assert callable(cls(**policy["policy_kwargs"]))
    assert app.worker_scale(ServeConfig(num_workers=3)) == {"num_replicas": 3}


@pytest.mark.parametrize(
    ("settings", "target_s"),
    [({}, app.TARGET_WAIT_S), ({"longest_wait_s": 9.0}, 9.0), ({"target_wait_s": 2.0}, 2.0)],
)
def test_the_wait_that_is_aimed_at(settings, target_s):
    assert app.target_wait_s(ServeConfig(**settings)) == target_s
