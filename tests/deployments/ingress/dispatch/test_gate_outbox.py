"""What an ingress tells the gate, gathered: what goes at once, and what waits a moment for more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from penstock.deployments.gate.wire import features_message
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch import gate_outbox
from penstock.deployments.ingress.dispatch.gate_outbox import GateOutbox
from penstock.deployments.ingress.dispatch.pending_admission import PendingAdmission, State
from penstock.deployments.prediction.features import Features
from penstock.protos.penstock.internal.v1 import channel_pb2
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from penstock.workers.request import Request, SamplingParams


def request(name: str) -> AdmissionRequest:
    features = Features("model", prompt_tokens=4, max_tokens=8)
    inner = Request(name, (5, 6, 7, 8), SamplingParams(max_tokens=8))
    return AdmissionRequest(inner, features=features)


def with_outbox(scenario: Callable[[GateOutbox], Coroutine[Any, Any, None]]) -> None:
    """Run it with a stream that has begun and been answered."""

    async def main() -> None:
        outbox = GateOutbox("in")
        outbox.begin()
        assert outbox.take().number == 1
        outbox.open()
        await scenario(outbox)

    asyncio.run(main())


async def is_due(outbox: GateOutbox, within_s: float) -> bool:
    try:
        await asyncio.wait_for(outbox.due(), within_s)
    except TimeoutError:
        return False
    return True


def test_an_offer_has_the_weight_of_its_tenant():
    async def scenario(outbox: GateOutbox) -> None:
        heavy = replace(request("a"), weight=2.5)
        outbox.offer(PendingAdmission(heavy), with_text=False)
        outbox.offer(PendingAdmission(request("b")), with_text=False)
        assert [each.weight for each in outbox.take().offers] == [2.5, 1.0]

    with_outbox(scenario)


def test_news_wait_for_more_and_go_by_themselves():
    async def scenario(outbox: GateOutbox) -> None:
        began_s = time.monotonic()
        for name in ("a", "b", "c"):
            outbox.admitted_on_credit(request(name), 7)
            outbox.ended(name, 3, is_awaited=False)
            outbox.learn(request(name), 3, "stop")
            await asyncio.sleep(0)
        assert await is_due(outbox, 10)
        assert time.monotonic() - began_s >= 0.9 * gate_outbox.GATHER_S
        message = outbox.take()
        assert message.number == 2
        assert [each.request_id for each in message.ended] == ["a", "b", "c"]
        assert [each.length for each in message.labels] == [3, 3, 3]
        # Each is reported before its end: once as admitted, and its text.
        offers = [
            (each.request_id, each.credit_epoch, each.features.HasField("text_keys"))
            for each in message.offers
        ]
        assert offers == [(name, 7, False) for name in ("a", "b", "c")]
        assert [(each.request_id, len(each.keys) > 0) for each in message.texts] == [
            (name, True) for name in ("a", "b", "c")
        ]
        assert not await is_due(outbox, 3 * gate_outbox.GATHER_S), "nothing is left"

    with_outbox(scenario)


def test_an_urgent_message_goes_at_once_and_takes_the_reports_along(monkeypatch):
    monkeypatch.setattr(gate_outbox, "GATHER_S", 3600.0)

    async def scenario(outbox: GateOutbox) -> None:
        outbox.admitted_on_credit(request("a"), 7)
        assert not await is_due(outbox, 0.05)
        number = outbox.next_number
        outbox.offer(PendingAdmission(request("b")), with_text=True, returned="declined")
        assert await is_due(outbox, 10)
        message = outbox.take()
        assert message.number == number
        assert [each.request_id for each in message.offers] == ["a", "b"]
        assert list(message.declined) == ["b"]
        assert [each.request_id for each in message.texts] == ["b"]
        outbox.ended("a", 1, is_awaited=True)
        assert await is_due(outbox, 10)
        assert [each.request_id for each in outbox.take().ended] == ["a"]

        monkeypatch.setattr(gate_outbox, "GATHER_S", 0.001)
        outbox.admitted_on_credit(
            request("c"), 7
        )  # the hour of before is forgotten with its message
        assert await is_due(outbox, 10)

    with_outbox(scenario)


def test_the_message_that_is_sent_tells_of_all_that_came_in_until_then(monkeypatch):
    """A pass is counted as used until the gate has read the message of that number."""
    monkeypatch.setattr(gate_outbox, "GATHER_S", 3600.0)
    monkeypatch.setattr(gate_outbox, "REPORT_GATHER_S", 0.0)

    async def scenario(outbox: GateOutbox) -> None:
        number = outbox.next_number
        outbox.admitted_on_credit(request("a"), 7)
        outbox.report("somewhere", 7, channel_pb2.Report())  # goes for another reason
        assert await is_due(outbox, 10)
        message = outbox.take()
        assert (message.number, message.offers[0].request_id) == (number, "a")

    with_outbox(scenario)


def test_a_new_stream_counts_from_one_and_begins_with_what_workers_run():
    async def scenario(outbox: GateOutbox) -> None:
        outbox.report("one", 7, channel_pb2.Report())
        outbox.report("other", 8, channel_pb2.Report())
        outbox.lost(8)
        outbox.ended("of the old stream", 1, is_awaited=True)
        outbox.close()
        outbox.ended("of no stream", 1, is_awaited=True)
        outbox.begin()
        assert outbox.next_number == 1
        message = outbox.take()
        assert (message.ingress_id, message.number, len(message.ended)) == ("in", 1, 0)
        assert [each.epoch for each in message.reports] == [7]

    with_outbox(scenario)


@pytest.mark.parametrize("num", [1, gate_outbox.MAX_FEATURES + 5])
def test_what_is_remembered_of_texts_is_bounded(num):
    async def scenario(outbox: GateOutbox) -> None:
        for n in range(num):
            outbox.offer(PendingAdmission(request(f"r{n}")), with_text=False)
        assert not outbox._features, "no text is read before its offer is sent"
        outbox.compute_texts()
        assert len(outbox._features) == min(num, gate_outbox.MAX_FEATURES)

    with_outbox(scenario)


@pytest.mark.parametrize("is_open", [True, False])
def test_nothing_is_remembered_of_a_request_that_ended_without_a_length(is_open):
    """Refused, failed, or while the gate is away."""

    async def scenario(outbox: GateOutbox) -> None:
        outbox.offer(PendingAdmission(request("a")), with_text=True)
        outbox.offer(PendingAdmission(request("running")), with_text=True)
        outbox.take()
        if not is_open:
            outbox.close()
        outbox.ended("a", 0, is_awaited=False)
        if is_open:
            assert names(outbox.take().ended) == ["a"]
        assert list(outbox._features) == ["running"]

    with_outbox(scenario)


def test_the_features_of_a_text_are_computed_once_for_the_end_and_the_length(monkeypatch):
    computed: list[Features] = []

    def counted(features: Features) -> pb.Features:
        computed.append(features)
        return features_message(features)

    monkeypatch.setattr(gate_outbox, "features_message", counted)

    async def scenario(outbox: GateOutbox) -> None:
        admission = request("a")
        outbox.offer(PendingAdmission(admission), with_text=True)
        of_offer = len(computed)
        outbox.ended("a", 3, is_awaited=False)
        outbox.learn(admission, 3, "stop")
        assert [each.length for each in outbox.take().labels] == [3]
        assert len(computed) == of_offer

    with_outbox(scenario)


def test_lengths_of_answers_are_kept_while_the_gate_is_away():
    async def scenario(outbox: GateOutbox) -> None:
        outbox.learn(request("sent"), 1, "stop")
        outbox.take()
        outbox.learn(request("not sent"), 2, "stop")
        outbox.close()
        for i in range(gate_outbox.MAX_LABELS):
            outbox.learn(request(f"away {i}"), 3, "length")
        outbox.begin()
        assert not outbox.take().labels  # the gate has not replied: another may
        outbox.open()
        assert await is_due(outbox, 10)
        labels = outbox.take().labels
        assert names(labels) == [f"away {i}" for i in range(gate_outbox.MAX_LABELS)]  # the newest
        outbox.close()
        outbox.begin()
        outbox.open()
        assert not outbox.take().labels

    with_outbox(scenario)


def test_a_length_that_was_not_sent_goes_to_the_next_gate():
    async def scenario(outbox: GateOutbox) -> None:
        outbox.learn(request("a"), 2, "stop")
        outbox.close()
        outbox.begin()
        outbox.take()
        outbox.open()
        assert names(outbox.take().labels) == ["a"]

    with_outbox(scenario)


def names(items: Any) -> list[str]:
    return [each.request_id for each in items]


def test_the_text_of_an_admitted_request_is_sent_alone_and_once(monkeypatch):
    monkeypatch.setattr(gate_outbox, "TEXT_S", 0.03)

    async def scenario(outbox: GateOutbox) -> None:
        outbox.admitted_on_credit(request("credit"), 7)
        pending = PendingAdmission(request("ticket"))
        outbox.offer(pending, with_text=False)
        message = outbox.take()
        assert (names(message.offers), names(message.texts)) == (["credit", "ticket"], [])
        pending.decide(8)
        states = [pending.state]
        outbox.admitted(pending)
        assert await is_due(outbox, 10)
        message = outbox.take()
        assert (names(message.offers), names(message.texts)) == ([], ["credit", "ticket"])
        states.append(pending.state)
        assert states == [State.TEXT_PENDING, State.ADMITTED]
        outbox.ended("credit", 1, is_awaited=True)
        outbox.ended("ticket", 1, is_awaited=True)
        message = outbox.take()
        assert (names(message.texts), names(message.ended)) == ([], ["credit", "ticket"])
        assert not outbox._incomplete

    with_outbox(scenario)


def test_the_text_of_a_waiting_request_goes_when_the_gate_asks_for_it():
    async def scenario(outbox: GateOutbox) -> None:
        pending = PendingAdmission(request("a"))
        outbox.offer(pending, with_text=False)
        outbox.take()
        outbox.send_text(pending)
        assert await is_due(outbox, 10)
        message = outbox.take()
        assert (names(message.offers), names(message.texts)) == ([], ["a"])
        pending.decide(7)
        assert pending.state is State.ADMITTED
        outbox.admitted(pending)
        outbox.ended("a", 1, is_awaited=True)
        assert not outbox.take().texts, "it was sent"

    with_outbox(scenario)


def test_a_declined_request_is_offered_anew_and_its_earlier_admission_is_over():
    """Else the gate would read its text as one of the worker that declined it."""

    async def scenario(outbox: GateOutbox) -> None:
        outbox.admitted_on_credit(request("a"), 7)
        assert [each.credit_epoch for each in outbox.take().offers] == [7]
        outbox.offer(PendingAdmission(request("a")), with_text=True, returned="declined")
        message = outbox.take()
        assert not message.offers[0].HasField("credit_epoch")
        assert (names(message.offers), names(message.texts)) == (["a"], ["a"])
        outbox.ended("b", 1, is_awaited=True)  # sends the texts that are pending
        assert not outbox.take().texts

    with_outbox(scenario)


def test_a_new_stream_tells_nothing_of_requests_of_the_old_one():
    async def scenario(outbox: GateOutbox) -> None:
        outbox.admitted_on_credit(request("a"), 7)
        outbox.close()
        outbox.begin()
        outbox.take()
        outbox.open()
        outbox.ended("b", 1, is_awaited=True)
        message = outbox.take()
        assert (len(message.offers), len(message.texts)) == (0, 0)

    with_outbox(scenario)
