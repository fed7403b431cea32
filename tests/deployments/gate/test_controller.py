"""The gate, driven through whole lives of requests, against brute force and its promises."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployments.gate.controller import Gate
from penstock.deployments.gate.forecast.sampled import UNBOUNDED
from penstock.deployments.gate.types import (
    LOWEST_PRIORITY,
    Expiry,
    GateRequest,
    GateSettings,
    QueueSettings,
    Refusal,
    Report,
    Running,
    Ticket,
    WorkerSpec,
)
from penstock.deployments.prediction.distribution import (
    NUM_BINS,
    LengthDistribution,
    cumulative_hazard,
)
from tests.deployments.gate.forecast.test_sampled import quantile

HAZARDS = cumulative_hazard(np.full(NUM_BINS, 0.2))


def distribution(max_tokens=40, min_tokens=0):
    return LengthDistribution(HAZARDS, max_tokens, min_tokens=min_tokens)


def certain(length):
    """The distribution of an answer whose length is known."""
    return distribution(length, min_tokens=length)


def ask(name, prompt=10, **changes):
    return GateRequest(name, prompt, **changes)


def gate_with(*capacities, block_size=1, slots=64, seed=0, queue=None, **changes):
    values = {"num_samples": 8, "lease_s": 2.0, **changes}
    gate = Gate(GateSettings(queue=QueueSettings(**(queue or {})), **values), seed=seed)
    for i, capacity in enumerate(capacities):
        gate.add_worker(WorkerSpec(f"w{i}", 1, capacity, block_size, slots))
    return gate


class World:
    """Workers that run what the gate admits, a token a second, and the outcome of each request."""

    def __init__(self, gate, seed):
        self.gate, self.rng = gate, random.Random(seed)
        self.running = {}  # request -> [worker, tokens out, true length]
        self.ends = {}
        self.offered = 0
        self.log = []
        self.sequence = 0

    def end(self, name, how):
        assert name not in self.ends, (name, how, self.ends[name])
        self.ends[name] = how

    def offer(self, now):
        rng = self.rng
        name = f"r{self.offered}"
        self.offered += 1
        request = ask(
            name,
            rng.randint(1, 60),
            tenant=rng.choice("abc"),
            priority=rng.choice((0, 0, 1)),
            deadline=rng.choice((None, now + rng.randint(1, 40))),
            ceiling=rng.choice((None, None, 24)),
        )
        refusal = self.gate.offer(request, distribution(rng.choice((10, 40, 90))), now)
        if refusal is not None:
            self.note(refusal)

    def note(self, outcome):
        self.log.append(outcome)
        if isinstance(outcome, Refusal):
            assert outcome.retry_after_s is None or outcome.retry_after_s >= 0.0
            self.end(outcome.request_id, "refused")
        elif isinstance(outcome, Expiry):
            self.end(outcome.request_id, "expired")

    def take(self, ticket, now):
        name = ticket.request_id
        fate = self.rng.random()
        if fate < 0.1:
            rows = [Running(n, t) for n, (w, t, _) in self.running.items() if w == ticket.worker]
            assert self.gate.declined(name, now)
            if fate < 0.05:  # the worker had listed it, in a report that was slower
                self.sequence += 1
                epoch = self.gate.ledgers[ticket.worker].spec.epoch
                late = Report(epoch, self.sequence, (*rows, Running(name, 0)), 1.0)
                self.gate.report(ticket.worker, late, now)
            return
        self.end(name, "admitted")
        if fate > 0.15:  # else the ingress lost it
            self.gate.started(name, now)
            limit = self.gate.running[name].entry.demand.length.max_tokens
            self.running[name] = [ticket.worker, 0, self.rng.randint(1, limit)]

    def step(self, now):
        """A second passes; some workers say what they run."""
        for name, each in list(self.running.items()):
            each[1] += 1
            if each[1] == each[2]:
                del self.running[name]
                self.gate.finished(name, each[2], now)
        for worker, ledger in self.gate.ledgers.items():
            if self.rng.random() < 0.5:
                continue
            self.sequence += 1
            rows = [Running(n, t) for n, (w, t, _) in self.running.items() if w == worker]
            report = Report(ledger.spec.epoch, self.sequence, tuple(rows), 1.0)
            self.gate.report(worker, report, now)
        if self.offered and self.rng.random() < 0.1:
            name = f"r{self.rng.randrange(self.offered)}"
            if self.gate.cancel(name, now):
                self.end(name, "cancelled")


def held_by(gate, now):
    """(used, futures, ceiling) of all on each worker, one sample at a time."""
    held = {}
    for name, ledger in gate.ledgers.items():
        held[name] = [
            future_of(each.demand, int(count), ledger.spec.block_size)
            for each, count in zip(ledger._held.values(), ledger.generated(now))
        ]
    return held


def future_of(demand, generated, block_size):
    distribution = demand.length.given(generated)
    ends = [max(distribution.sample(float(u)) - generated, 1) for u in demand.uniforms]
    ceiling = UNBOUNDED if demand.ceiling is None else demand.ceiling
    return min(demand.prompt_tokens + generated + block_size - 1, ceiling), ends, ceiling


def walked_all(answers):
    """Peaks of all futures of (used, ends, ceiling), by what is held at each step."""
    used, ends, ceilings = (np.array(column) for column in zip(*answers))
    peaks = np.zeros(ends.shape[1], np.int64)
    for step in range(int(ends.max()) + 1):
        held = np.maximum(used, np.minimum(used + step, ceilings))
        peaks = np.maximum(peaks, ((step <= ends) * held[:, None]).sum(axis=0))
    return peaks.tolist()


def check_tickets(gate, held, tickets, level):
    """Each ticket by the rule: the quantile of walked peaks is within the limit, or it is alone."""
    for ticket in tickets:
        ledger = gate.ledgers[ticket.worker]
        demand = gate.running[ticket.request_id].entry.demand
        there = held[ticket.worker]
        new = future_of(demand, 0, ledger.spec.block_size)
        assert demand.longest(ledger.spec.block_size) <= ledger.spec.capacity
        assert len(there) < ledger.spec.slots
        if there:
            peaks = walked_all([*there, new])
            limit = int((1 - ledger.headroom.share) * ledger.spec.capacity)
            assert quantile(peaks, level) <= limit
        there.append(new)


def drive(seed, seconds=40, **changes):
    queue = {"max_waiting": 12, "max_wait_s": 15.0}
    gate = gate_with(200, 120, block_size=4, slots=6, seed=seed, queue=queue, **changes)
    gate.ledgers["w1"].headroom.share = 0.1
    world = World(gate, seed)
    for second in range(seconds):
        now = float(second)
        for _ in range(world.rng.choice((0, 1, 1, 2, 6)) if second < seconds // 2 else 0):
            world.offer(now)
        outcomes = gate_tick(gate, now)
        for outcome in outcomes:
            world.note(outcome)
        for outcome in outcomes:
            if isinstance(outcome, Ticket):
                world.take(outcome, now)
        if second % 5 == 0:
            gate.explain(now)
        world.step(now + 0.5)
    return gate, world


def gate_tick(gate, now):
    held = held_by(gate, now)
    for name, ledger in gate.ledgers.items():
        # Leases that run out now are not seen by the rule any more.
        keep = [
            not (e.lease_until is not None and e.lease_until <= now) for e in ledger._held.values()
        ]
        held[name] = [each for each, kept in zip(held[name], keep) if kept]
    overlong = gate.queue.overlong(now, gate.settings.longest_wait_s)
    staying = [e for e in gate.queue._waiting.values() if e not in overlong]
    came = [e.arrived for e in staying if (e.deadline or math.inf) > now]
    pressure = copy.copy(gate._admission.pressure)
    if any(each.deadline is None for each in overlong):  # they are refused before others come in
        pressure.refused(now)
    level = gate.settings.level_after(pressure.after(now - min(came, default=now), now))
    outcomes = gate.tick(now)
    check_tickets(gate, held, [each for each in outcomes if isinstance(each, Ticket)], level)
    return outcomes


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([math.inf, 6.0]))
def test_lives(seed, longest_wait_s):
    """No request is admitted against the rule, and each ends in exactly one way."""
    gate, world = drive(seed, longest_wait_s=longest_wait_s)
    for second in range(40, 400):  # no more come: all leave
        for outcome in gate_tick(gate, float(second)):
            world.note(outcome)
            if isinstance(outcome, Ticket):
                world.take(outcome, float(second))
        world.step(second + 0.5)
        if not len(gate.queue) and not world.running:
            break
    assert len(gate.queue) == 0 and not world.running
    assert sorted(world.ends) == sorted(f"r{i}" for i in range(world.offered))


def test_lives_are_various():
    """The drive above means something: every end occurs, and so do full workers."""
    ends: Counter = Counter()
    for seed in range(4):
        _, world = drive(seed)
        ends.update(world.ends.values())
        ends.update(each.reason for each in world.log if isinstance(each, Refusal))
    assert {"admitted", "refused", "expired", "cancelled"} <= set(ends)
    assert {"queue_full", "displaced", "too_long"} <= set(ends)


def test_the_same_again_under_the_same_seed():
    assert drive(5)[1].log == drive(5)[1].log
    assert drive(5)[1].log != drive(6)[1].log


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6),
    st.tuples(st.integers(30, 60), st.integers(1, 20)),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=12),
)
def test_backfilled_requests_do_not_delay_the_first(there, first, others):
    """With known lengths the first goes in no later than was foretold before anybody passed."""
    gate = gate_with(90)
    lives = {}

    def tick(now):
        names = [each.request_id for each in gate.tick(now)]
        for name in names:
            gate.started(name, now)
            lives[name][0] = now
        return names

    def offer(name, pair, priority, now):
        lives[name] = [None, pair[1]]
        gate.offer(ask(name, pair[0], priority=priority), certain(pair[1]), now)

    for i, pair in enumerate(there):
        offer(f"there{i}", pair, 2, 0.0)
    tick(0.0)
    for i in range(len(there)):
        gate.cancel(f"there{i}", 0.0)
    gate.report("w0", Report(1, 0, listed(lives, 0.0), 1.0), 0.0)
    offer("first", first, 1, 0.0)
    [why] = gate.explain(0.0)
    for i, pair in enumerate(others):
        offer(f"other{i}", pair, 0, 0.0)
    for second in range(200):
        now = float(second)
        for name, (since, length) in list(lives.items()):
            if since is not None and now - since >= length:
                gate.finished(name, length, now)
                del lives[name]
        gate.report("w0", Report(1, second + 1, listed(lives, now), 1.0), now)
        if "first" in tick(now):
            assert now <= why.expected_s
            return
    pytest.fail("the first was never admitted")


def listed(lives, now):
    return tuple(
        Running(name, int(now - since)) for name, (since, _) in lives.items() if since is not None
    )


def test_small_requests_overtake_a_large_one_but_not_for_ever():
    gate = gate_with(100, max_backfills=3)
    gate.offer(ask("old", 50), certain(40), 0.0)
    assert [t.request_id for t in gate.tick(0.0)] == ["old"]
    gate.offer(ask("big", 60, priority=1), certain(30), 0.0)
    for i in range(9):
        gate.offer(ask(f"s{i}", 1), certain(1), 0.0)
    passed = [t.request_id for t in gate.tick(0.0)]
    assert passed == ["s0", "s1", "s2"]
    for name in passed:
        gate.finished(name, 1, 1.0)
    assert gate.tick(1.0) == []
    why = gate.explain(1.0)
    assert (why[0].request_id, why[0].reason, why[0].worker) == ("big", "memory", "w0")
    assert why[0].peak == 50 + 60 + 2 * 30 and why[0].limit == 100
    assert why[0].expected_s == pytest.approx(40 * 0.03)
    assert [w.reason for w in why[1:]] == ["behind"] * 6
    assert all(a.expected_s <= b.expected_s for a, b in pairwise(why))
    gate.finished("old", 40, 2.0)
    assert gate.tick(2.0)[0].request_id == "big"


def test_more_requests_overtake_where_there_are_more_workers():
    gate = gate_with(100, 100, max_backfills=3)
    for name in ("a", "b"):
        gate.offer(ask(name, 50), certain(40), 0.0)
    assert len(gate.tick(0.0)) == 2
    gate.offer(ask("big", 60, priority=1), certain(30), 0.0)
    for i in range(9):
        gate.offer(ask(f"s{i}", 1), certain(1), 0.0)
    assert [t.request_id for t in gate.tick(0.0)] == [f"s{i}" for i in range(6)]


def test_no_request_overtakes_an_overdue_one():
    gate = gate_with(100, queue={"max_wait_s": 5.0})
    gate.offer(ask("old", 50), certain(40), 0.0)
    gate.tick(0.0)
    gate.started("old", 0.0)
    gate.offer(ask("big", 60), certain(30), 0.0)
    gate.offer(ask("s", 1, priority=9), certain(1), 4.0)
    assert [t.request_id for t in gate.tick(4.0)] == ["s"]
    gate.offer(ask("late", 1), certain(1), 5.0)
    assert gate.tick(5.0) == []


def test_while_a_request_waits_more_is_risked():
    """In tenths: rooms are made anew for each level."""
    settings = GateSettings(level=0.9, pressed_level=0.6, pressed_s=10.0)
    waits = (0.0, 0.9, 1.0, 5.5, 10.0, 99.0)
    levels = [settings.level_after(wait) for wait in waits]
    assert levels == pytest.approx([0.9, 0.9, 0.87, 0.75, 0.6, 0.6])
    assert GateSettings(level=0.3).level_after(99.0) == 0.3  # never more than in quiet times

    def admitted_at(pressed_level):
        """When a prompt of 50 is admitted next to answers that may be long."""
        gate = gate_with(100, level=1.0, pressed_level=pressed_level, num_samples=32)
        for name in ("a", "b"):
            gate.offer(ask(name, prompt=18), distribution(), 0.0)
        assert len(gate.tick(0.0)) == 2
        for name in ("a", "b"):
            gate.started(name, 0.0)
        gate.offer(ask("c", prompt=50), distribution(), 1.0)
        return next((now for now in range(1, 60) if gate.tick(float(now))), None)

    assert (admitted_at(0.3), admitted_at(1.0)) == (3, None)
    assert gate_with(100).queue.longest_wait(7.5) == 0.0


def test_no_starvation():
    """A stream of short and important requests, for ever more than fits: the big one gets in."""
    gate = gate_with(100, queue={"max_wait_s": 20.0})
    gate.offer(ask("big", 80, tenant="b"), certain(20), 0.0)
    lives, number = {}, 0
    for second in range(300):
        now = float(second)
        for name in [n for n, since in lives.items() if now - since >= 10]:
            del lives[name]
            gate.finished(name, 10, now)
        for _ in range(3):
            number += 1
            gate.offer(ask(f"s{number}", 10, tenant="s", priority=1), certain(10), now)
        tickets = [t for t in gate.tick(now) if isinstance(t, Ticket)]
        for ticket in tickets:
            gate.started(ticket.request_id, now)
            lives[ticket.request_id] = now
        if "big" in lives:
            assert 20 <= now <= 60
            return
    pytest.fail("the big one starved")


def test_a_flood_leaves_other_tenants_their_share():
    """One tenant with everything waiting at once; another asks for less than half, and gets it."""
    gate = gate_with(100, queue={"max_waiting": 1000})
    for i in range(300):
        gate.offer(ask(f"flood{i}", 10, tenant="flood"), certain(10), 0.0)
    served: Counter = Counter()
    lives = {}
    for second in range(200):
        now = float(second)
        for name in [n for n, since in lives.items() if now - since >= 10]:
            del lives[name]
            gate.finished(name, 10, now)
        if second % 5 == 0:
            gate.offer(ask(f"calm{second}", 10, tenant="calm"), certain(10), now)
        for ticket in gate.tick(now):
            gate.started(ticket.request_id, now)
            lives[ticket.request_id] = now
            tenant = "calm" if ticket.request_id.startswith("calm") else "flood"
            served[tenant] += 1
            if tenant == "calm":
                assert ticket.waited_s <= 10.0  # in one generation of answers
    assert served["calm"] >= 38 and served["flood"] > served["calm"]


def test_retry_after_rises_with_the_queue():
    gate = gate_with(200, longest_wait_s=0.5)
    patient = gate_with(200, queue={"max_waiting": 10_000})
    gate.queue = gate._admission.queue = patient.queue
    quoted_s = []
    number = 0
    for _ in range(30):
        refusal = gate.offer(ask("probe", 20), distribution(40), 0.0)
        if refusal is None:
            assert not quoted_s  # once too long, always too long
            gate.cancel("probe", 0.0)
        else:
            assert refusal.reason == "too_long" and "the predicted wait is" in refusal.message
            quoted_s.append(refusal.retry_after_s)
        for _ in range(20):  # others are let in by a more patient gate
            number += 1
            patient.offer(ask(f"x{number}", 20), distribution(40), 0.0)
    assert len(quoted_s) > 15 and quoted_s == sorted(quoted_s) and quoted_s[0] > 0.0
    assert quoted_s[-1] > 3 * quoted_s[0]


def test_what_has_waited_longer_than_it_may_is_refused():
    """Its wait was predicted too short: the answer before it is longer than any known one."""
    gate = gate_with(100, longest_wait_s=5.0)
    gate.offer(ask("long", 60), distribution(40), 0.0)
    assert [each.request_id for each in gate.tick(0.0)] == ["long"]
    gate.started("long", 0.0)
    gate.offer(ask("new", 60), distribution(40), 1.0)
    gate.offer(ask("back", 60, generated=1), distribution(40), 1.0)  # a client reads its answer
    gate.offer(ask("batch", 60, priority=LOWEST_PRIORITY), distribution(40), 1.0)
    factor = gate._admission.wait_factor
    assert gate.tick(6.0) == []
    (refusal,) = gate.tick(6.5)
    assert isinstance(refusal, Refusal) and refusal.request_id == "new"
    assert refusal.reason == "too_long" and "it has waited 5.5 s, the limit is 5.0 s" in str(
        refusal
    )
    assert refusal.retry_after_s is not None and refusal.retry_after_s > 0.0
    assert "new" not in gate.queue and len(gate.queue) == 2
    assert gate._admission.wait_factor >= factor  # the next prediction is no shorter
    assert gate.tick(600.0) == []
    gate.finished("long", 1, 601.0)
    assert [each.request_id for each in gate.tick(601.0)] == ["back"]


def test_never_fits():
    gate = gate_with(64, 100, block_size=16)
    refusal = gate.offer(ask("a", 60), distribution(40), 0.0)
    assert refusal is not None and refusal.reason == "never_fits"
    assert refusal.retry_after_s is None and "prompt_tokens (60)" in refusal.message
    assert gate.offer(ask("b", 56), distribution(40), 0.0) is None  # 96 in whole blocks
    assert gate.offer(ask("c", 500, ceiling=32), distribution(4000), 0.0) is None  # its cache rolls
    assert {t.request_id: t.worker for t in gate.tick(0.0)} == {"b": "w1", "c": "w0"}
    gate.offer(ask("d", 56), distribution(40), 0.0)
    assert gate.remove_worker("w1") == ["b"]
    [out] = gate.tick(0.0)
    assert (out.request_id, out.reason) == ("d", "never_fits")


def test_no_worker_yet():
    gate = gate_with()
    assert gate.offer(ask("a"), distribution(), 0.0) is None
    assert gate.tick(0.0) == [] and gate.explain(0.0)[0].reason == "no_worker"
    gate.add_worker(WorkerSpec("w", 1, 100))
    assert [t.worker for t in gate.tick(1.0)] == ["w"]
    assert gate.add_worker(WorkerSpec("w", 1, 100)) == []  # the same life
    assert gate.add_worker(WorkerSpec("w", 2, 100)) == ["a"]


def test_a_veto_sends_it_back_to_the_front():
    gate = gate_with(100, 90)
    gate.offer(ask("a"), certain(10), 0.0)
    [ticket] = gate.tick(0.0)
    assert ticket.worker == "w0" and ticket.lease_until == 2.0
    served = gate.queue.counters[""]
    assert served == 10 + 2 * 10
    assert gate.declined("a", 0.1) and not gate.declined("a", 0.1)
    assert gate.queue.counters[""] == 0.0 and len(gate.ledgers["w0"]) == 0
    gate.offer(ask("b", priority=0, deadline=9.0), certain(1), 0.1)
    first, second = gate.tick(0.2)
    assert (first.request_id, first.worker, second.worker) == ("a", "w1", "w1")
    gate.report("w0", Report(1, 1, (), 0.03), 0.3)
    gate.offer(ask("c"), certain(10), 0.4)
    assert gate.tick(0.4)[0].worker == "w0"


def test_a_late_report_of_one_that_came_back_neither_holds_room_nor_stops_the_gate():
    gate = gate_with(100)
    gate.offer(ask("a"), certain(10), 0.0)
    gate.tick(0.0)
    assert gate.declined("a", 0.1)
    late = Report(1, 1, (Running("a", 0, 10, 10),), 0.03)
    gate.report("w0", late, 0.2)
    assert len(gate.ledgers["w0"]) == 0 and "a" not in gate.running
    [ticket] = gate.tick(0.3)
    assert ticket.request_id == "a"


def test_one_that_a_worker_runs_already_is_granted_once():
    """It waits here, and a worker says that it has it: its ingress went past the gate."""
    gate = gate_with(100)
    gate.offer(ask("a"), certain(10), 0.0)
    gate.report("w0", Report(1, 1, (Running("a", 3, 10, 10),), 0.03), 0.1)
    [ticket] = gate.tick(0.2)
    assert ticket.request_id == "a" and len(gate.ledgers["w0"]) == 1
    gate.finished("a", 10, 0.5)
    assert len(gate.ledgers["w0"]) == 0 and "a" not in gate.running


def test_what_was_charged_is_trued_up():
    gate = gate_with(100)
    gate.offer(ask("a", tenant="t"), distribution(40), 0.0)
    gate.tick(0.0)
    assert gate.queue.counters["t"] == pytest.approx(10 + 2 * distribution(40).mean)
    gate.finished("a", 7, 1.0)
    assert gate.queue.counters["t"] == pytest.approx(10 + 2 * 7)
    gate.finished("a", 7, 1.0)  # reported twice
    assert gate.queue.counters["t"] == pytest.approx(10 + 2 * 7)
    gate.offer(ask("lost", tenant="t"), distribution(40), 1.0)
    gate.tick(1.0)
    gate.tick(3.0)  # its lease ran out
    assert gate.queue.counters["t"] == pytest.approx(10 + 2 * 7)
    assert len(gate.ledgers["w0"]) == 0


def test_a_new_gate_learns_from_reports_what_runs():
    gate = gate_with(100)
    gate.report("w0", Report(1, 7, (Running("x", 5, 60, 10),), 1.0), 0.0)
    gate.report("unknown", Report(1, 1, (), 1.0), 0.0)
    with pytest.raises(ValueError, match="'x' is already waiting or running"):
        gate.offer(ask("x"), certain(10), 0.0)
    gate.offer(ask("a", 30), certain(10), 0.0)
    assert gate.tick(0.0) == []
    gate.finished("x", 10, 1.0)
    assert [t.request_id for t in gate.tick(1.0)] == ["a"]


def test_with_room_for_the_worst_case_a_request_is_admitted_provisionally():
    gate = gate_with(100)
    assert gate.admit(ask("long", 10), 91, 0.0) is None  # it fits nowhere at its longest
    assert gate.admit(ask("a", 10), 39, 0.0).worker == "w0"
    assert gate.admit(ask("a", 10), 1, 0.0) is None  # it is here
    assert gate.admit(ask("b", 10), 40, 0.0) is None  # 49 + 50 and their last blocks
    assert gate.admit(ask("b", 10), 37, 0.0).worker == "w0"
    gate.confirm(
        ask("a", 10), certain(5), "w0", 0.1
    )  # its own distribution: no more than 15 tokens
    assert gate.spare()["w0"][0] == 100 - 16 - 48
    gate.finished("b", 3, 0.2)
    gate.offer(ask("waits", 90), certain(5), 0.3)
    assert gate.admit(ask("c", 1), 1, 0.3) is None  # no request overtakes one that waits


def test_a_provisionally_admitted_request_ends_like_others():
    gate = gate_with(100)
    for end in ("completed", "declined", "lease", "worker"):
        assert gate.admit(ask(end, 10), 40, 0.0) is not None
        assert gate.spare()["w0"][0] < 100 and end in gate.running
        if end == "completed":
            gate.finished(end, 3, 0.1)
        elif end == "declined":
            assert not gate.declined(end, 0.1)  # it does not wait: it has not been judged
            assert gate.admit(ask("other", 1), 1, 0.1) is None  # until that worker reports
            gate.report("w0", Report(1, 1, (), 1.0), 0.2)
        elif end == "lease":
            gate.tick(2.1)
        else:
            gate.remove_worker("w0")
            gate.add_worker(WorkerSpec("w0", 2, 100, 1, 64))
        assert end not in gate.running and gate.spare()["w0"] == (100, 64)


def test_a_request_on_credit_is_in_the_ledger_before_its_distribution():
    gate = gate_with(100)
    assert gate.admit_on_credit(ask("a", 10), 40, "w0", 0.0)
    assert gate.spare()["w0"][0] == 100 - 51
    assert gate.admit_on_credit(ask("a", 10), 40, "w0", 0.0)  # reported twice, held once
    assert not gate.admit_on_credit(ask("b", 10), 40, "gone", 0.0)
    gate.confirm(ask("a", 10), certain(5), "w0", 0.1)
    assert not gate.admit_on_credit(ask("a", 10), 40, "w0", 0.2)  # judged by now
    assert gate.spare()["w0"][0] == 100 - 16


def test_the_same_id_twice():
    gate = gate_with(100)
    gate.offer(ask("a"), distribution(), 0.0)
    with pytest.raises(ValueError, match="'a' is already waiting or running"):
        gate.offer(ask("a"), distribution(), 0.0)
    gate.tick(0.0)
    with pytest.raises(ValueError, match="'a' is already waiting or running"):
        gate.offer(ask("a"), distribution(), 0.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"level": 0.0}, "level"),
        ({"pressed_level": 1.1}, "pressed_level"),
        ({"pressed_s": 0.0}, "pressed_s"),
        ({"num_samples": 0}, "num_samples"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"longest_wait_s": float("nan")}, "longest_wait_s"),
        ({"max_backfills": -1}, "max_backfills"),
        ({"retry_s": (3.0, 1.0)}, "retry_s"),
    ],
)
def test_bad_settings(changes, named):
    with pytest.raises(ValueError, match=named):
        GateSettings(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt_tokens", -1), ("ceiling", 0), ("weight", 0.0), ("weight", float("nan"))],
)
def test_bad_requests(name, value):
    with pytest.raises(ValueError, match=name):
        GateRequest(**{"request_id": "a", "prompt_tokens": 1, name: value})


def blocked_gate():
    """A full worker, and a request that does not fit; when that one was looked at."""
    gate = gate_with(100, look_s=0.25, look_on_arrival_s=0.03, short_queue=0)
    assert gate.offer(ask("a", 60), certain(30), 0.0) is None
    assert [each.request_id for each in gate.tick(0.0)] == ["a"]
    assert gate.offer(ask("b", 60), certain(30), 1.0) is None
    assert gate.tick(1.0) == []
    return gate


def count_looks(gate, monkeypatch):
    looks = []
    admit = gate._admission.admit
    monkeypatch.setattr(gate._admission, "admit", lambda now: (looks.append(now), admit(now))[1])
    return looks


def test_a_queue_is_looked_at_when_something_has_changed(monkeypatch):
    """Not at each tick: nothing that is asked again says anything else."""
    gate = blocked_gate()
    looks = count_looks(gate, monkeypatch)
    for at in np.arange(1.01, 1.25, 0.01).tolist():
        assert gate.tick(at) == []
    assert looks == []
    gate.tick(1.25)
    assert looks == [1.25], "after a while all the same: pressure and forecasts change with time"
    assert gate.offer(ask("c", 60), certain(30), 1.26) is None
    gate.tick(1.26)
    gate.tick(1.28)
    assert looks == [1.25, 1.28], "an arrival waits until the last look is old enough"
    gate.finished("a", 30, 1.281)
    assert [each.request_id for each in gate.tick(1.281)] == ["b"], "freed memory does not wait"


@pytest.mark.parametrize("what", ["report", "cancel", "worker", "decline"])
def test_what_frees_room_is_looked_at_at_once(what, monkeypatch):
    gate = blocked_gate()
    looks = count_looks(gate, monkeypatch)
    if what == "report":
        gate.report("w0", Report(1, 1, (Running("a", 1),), 0.03), 1.01)
    elif what == "cancel":
        gate.cancel("b", 1.01)
        assert gate.offer(ask("c", 5), certain(5), 1.01) is None
    elif what == "worker":
        gate.add_worker(WorkerSpec("w1", 1, 100, 1, 64))
    else:
        gate.declined("a", 1.01)
    gate.tick(1.01)
    assert looks == [1.01]


def test_a_short_queue_is_looked_at_at_each_tick(monkeypatch):
    gate = gate_with(100, short_queue=2)
    assert gate.offer(ask("a", 60), certain(30), 0.0) is None
    gate.tick(0.0)
    looks = count_looks(gate, monkeypatch)
    for i, at in enumerate((0.01, 0.02, 0.03)):
        assert gate.offer(ask(f"b{i}", 60), certain(30), at) is None
        gate.tick(at)
    assert looks == [0.01, 0.02]


def test_an_arrival_at_an_empty_queue_does_not_wait():
    gate = gate_with(1000, short_queue=0)
    for i, at in enumerate((0.0, 0.001, 0.002)):
        assert gate.offer(ask(f"r{i}", 5), certain(5), at) is None
        assert [each.request_id for each in gate.tick(at)] == [f"r{i}"]
