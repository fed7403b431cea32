"""Prompts go to the worker that has their prefix cached, unless it is too loaded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.deployments.gate.controller import Gate
from penstock.deployments.gate.forecast.prefix_affinity import (
    MAX_MARKS,
    SHORTEST,
    PrefixAffinity,
    prefix_marks,
)
from penstock.deployments.gate.placement import LEEWAY, best_of
from penstock.deployments.gate.types import GateRequest, GateSettings, WorkerSpec
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.prediction.distribution import LengthDistribution, cumulative_hazard
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.hazards import length_prior
from penstock.workers.request import FinishReason, Request, SamplingParams
from tests.deployments.gate.test_with_workers import ENGINE, NoCredits, Node, collect, house

CONFIG = replace(ENGINE, num_blocks=200)  # 3,200 tokens
LENGTH = LengthDistribution(cumulative_hazard(length_prior()), 100)


def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 2000), k=length))


def test_marks_of_a_common_beginning_are_shared():
    one, other = tokens(1, 300) + tokens(2, 300), tokens(1, 300) + tokens(3, 90)
    mine, theirs = prefix_marks(one), prefix_marks(other)
    assert len(mine) == 5 and len(theirs) == 4  # 32 to 512, 32 to 256
    assert mine[:4] == theirs and mine[4] not in theirs
    assert prefix_marks(one[: SHORTEST - 1]) == ()
    assert len(prefix_marks(tokens(4, 40_000))) == MAX_MARKS
    assert prefix_marks(list(one)) == mine
    assert set(prefix_marks(one[1:])).isdisjoint(mine)


def test_the_longest_hit_of_each_place():
    affinity: PrefixAffinity[str] = PrefixAffinity()
    marks = prefix_marks(tokens(1, 600))
    affinity.note(marks, "a", 600, 10_000)
    affinity.note(marks[:2], "b", 70, 10_000)
    assert affinity.hits(marks) == {"a": 512, "b": 64}
    assert affinity.hits(prefix_marks(tokens(1, 140))) == {"a": 128, "b": 64}
    assert affinity.hits(prefix_marks(tokens(9, 600))) == {}
    affinity.forget("a")
    assert affinity.hits(marks) == {"b": 64}


def test_what_a_worker_was_sent_since_makes_it_forget():
    affinity: PrefixAffinity[str] = PrefixAffinity()
    first, second = prefix_marks(tokens(1, 64)), prefix_marks(tokens(2, 64))
    affinity.note(first, "a", 100, 1000)
    affinity.note(second, "a", 900, 1000)
    assert affinity.hits(first) == {"a": 64}
    affinity.note(second, "a", 101, 1000)
    assert affinity.hits(first) == {} and affinity.hits(second) == {"a": 64}


def test_the_number_of_entries_is_bounded():
    affinity: PrefixAffinity[int] = PrefixAffinity(max_entries=20)
    for seed in range(50):
        for place in range(10):
            affinity.note(prefix_marks(tokens(seed, 128)), place, 1, 1000)
    assert len(affinity._places) == 20
    assert all(len(each) == PrefixAffinity.MAX_PLACES for each in affinity._places.values())
    assert affinity.hits(prefix_marks(tokens(0, 128))) == {}  # the oldest made way


def test_cached_first_unless_it_is_much_fuller():
    able = [(0.50, "a"), (0.50 + LEEWAY / 2, "b"), (0.51 + LEEWAY, "c")]
    assert best_of(able, {}) == "a"
    assert best_of(able, {"b": 64}) == "b"
    assert best_of(able, {"b": 64, "a": 512}) == "a"
    assert best_of(able, {"c": 512}) == "a"


def test_of_many_workers_the_one_with_the_prefix_is_looked_at():
    """It is not among the emptiest, and 4 of 40 are looked at."""
    gate = Gate(GateSettings(max_choices=4), seed=0)
    for i in range(40):
        gate.add_worker(WorkerSpec(f"w{i}", 1, capacity=20_000))
    marks = prefix_marks(tokens(5, 300))

    def place(name: str, prefix: tuple[int, ...]) -> str:
        assert gate.offer(GateRequest(name, 300, prefix=prefix), LENGTH, 0.0) is None
        [ticket] = gate.tick(0.0)
        return ticket.worker

    first = place("first", marks)
    others = {place(f"other{i}", ()) for i in range(20)}
    assert first not in others
    assert {place(f"same{i}", marks) for i in range(3)} == {first}
    gate.remove_worker(first)
    gate.add_worker(WorkerSpec(first, 2, capacity=20_000))  # a new life has an empty cache
    assert gate._placement.hits(gate.running["other0"].entry.prefix) == {}
    assert first not in gate._placement._prefixes.hits(marks)


def two_workers() -> Gate:
    gate = Gate(GateSettings(), seed=0)
    for name in ("w0", "w1"):
        gate.add_worker(WorkerSpec(name, 1, capacity=4000))
    return gate


def test_an_answer_that_is_over_before_it_is_judged_has_left_its_beginning():
    """A fast one: let in at once, and ended before the gate has read its text."""
    marks = prefix_marks(tokens(5, 300))
    for came in ("asked", "with a pass"):
        gate = two_workers()
        offered = GateRequest("first", 300, prefix=marks)
        if came == "asked":
            assert gate.admit(offered, 4, 0.0) is not None
        else:
            assert gate.admit_on_credit(offered, 4, "w0", 0.0)
        [first] = gate._placement.hits(marks)
        gate.finished("first", 4, 0.0)
        gate.admit_on_credit(
            GateRequest("other", 200), 200, first, 0.0
        )  # a little fuller than the other
        again = gate.admit(GateRequest("again", 300, prefix=marks), 4, 0.0)
        assert again is not None and again.worker == first


def test_each_token_counts_once_for_what_is_forgotten():
    marks, offered = prefix_marks(tokens(5, 300)), GateRequest("a", 300)
    sent = {}
    for held in (False, True):
        gate = two_workers()
        if held:
            assert gate.admit_on_credit(offered, 4, "w0", 0.0) and gate.admit_on_credit(
                offered, 4, "w0", 0.0
            )
        gate.confirm(replace(offered, prefix=marks), LENGTH, "w0", 0.1)
        sent[held] = dict(gate._placement._prefixes._sent)
    assert sent[False] == sent[True]


@pytest.fixture
def nodes(model: Any) -> Iterator[list[Node]]:
    made = [Node(model, CONFIG) for _ in range(2)]
    yield made
    for node in made:
        node.stop()


def request(name: str, ids: tuple[int, ...], max_tokens: int = 4) -> AdmissionRequest:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    features = Features("test", prompt_tokens=len(ids), max_tokens=max_tokens)
    return AdmissionRequest(Request(name, ids, params), features, prefix=prefix_marks(ids))


@pytest.mark.parametrize("everybody_asks", [False, True])
def test_a_repeated_prefix_goes_where_it_is_cached_unless_load_says_otherwise(
    nodes, run, everybody_asks
):
    """Two applications with a system prompt each; the ingress or the gate chooses the worker."""
    one, other = tokens(1, 300), tokens(2, 300)

    async def scenario():
        async with house(*nodes) as made:
            if everybody_asks:
                made.client._credits = NoCredits()

            async def ask(name, ids, max_tokens=4):
                """Which node, and the cached tokens."""
                before = [node.thread.stats().num_prefix_hit_tokens for node in nodes]
                _, last = await collect(made.pool, request(name, ids, max_tokens))
                assert last.finish_reason is FinishReason.LENGTH, last
                ports = [node.channel.info.address for node in nodes]
                after = [node.thread.stats().num_prefix_hit_tokens for node in nodes]
                hits = [b - a for a, b in zip(before, after)]
                return ports.index(last.engine), hits

            def start(name, ids):
                return asyncio.ensure_future(collect(made.pool, request(name, ids, 900)))

            async def stop(*running):
                for each in running:
                    each.cancel()
                await asyncio.gather(*running, return_exceptions=True)

            async def runs(num):
                async with asyncio.timeout(60):
                    while sum(counts := [n.thread.stats().num_running for n in nodes]) != num:
                        await asyncio.sleep(0.01)
                return counts

            homes = []
            for name, shared, filler in [("b", other, tokens(3, 40)), ("a", one, other)]:
                long = start(f"long-{name}", filler)
                full = (await runs(1)).index(1)
                homes.insert(0, (await ask(name, shared + tokens(10, 20)))[0])
                await stop(long)
                await runs(0)
                assert homes[0] == 1 - full  # so that they have different homes
            at_home = []
            for n in range(3):
                for home, shared in zip(homes, (one, other)):
                    where, hits = await ask(f"r{n}{home}", shared + tokens(20 + n, 20))
                    at_home.append(where == home and hits[home] >= 256)
            # Long answers fill the first one's home, and the same prefix goes elsewhere.
            busy = homes[0]
            crowd = [start(f"x{n}", one) for n in range(3)]
            spread = await runs(3)
            await stop(*crowd)
            return homes, at_home, spread, busy

    homes, at_home, spread, busy = run(scenario())
    assert sorted(homes) == [0, 1] and at_home == [True] * 6
    assert spread[busy] >= 1 and spread[1 - busy] >= 1
