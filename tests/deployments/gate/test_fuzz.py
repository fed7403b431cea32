"""Any messages of an ingress: the gate's books stay whole, for a fault would drop them all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployments.gate.service import GateService
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.protos.penstock.internal.v1 import channel_pb2, gate_pb2
from tests.fuzzing import messages

NAMES = st.sampled_from(["a", "b", "c", "d"])  # few, so that messages are about the same requests
REPORT: dict[str, Any] = {
    "num_blocks": st.sampled_from([0, 1, 100, 2**32 - 1]),
    "block_size": st.sampled_from([0, 1, 16, 2**31]),
    "max_num_seqs": st.sampled_from([0, 1, 16]),
}


@st.composite
def reports(draw: st.DrawFn) -> gate_pb2.WorkerReport:
    """Of one worker; its columns mostly have one length, as a worker's have."""
    names = draw(st.lists(NAMES, unique=True, max_size=3))
    report = draw(messages(channel_pb2.Report, request_ids=None, **REPORT))
    for column in ("request_ids", "generated", "prompt_tokens", "max_tokens"):
        report.ClearField(column)
    numbers = st.integers(0, 3000) | st.sampled_from([2**31, 2**32 - 1])
    report.request_ids.extend(names)
    for column in (report.generated, report.prompt_tokens, report.max_tokens):
        column.extend(draw(numbers) for _ in names)
    if draw(st.integers(0, 9)) == 0:
        report.generated.append(1)
    return gate_pb2.WorkerReport(address="w:1", epoch=draw(st.integers(1, 2)), report=report)


@st.composite
def from_ingress(draw: st.DrawFn, number: int) -> gate_pb2.FromIngress:
    message = draw(
        messages(
            gate_pb2.FromIngress,
            number=st.just(number),
            reports=None,
            ingress_id=st.just("i"),
            request_id=NAMES,
            declined=NAMES,
            lost=NAMES,
        )
    )
    message.reports.extend(draw(st.lists(reports(), max_size=2)))
    return message


@pytest.mark.parametrize("admission", ["predicted", "reserve_max"])
@settings(max_examples=80)
@given(data=st.data())
def test_any_messages_leave_the_books_whole(admission, data):
    now, sent = 1000.0, gate_pb2.ToIngress()
    setup = GateSetup(admission=admission, max_queued=8, longest_wait_s=5.0)
    service = GateService(setup, LengthPredictor(), lambda _: sent, now)
    service.ingress_joined("i")
    for number in range(1, data.draw(st.integers(2, 6))):
        now += data.draw(st.sampled_from([0.0, 0.001, 0.5, 20.0]))
        service.receive("i", data.draw(from_ingress(number)), now)
        while service.judge_next(now):
            pass
        service.tick(now)
        service.learner.learn()
        service.credits("i", now)
        for ledger in service.gate.ledgers.values():
            assert ledger.spec.capacity >= 0
    service.ingress_left("i")
    assert service.num_waiting == 0
