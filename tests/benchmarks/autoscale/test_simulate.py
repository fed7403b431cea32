"""The autoscaling simulator: waits and worker-hours by hand, and each policy's rule."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.autoscale.cluster import JITTER, Run, View
from benchmarks.autoscale.loads import LOADS, SLOTS, Arrivals, arrivals_of
from benchmarks.autoscale.policies import Oracle, ServeDefault, TargetUtilization
from benchmarks.autoscale.simulate import CONFIG, POLICIES, main, run_one
from benchmarks.gate.sim.report import spread


def arrivals(*requests: tuple[float, float], seconds: float = 100.0) -> Arrivals:
    """Of (arrival, worker-seconds) pairs."""
    at, work = np.array(requests).T
    return Arrivals(at, work, work, seconds)


def fixed_at(number: int):
    return lambda view: number


def test_requests_beyond_the_slots_wait_for_the_first_to_end() -> None:
    """A request of half a worker-second holds one of 12 slots for 6 s."""
    work = 6.0 / SLOTS
    run = Run(arrivals(*[(1.0, work)] * (SLOTS + 2)), fixed_at(1), 30.0, 1).run()
    assert run.waits[:SLOTS] == pytest.approx(0.0)
    assert run.waits[SLOTS:] == pytest.approx(6.0)


def test_an_ordered_worker_helps_after_its_start_up_time() -> None:
    run = Run(arrivals(*[(0.5, 30.0)] * (SLOTS + 1), seconds=400.0), fixed_at(2), 60.0, 1).run()
    assert 60.0 * (1 - JITTER) <= run.waits[-1] <= 60.0 * (1 + JITTER) + 2.0


def test_worker_hours_count_from_the_order_to_the_last_request() -> None:
    """One worker all along, and a second one until its request of 10 s has ended."""
    both = [(0.5, 10.0 / SLOTS)] * (SLOTS + 1)
    run = Run(
        arrivals(*both), lambda view: 1 if view.now >= 4.0 else 2, 30.0, 2, settled_s=0.0
    ).run()
    assert run.worker_s == pytest.approx(100.0 + 10.5, abs=1.0)


def test_the_same_seed_gives_the_same_figures() -> None:
    load = arrivals_of(LOADS["bursts"], 3)
    short = Arrivals(load.at[:2000], load.work[:2000], load.expected[:2000], load.at[2000])
    found = [
        run_one(short, POLICIES["penstock"](short, 60.0, CONFIG), 60.0, 3, 300.0) for _ in range(2)
    ]
    assert found[0] == found[1] and found[0]["worker_hours"] > 0


def seen(policy, seconds: int, **values: int) -> int:
    view = View(ready=2)
    for key, value in values.items():
        setattr(view, key, value)
    number = 2
    for now in range(0, seconds, 2):
        view.now = float(now)
        view.starting = max(0, number - view.ready)
        number = policy(view)
    return number


def test_the_default_waits_30_s_before_it_adds_and_600_s_before_it_removes() -> None:
    assert seen(ServeDefault(8.0), 30, num_running=24, num_waiting=16) == 2
    assert seen(ServeDefault(8.0), 34, num_running=24, num_waiting=16) == 5
    assert seen(ServeDefault(8.0), 600, num_running=4) == 2
    assert seen(ServeDefault(8.0), 602, num_running=4) == 1


def test_target_utilization_counts_used_slots_and_not_the_queue() -> None:
    assert seen(TargetUtilization(0.7), 60, num_running=2 * SLOTS, num_waiting=500) == 3
    assert seen(TargetUtilization(0.7), 60, num_running=round(1.4 * SLOTS)) == 2


def test_the_oracle_orders_one_start_up_time_before_the_work_comes() -> None:
    """40 worker-seconds within 5 s, of which none may wait longer than 5 s: 4, and 4.2 at 95 %."""
    load = arrivals(*[(302.0, 1.0)] * 40, seconds=600.0)
    oracle = Oracle(load, start_s=100.0)
    assert oracle(View(now=150.0)) == 1
    assert oracle(View(now=190.0)) == oracle(View(now=300.0)) == 5


def test_a_missing_trace_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--data"):
        main(["--load", "chat", "--data", str(tmp_path)])


def test_the_program_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADS, "step", LOADS["step"].__class__("short", 1200.0, lambda at: 1.0))
    out = tmp_path / "out"
    main(["--load", "step", "--start", "30", "--seeds", "1", "--out", str(out)])
    found = json.loads(out.with_suffix(".json").read_text())["results"]["loads"]["step"]["30"]
    assert set(found) == set(POLICIES)
    assert found["penstock"]["worker_hours"]["mean"] > 0


@pytest.mark.parametrize("load", ["step", "bursts"])
def test_less_of_both_than_the_default(load: str) -> None:
    """Mean waits at p99 and worker-hours of three seeds; workers start in three minutes."""
    runs: dict[str, list[dict[str, float]]] = {"penstock": [], "serve": []}
    for seed in range(3):
        requests = arrivals_of(LOADS[load], seed)
        for name, found in runs.items():
            made = POLICIES[name](requests, 180.0, CONFIG)
            found.append(run_one(requests, made, 180.0, seed, LOADS[load].settled_s))
    ours, theirs = spread(runs["penstock"]), spread(runs["serve"])
    assert ours["wait_p99"]["mean"] < theirs["wait_p99"]["mean"]
    assert ours["worker_hours"]["mean"] < theirs["worker_hours"]["mean"]
