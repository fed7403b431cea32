"""What the gate does with offers and their texts, message by message."""

from __future__ import annotations

from penstock.deployments.gate.service import GateService
from penstock.deployments.gate.types import LOWEST_PRIORITY, GateSetup
from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

EPOCH = 7


class Wire:
    """One ingress, with one worker of 640 tokens, and what the gate has sent to it."""

    def __init__(self) -> None:
        self.sent = pb.ToIngress()
        self.service = GateService(GateSetup(), LengthPredictor(), lambda _: self.sent, 0.0)
        self.service.ingress_joined("i")
        self.number = 0
        report = pb.WorkerReport(address="w", epoch=EPOCH)
        report.report.num_blocks, report.report.block_size, report.report.max_num_seqs = 40, 16, 8
        self.receive(reports=[report])

    def receive(self, now: float = 0.0, **items) -> list[str]:
        self.number += 1
        return self.service.receive("i", pb.FromIngress(number=self.number, **items), now)

    def held(self) -> int:
        return sum(len(each) for each in self.service.gate.ledgers.values())


def offer(name: str, max_tokens: int = 100, **rest) -> pb.Offer:
    features = pb.Features(
        model="m", prompt_tokens=10, max_tokens=max_tokens, num_messages=1, top_p=1.0
    )
    return pb.Offer(request_id=name, features=features, **rest)


def text(name: str) -> pb.TextFeatures:
    return pb.TextFeatures(request_id=name, keys=b"1234")


def test_an_offer_that_fits_at_its_longest_gets_its_ticket_before_its_text():
    wire = Wire()
    assert wire.receive(offers=[offer("a")]) == []
    assert [(each.request_id, each.epoch) for each in wire.sent.tickets] == [("a", EPOCH)]
    assert not wire.sent.queued and wire.held() == 1
    assert not wire.service.judge_next(0.0) and wire.service.gate.running.is_provisional("a")
    assert wire.receive(texts=[text("a")], now=0.05) == []
    assert wire.service.judge_next(0.05) and not wire.service.judge_next(0.05)
    assert wire.held() == 1 and not wire.service.gate.running.is_provisional("a")
    digest = wire.service.learner._running["a"].features.text
    assert digest is not None and digest.keys == b"1234"
    assert wire.service.counts.admitted == 1 and len(wire.sent.tickets) == 1


def test_an_offer_that_may_not_fit_is_judged_when_its_text_is_there():
    wire = Wire()
    wire.receive(offers=[offer("first", 500)], texts=[text("first")])
    assert wire.service.judge_next(0.0)
    wire.sent = pb.ToIngress()
    assert wire.receive(offers=[offer("b", 500)], now=0.1) == []
    assert list(wire.sent.queued) == ["b"] and wire.service.num_waiting == 0
    assert wire.receive(texts=[text("b")], now=0.2) == ["b"]
    assert wire.service.num_waiting == 1 and wire.service.inbox.waits_since() == 0.2
    assert wire.service.judge_next(0.2)
    assert "b" in wire.service.gate.queue


def test_offers_bring_the_weights_of_their_tenants():
    wire = Wire()
    wire.receive(offers=[offer("first", 500)], texts=[text("first")])
    tenants = {"heavy": 3.0, "light": 0.0}  # 0: it says nothing, as 1
    for n in range(12):
        for tenant, weight in tenants.items():
            name = f"{tenant}{n}"
            made = offer(name, 500, weight=weight)
            made.features.tenant = tenant
            wire.receive(offers=[made], texts=[text(name)])
    while wire.service.judge_next(0.0):
        pass
    order = [each.tenant for each in wire.service.gate.queue.order(0.0)]
    assert order[:12].count("heavy") == 9 and len(order) >= 24


def test_an_offer_with_its_text_is_answered_once():
    wire = Wire()
    wire.receive(offers=[offer("first", 500)], texts=[text("first")])
    wire.sent = pb.ToIngress()
    assert wire.receive(offers=[offer("b", 500)], texts=[text("b")]) == ["b"]
    assert not wire.sent.queued  # that is for `report_queued`, if it is not decided at once
    wire.service.report_queued(["b"], "i")
    assert list(wire.sent.queued) == ["b"]


def test_texts_are_judged_in_the_order_in_which_they_came():
    wire = Wire()
    wire.receive(offers=[offer(name, credit_epoch=EPOCH) for name in ("a", "b")])
    wire.receive(texts=[text("b"), text("a"), text("c")], offers=[offer("c", credit_epoch=EPOCH)])
    taken = [wire.service.inbox.next() for _ in range(4)]
    order = [each and each.message.request_id for each in taken]
    assert order == ["b", "a", "c", None]


def test_a_request_that_ends_before_its_text_leaves_nothing():
    wire = Wire()
    wire.receive(offers=[offer("credit", credit_epoch=EPOCH), offer("big", 600)])
    assert wire.held() == 1 and list(wire.sent.queued) == ["big"]
    ended = [pb.Ended(request_id=name, generated=3) for name in ("credit", "big")]
    wire.receive(ended=ended, now=0.1)
    counts = wire.service.counts
    assert wire.held() == 0 and (counts.admitted, counts.completed) == (1, 1)
    assert wire.receive(texts=[text("credit"), text("big")], now=0.2) == []  # late
    assert not wire.service.judge_next(0.2) and not wire.service.inbox._without_text


def test_the_deadline_counts_from_the_offer_and_not_from_its_text():
    wire = Wire()
    wire.receive(offers=[offer("first", 500)], texts=[text("first")])
    wire.receive(offers=[offer("b", 500, remaining_s=60.0)], now=1.0)
    wire.receive(texts=[text("b")], now=1.5)
    while wire.service.judge_next(1.5):
        pass
    assert wire.service.gate.queue._waiting["b"].deadline == 61.0


def test_an_ingress_that_left_leaves_no_offers():
    wire = Wire()
    wire.receive(offers=[offer("big", 600)])
    wire.receive(offers=[offer("other", 600)], texts=[text("other")])
    wire.service.ingress_left("i")
    assert not wire.service.inbox._without_text and not len(wire.service.inbox)


def listing(sequence: int, *names: str) -> pb.WorkerReport:
    report = pb.WorkerReport(address="w", epoch=EPOCH)
    report.report.num_blocks, report.report.block_size, report.report.max_num_seqs = 40, 16, 8
    report.report.sequence = sequence
    report.report.request_ids.extend(names)
    for column in (report.report.generated, report.report.prompt_tokens, report.report.max_tokens):
        column.extend([5] * len(names))
    return report


def test_a_report_under_way_when_a_request_ended_leaves_no_load():
    wire = Wire()
    wire.receive(offers=[offer("a")], texts=[text("a")])
    wire.service.judge_next(0.0)
    wire.receive(reports=[listing(1, "a")], now=0.1)
    assert wire.service.load(0.1).num_running == 1
    wire.receive(ended=[pb.Ended(request_id="a", generated=6)], now=0.2)
    wire.receive(reports=[listing(2, "a")], now=0.21)  # made before the end
    wire.receive(reports=[listing(3)], now=1.0)
    load = wire.service.load(1.0)
    assert (load.num_running, load.running_s, load.num_waiting) == (0, 0.0, 0)


def test_a_batch_request_that_never_began_leaves_no_work():
    wire = Wire()
    wire.receive(offers=[offer("a", priority=LOWEST_PRIORITY)], texts=[text("a")])
    wire.service.judge_next(0.0)
    wire.service.tick(0.0)
    assert "a" in wire.service.gate.running and wire.service.load(0.0).batch_work_s > 0
    wire.service.gate.running.expire(1e6)  # its lease ran out: no worker has it
    assert wire.service.load(1e6).batch_work_s == 0.0


def test_a_refused_request_that_is_sent_again_is_no_new_work_and_another_one_is():
    wire = Wire()
    wire.service.adopt(GateSetup(longest_wait_s=0.001))
    offers = [offer(f"{n}", 500) for n in range(4)]  # one runs, and one waits
    for each in offers:
        wire.receive(offers=[each], texts=[text(each.request_id)])
        assert wire.service.judge_next(0.0)
        wire.service.tick(0.0)
    assert [each.request_id for each in wire.sent.refusals] == ["2", "3"]
    before = wire.service.load(0.0).offered_work_s
    for name in ("2, again", "3, again"):
        wire.receive(offers=[offer(name, 500)], texts=[text(name)], now=2.0)
        assert wire.service.judge_next(2.0)
    assert len(wire.sent.refusals) == 4
    assert wire.service.load(2.0).offered_work_s == before
    other = pb.TextFeatures(request_id="other", keys=b"5678")
    wire.receive(offers=[offer("other", 500)], texts=[other], now=2.0)
    assert wire.service.judge_next(2.0)
    assert wire.service.load(2.0).offered_work_s > before


def test_refused_requests_that_are_judged_again_are_counted_by_what_their_clients_were_given():
    wire = Wire()
    wire.service.adopt(GateSetup(longest_wait_s=0.001))

    def refuse(names, now):
        """Some run, one waits, and the others are refused: what their clients were given."""
        wire.sent = pb.ToIngress()
        for name in names:
            wire.receive(offers=[offer(name, 500)], texts=[text(name)], now=now)
            assert wire.service.judge_next(now)
            wire.service.tick(now)
        return {each.request_id: each.retry_after_s for each in wire.sent.refusals}

    def judged(names, now):
        """The counts, once `names` have ended, or left the queue."""
        wire.receive(ended=[pb.Ended(request_id=each, generated=9) for each in names], now=now)
        wire.service.tick(now)
        figures = wire.service.figures()
        return figures.num_retry_after_in_time, figures.num_retry_after_late

    first = refuse("abcde", 0.0)
    assert first and min(first.values()) > 0.6
    assert wire.service.figures().retry_after_factor == 1.0
    assert judged(set("abcde") - first.keys(), 0.6) == (len(first), 0)
    assert wire.service.figures().retry_after_factor < 1.0
    second = refuse("fghij", 1.0)
    assert second
    after_s = 1.1 + max(second.values())
    assert judged(set("fghij") - second.keys(), after_s) == (len(first), len(second))
