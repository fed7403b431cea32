"""Tokens that come fast on many streams share messages: none is lost, delayed for long, or doubled.

The link is driven by hand, with steps as a worker sends them, on a real event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch import in_flight, worker_link
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.workers.channel.codec import step_message
from penstock.workers.request import Delta, FinishReason, FirstTokenTimes, Request, SamplingParams
from penstock.workers.stats import WorkerInfo

INFO = WorkerInfo("127.0.0.1:1", 1, "", 0, "m", 512)
FIRST = FirstTokenTimes(0.0, 0.0)


class Driven:
    """A pool with one link that is not connected; `step` is what its worker would send."""

    def __init__(self, num_calls: int):
        self.pool = WorkerPool("test", lost_wait_s=0.0)
        self.link = worker_link.WorkerLink(INFO, "test", self.pool)
        self.link.is_connected = True
        self.pool._links[1] = self.link
        self.received: dict[int, list[Delta]] = {n: [] for n in range(1, num_calls + 1)}
        self._readers = [asyncio.ensure_future(self._read(n)) for n in self.received]

    async def _read(self, number: int) -> None:
        params = SamplingParams(max_tokens=100)
        admission = AdmissionRequest(Request(f"r{number}", (5,), params))
        deltas: AsyncIterator[Delta] = self.pool.generate(admission)
        async for delta in deltas:
            # What is handed out may be joined with nothing later.
            self.received[number].append(Delta("", list(delta.token_ids), delta.finish_reason))
            if delta.token_ids:
                assert delta.engine == INFO.address  # joined or not

    async def step(self, token_id: int, finish: FinishReason | None = None) -> None:
        times = FIRST if token_id == 0 else None
        deltas = {n: Delta("", [token_id], finish, times=times) for n in self.received}
        self.link._take_step(step_message(deltas))
        for _ in range(5):  # turns of the loop, in which woken readers read
            await asyncio.sleep(0)

    def counts(self) -> set[int]:
        return {len(deltas) for deltas in self.received.values()}

    def ids(self, number: int) -> list[int]:
        return [i for delta in self.received[number] for i in delta.token_ids]

    async def end(self) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*self._readers)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer never fires here: deltas are held until a last token comes."""
    monkeypatch.setattr(in_flight, "GATHER_S", 3600.0)
    monkeypatch.setattr(in_flight, "MESSAGES_PER_S", 0.001)


def test_on_many_streams_tokens_gather_but_the_first_and_the_last(patient: None) -> None:
    async def scenario() -> Driven:
        driven = Driven(in_flight.FEW_CALLS + 1)
        await asyncio.sleep(0)
        await driven.step(0)
        assert driven.counts() == {1}, "a first token waited"
        for token_id in range(1, 6):
            await driven.step(token_id)
        assert driven.counts() == {1}, "nothing was gathered"
        await driven.step(6, FinishReason.LENGTH)
        await driven.end()
        return driven

    driven = asyncio.run(scenario())
    for number, deltas in driven.received.items():
        assert [delta.token_ids for delta in deltas] == [[0], [1, 2, 3, 4, 5, 6]], number
        assert [delta.finish_reason for delta in deltas] == [None, FinishReason.LENGTH]


def test_on_few_streams_nothing_waits(patient: None) -> None:
    async def scenario() -> Driven:
        driven = Driven(in_flight.FEW_CALLS)
        await asyncio.sleep(0)
        for token_id in range(6):
            await driven.step(token_id)
            assert driven.counts() == {token_id + 1}
        await driven.step(6, FinishReason.STOP)
        await driven.end()
        return driven

    driven = asyncio.run(scenario())
    assert all(driven.ids(number) == list(range(7)) for number in driven.received)


def test_what_is_held_goes_out_though_no_other_step_comes() -> None:
    async def scenario() -> Driven:
        driven = Driven(in_flight.FEW_CALLS + 1)
        await asyncio.sleep(0)
        await driven.step(0)
        await driven.step(1)
        async with asyncio.timeout(60):
            while driven.counts() != {2}:
                await asyncio.sleep(0.001)
        await driven.step(2, FinishReason.STOP)
        await driven.end()
        return driven

    driven = asyncio.run(scenario())
    assert all(driven.ids(number) == [0, 1, 2] for number in driven.received)


def test_the_more_streams_the_longer_tokens_gather_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In minutes: a busy machine may stand still for longer than production gathers."""
    monkeypatch.setattr(in_flight, "MESSAGES_PER_S", 0.01)
    monkeypatch.setattr(in_flight, "GATHER_S", 1100.0)

    async def scenario(num_calls: int) -> float:
        """Seconds for which a token is held, where steps follow one another at once."""
        driven = Driven(num_calls)
        await asyncio.sleep(0)
        await driven.step(0)
        told_s = next(iter(driven.link._calls.values())).woken_s
        await driven.step(1)
        timer = driven.link._gathering._timer
        assert timer is not None
        await driven.step(2, FinishReason.STOP)
        await driven.end()
        return timer.when() - told_s

    assert asyncio.run(scenario(10)) == pytest.approx(1000.0)
    assert asyncio.run(scenario(12)) == pytest.approx(1100.0)


@pytest.mark.parametrize(("step_s", "waits"), [(0.005, True), (0.018, True), (0.03, False)])
def test_nothing_waits_for_a_step_that_comes_too_late(step_s: float, waits: bool) -> None:
    """32 streams have a message every 50 ms: of steps of 18 ms two share one, of 30 ms none do."""

    async def scenario() -> bool:
        gathering = in_flight.Coalescer(lambda now_s: None)
        now_s = 100.0
        for _ in range(40):
            now_s += step_s
            gathering.steps(now_s)
        admission = AdmissionRequest(Request("r", (5,), SamplingParams()))
        call = in_flight.InFlightRequest(admission, 10)
        call.tell(now_s)
        gathering.steps(now_s + step_s)
        return gathering.holds(call, 32, now_s + step_s)

    assert asyncio.run(scenario()) is waits


def test_tokens_before_a_loss_are_delivered_before_the_loss(patient: None) -> None:
    async def scenario() -> Driven:
        driven = Driven(in_flight.FEW_CALLS + 1)
        await asyncio.sleep(0)
        for token_id in range(4):
            await driven.step(token_id)
        driven.link._break()
        await driven.end()
        return driven

    driven = asyncio.run(scenario())
    for number, deltas in driven.received.items():
        assert driven.ids(number) == [0, 1, 2, 3]
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert not deltas[-1].token_ids
