"""The simulator: by hand in small cases, conservation, the same again under the same seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gate.sim.events import Simulation
from benchmarks.gate.sim.fit import fit
from benchmarks.gate.sim.loads import GPUS, LOADS, jobs_of
from benchmarks.gate.sim.policies import Gated, Policy, ReserveMax
from benchmarks.gate.sim.report import fair_shares, fairness, jain
from benchmarks.gate.sim.routing import LeastKv, PowerOfTwo, RoundRobin
from benchmarks.gate.sim.worker import (
    MAX_PREEMPTIONS,
    VICTIMS,
    Job,
    SimWorker,
    StepModel,
    WorkerShape,
)
from benchmarks.gate.simulate import POLICIES, run_one
from penstock.deployments.gate.types import GateSettings
from penstock.deployments.prediction.features import Features

SECOND = StepModel(base=1.0, row=0.0, kv=0.0, prefill=0.0)  # every step takes one


def shape(blocks, **changes):
    values: dict[str, Any] = {
        "steps": SECOND,
        "block_size": 4,
        "watermark": 0.0,
        "budget": 64,
    } | changes
    return WorkerShape(num_blocks=blocks, **values)


def job(name, at, prompt, length, max_tokens=64, **changes):
    features = Features("m", prompt_tokens=prompt, max_tokens=max_tokens)
    return Job(name, at, prompt, length, max_tokens=max_tokens, features=features, **changes)


def run(jobs, *shapes, policy=Policy, **changes):
    workers = [SimWorker(i, each) for i, each in enumerate(shapes)]
    simulation = Simulation(policy(workers), workers, jobs, hop_s=0.0, **changes)
    return simulation.run()


def test_one_answer_alone_by_hand():
    """A prefill step, then a token a step: the first at 1 s, the fifth at 5 s."""
    [alone] = jobs = [job("a", 0.0, 10, 5)]
    run(jobs, shape(8))
    assert (alone.first_at, alone.last_at, alone.outcome) == (1.0, 5.0, "done")
    assert alone.longest_gap == 1.0 and alone.num_preemptions == 0


def test_a_step_costs_rows_kv_and_prefill():
    """Steps of 2 + rows + 0.1 KV + 0.5 prefill: 2 + 5 for the prompt, then 3 + 1.1, 3 + 1.2."""
    model = StepModel(base=2.0, row=1.0, kv=0.1, prefill=0.5)
    [alone] = jobs = [job("a", 0.0, 10, 3)]
    run(jobs, shape(8, steps=model))
    assert alone.first_at == pytest.approx(7.0)
    assert alone.last_at == pytest.approx(7.0 + 4.1 + 4.2)
    assert alone.longest_gap == pytest.approx(4.2)


def test_a_prompt_is_cut_into_chunks_beside_those_that_decode():
    """Budget 8: `a` decodes from 1 s on; `b` (20 tokens, since 1.5 s) gets 7, 7 and 6."""
    a, b = jobs = [job("a", 0.0, 4, 10), job("b", 1.5, 20, 2)]
    run(jobs, shape(100, budget=8))
    assert a.last_at == 10.0 and a.longest_gap == 1.0
    assert (b.first_at, b.last_at) == (5.0, 6.0)


def test_the_youngest_is_preempted_and_computed_again():
    """4 blocks of 4 tokens. `a` takes 3 of them; `b` comes at 1 s, has a token at 2 s, finds no
    second block, gives up its own, and computes 5 tokens again when `a` has ended at 5 s."""
    a, b = jobs = [job("a", 0.0, 8, 5), job("b", 0.5, 4, 3)]
    finished = run(jobs, shape(4))
    assert (a.first_at, a.last_at, a.num_preemptions) == (1.0, 5.0, 0)
    assert (b.num_preemptions, b.num_recomputed) == (1, 4)
    assert (b.first_at, b.last_at, b.longest_gap) == (2.0, 7.0, 4.0)
    assert finished.workers[0].num_preemptions == 1 and finished.workers[0].free == 4


def test_leaps_are_steps():
    """Many steps at once end as one by one do."""
    rng = np.random.default_rng(3)
    model = StepModel(0.01, 0.001, 1e-5, 1e-4)

    def drawn():
        at = np.cumsum(rng.exponential(0.3, 40)).tolist()
        return [job(f"r{i}", at[i], int(rng.integers(1, 60)), int(rng.integers(1, 60)))
                for i in range(40)]  # fmt: skip

    whole = drawn()
    rng = np.random.default_rng(3)
    cut = drawn()
    run(whole, shape(40, steps=model))
    worker = StepByStep(0, shape(40, steps=model))
    Simulation(Policy([worker]), [worker], cut, hop_s=0.0).run()
    for one, other in zip(whole, cut):
        assert one.last_at == pytest.approx(other.last_at)
        assert one.longest_gap == pytest.approx(other.longest_gap)
        assert one.num_preemptions == other.num_preemptions
    assert sum(each.num_preemptions for each in whole) > 0


def test_victims_by_hand():
    """`a` is the oldest, `c` has most tokens of the others, `d` is the youngest."""
    a, b, c, d = running = [
        job("a", 0.0, 30, 20),
        job("b", 0.1, 2, 20),
        job("c", 0.2, 6, 20),
        job("d", 0.3, 2, 20),
    ]
    chosen = {}
    for victim in VICTIMS:
        worker = SimWorker(0, shape(12), running=running, victim=victim)
        chosen[victim] = worker._victim().job_id
    assert chosen == {"youngest": "d", "largest": "c"}
    c.num_preemptions = MAX_PREEMPTIONS
    assert SimWorker(0, shape(12), running=running, victim="largest")._victim() is b
    b.num_preemptions = MAX_PREEMPTIONS
    for victim in VICTIMS:
        worker = SimWorker(0, shape(12), running=running, victim=victim)
        assert worker._victim() is d
    assert SimWorker(0, shape(12), running=[a], victim="largest")._victim() is a


def test_routers_choose_by_hand():
    """Worker 0 has one long prompt, worker 1 two short ones, worker 2 none."""

    def chosen(router, num):
        workers = [SimWorker(i, shape(100)) for i in range(3)]
        workers[0].submit(job("long", 0.0, 60, 60), 0.0)
        for name in ("a", "b"):
            workers[1].submit(job(name, 0.0, 4, 60), 0.0)
        if num == 2:
            del workers[2]
        policy = router(workers)
        return [policy.choose(job("new", 1.0, 4, 4)).index for _ in range(6)]

    assert chosen(Policy, 2) == [0] * 6 and chosen(Policy, 3) == [2] * 6
    assert chosen(LeastKv, 2) == [1] * 6 and chosen(LeastKv, 3) == [2] * 6
    assert chosen(RoundRobin, 3) == [1, 2, 0, 1, 2, 0]
    assert chosen(PowerOfTwo, 2) == [0] * 6
    assert 1 not in chosen(PowerOfTwo, 3)  # any other one has fewer requests


def test_a_shared_beginning_is_computed_once_on_a_worker():
    """`b` begins like `a` and computes 4 of its 12 tokens; `c`, begun otherwise, all 12."""
    jobs = [
        job("a", 0.0, 12, 2, prefix=(1,), shared=8),
        job("b", 5.0, 12, 2, prefix=(1,), shared=8),
        job("c", 10.0, 12, 2, prefix=(2,), shared=8),
    ]
    worker = run(jobs, shape(8)).workers[0]
    assert (worker.num_prefilled, worker.num_hit) == (12 + 4 + 12, 8)


def test_cached_beginnings_give_way_to_answers():
    """8 blocks: a prompt of 28 tokens in between leaves no room for the cached two blocks."""
    jobs = [
        job("a", 0.0, 12, 2, prefix=(1,), shared=8),
        job("large", 5.0, 28, 2),
        job("b", 10.0, 12, 2, prefix=(1,), shared=8),
    ]
    worker = run(jobs, shape(8)).workers[0]
    assert (worker.num_prefilled, worker.num_hit) == (12 + 28 + 12, 0)


def test_affinity_sends_a_prompt_where_its_beginning_is():
    source = replace(LOADS["prefixes"].sources[0], kind="reasoning", num_prefixes=8, max_tokens=64)
    load = replace(LOADS["prefixes"], sources=(source,), rate=1.0, num_requests=60)
    hits = {
        policy: run_one(load, GPUS[load.gpu], policy, 0, workers=4)["prefix_hit_pct"]
        for policy in ("predicted", "predicted, no affinity")
    }
    assert hits["predicted"] > hits["predicted, no affinity"] + 5


class StepByStep(SimWorker):
    """Never takes two steps at once."""

    def _leap_steps(self, decode):
        return min(super()._leap_steps(decode), 1)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(sorted(POLICIES)))
def test_each_request_ends_once_and_blocks_suffice(seed, policy):
    """Under every policy no request is lost and no block leaks (the worker asserts its pool)."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(0.2, 30)).tolist()
    jobs = [
        job(
            f"r{i}",
            at[i],
            int(rng.integers(1, 50)),
            int(rng.integers(1, 64)),
            patience=float(rng.choice([2.0, 1e9])),
            ended=str(rng.choice(["stop", "cancel"])),
            tenant=str(rng.integers(3)),
        )
        for i in range(30)
    ]
    workers = [SimWorker(i, shape(36, steps=StepModel(0.02, 0.002, 0, 1e-3))) for i in range(2)]
    rule = POLICIES[policy](workers, GateSettings(longest_wait_s=20.0, num_samples=8), seed)
    Simulation(rule, workers, jobs).run()
    assert all(each.outcome in ("done", "refused", "left") for each in jobs)
    for worker in workers:
        assert worker.free == worker.shape.num_blocks - sum(e.blocks for e in worker.running)
    for each in jobs:
        if each.outcome == "done":
            assert each.generated == each.length and each.arrived < each.first_at <= each.last_at


def test_the_same_seed_is_the_same_run():
    load = replace(LOADS["reasoning"], num_requests=40)
    same = [run_one(load, GPUS[load.gpu], "predicted", 1) for _ in range(2)]
    for each in same:
        each.pop("policy_ms")  # by the clock
    assert same[0] == same[1]
    other = run_one(load, GPUS[load.gpu], "predicted", 2)
    assert other["tokens_s"] != same[0]["tokens_s"]


def crowded(num=40):
    load = replace(LOADS["reasoning"], num_requests=num)
    small = replace(GPUS[load.gpu], num_blocks=600)
    return [each for each in jobs_of(load, 0, Path(), scale=1.0) if each.length < 5000], small


def test_a_policy_that_knows_the_lengths_never_preempts_and_others_do():
    for policy, expected in ((lambda w: Gated(w, oracle=True), 0), (ReserveMax, 0)):
        jobs, small = crowded()
        run(jobs, small, policy=policy)
        assert sum(each.num_preemptions for each in jobs) == expected
        assert all(each.outcome == "done" for each in jobs)
    jobs, small = crowded()
    run(jobs, small)
    assert sum(each.num_preemptions for each in jobs) > 0


def test_the_predictor_gets_lengths_only_when_they_are_over(monkeypatch):
    jobs, small = crowded(20)
    rule = Gated([SimWorker(0, small)])
    observed = []

    def observe(features, length, ended, watch=None):
        observed.append(length)

    monkeypatch.setattr(rule.predictor, "observe", observe)
    for each in jobs:
        rule.arrive(each, each.arrived)
    assert observed == []
    other, _ = crowded(20)
    for each in other:
        each.length += 1000  # the gate decides alike: it has not seen them
    again = Gated([SimWorker(0, small)])
    for each in other:
        again.arrive(each, each.arrived)
    now = jobs[-1].arrived
    assert [j.job_id for j, _ in rule.tick(now)] == [j.job_id for j, _ in again.tick(now)]


def test_coefficients_of_known_steps_are_found():
    rng = np.random.default_rng(0)
    rows = np.column_stack(
        (
            np.ones(400),
            rng.integers(0, 16, 400),
            rng.integers(0, 4000, 400),
            rng.integers(0, 256, 400),
        )
    )
    true = np.array([5e-3, 1e-4, 2e-6, 0.0])
    seconds = rows @ true * rng.normal(1.0, 0.02, 400)
    found = fit(np.column_stack((rows, seconds)))
    assert found.error_p50 < 0.03 and found.error_p99 < 0.08
    assert found.coefficients["base"] == pytest.approx(5e-3, rel=0.02)
    assert found.coefficients["kv"] == pytest.approx(2e-6, rel=0.05)
    assert found.coefficients["prefill"] < 1e-6


def test_jain():
    assert jain([3, 3, 3]) == pytest.approx(1.0)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)


def test_fair_shares():
    demand = {"a": 1.0, "b": 2.0, "loud": 30.0}
    assert fair_shares(demand, 9.0) == {"a": 1.0, "b": 2.0, "loud": 6.0}
    assert fair_shares(demand, 4.5) == {"a": 1.0, "b": 1.75, "loud": 1.75}
    assert fairness({"a": 1.0, "b": 2.0, "loud": 6.0}, demand) == pytest.approx(1.0)  # Jain: 0.66
    assert fairness({"a": 0.0, "b": 0.0, "loud": 9.0}, demand) == pytest.approx(1 / 3)
