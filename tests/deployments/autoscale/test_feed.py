"""The thread of a LoadFeed; no Ray runs here."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from penstock.deployments.autoscale import feed
from penstock.deployments.supervision.view import ClusterView, ScaleReport
from tests.deployments.waiting import eventually


class Registry:
    """What RegistryClient gives, and the reports that it was sent."""

    def __init__(self, _: str) -> None:
        self.reports: list[ScaleReport] = []
        self.num_turns = 0

    def call_now(self, _: str, reports: list[ScaleReport]) -> ClusterView:
        self.num_turns += 1
        self.reports += reports
        if self.num_turns == 1:
            raise TimeoutError
        return ClusterView()


def num_threads() -> int:
    return sum(each.name == "penstock-load" for each in threading.enumerate())


def use_feed() -> None:
    """Read a sample and report a decision; nothing refers to the feed when this returns."""
    made: Any = feed.LoadFeed("app", "app")
    eventually(lambda: made.latest() is not None)
    sample, registry = made.latest(), made._registry
    assert sample.num_ingress_nodes == 3
    assert registry.num_turns >= 2
    report = ScaleReport("Worker", 2, 1, 1, 8, "up", "work waits", 0.0)
    made.report(report)
    eventually(lambda: registry.reports == [report])


def test_the_thread_outlives_a_failed_turn_and_ends_with_the_feed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed, "RegistryClient", Registry)
    monkeypatch.setattr(feed, "INTERVAL_S", 0.01)
    monkeypatch.setattr(feed.LoadFeed, "_load", lambda _: None)
    monkeypatch.setattr(feed, "_num_ingress_nodes", lambda: 3)
    before = num_threads()
    use_feed()
    gc.collect()
    eventually(lambda: num_threads() == before)
