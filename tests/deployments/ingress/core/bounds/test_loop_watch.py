"""The watch of the event loop: how late it was, what held it up, and heartbeats meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from penstock.deployments.ingress.core.bounds.loop_watch import GIVE_UP_S, LATE_S, NOTE_S, LoopWatch
from tests.deployments.waiting import undisturbed


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def a_slow_function() -> None:
    time.sleep(2.2)


def test_a_blocked_loop_is_named_and_heartbeats_go_on(caplog: pytest.LogCaptureFixture) -> None:
    undisturbed(lambda: watch_a_blocked_loop(caplog), 0.25)


def watch_a_blocked_loop(caplog: pytest.LogCaptureFixture) -> None:
    beats: list[float] = []
    caplog.clear()

    async def scenario() -> LoopWatch:
        watch = LoopWatch(lambda: beats.append(time.monotonic()))
        task = asyncio.ensure_future(watch.run())
        await asyncio.sleep(0.7)
        assert not beats  # a loop that turns sends its own
        a_slow_function()
        await asyncio.sleep(0.3)
        task.cancel()
        return watch

    with caplog.at_level(logging.WARNING, "penstock.ingress"):
        watch = asyncio.run(scenario())
    assert 2 <= len(beats) <= 5
    assert "a_slow_function (test_loop_watch.py:" in caplog.text
    assert sum(watch.lags().counts) >= 5 and watch.lags().total > 1.9
    assert watch.lags().counts[watch.lags().bounds.index(2.5)] == 1


def test_heartbeats_are_sent_only_while_a_late_loop_may_come_back() -> None:
    beats: list[float] = []
    clock = Clock()
    watch = LoopWatch(lambda: beats.append(clock()), clock)
    for late_s, is_sent in (
        (LATE_S / 2, False),
        (LATE_S + 0.1, True),
        (GIVE_UP_S - 1, True),
        (GIVE_UP_S + 1, False),
    ):
        beats.clear()
        watch.note()
        clock.now_s += NOTE_S + late_s
        watch.look()
        assert bool(beats) == is_sent
        assert watch.lag_s() == pytest.approx(late_s)


def test_a_heartbeat_that_fails_does_not_end_the_watch() -> None:
    def fails() -> None:
        raise RuntimeError("no")

    clock = Clock()
    watch = LoopWatch(fails, clock)
    clock.now_s += 2
    watch.look()
    watch.look()
    assert watch.num_beats == 2
