"""What the gate's process learns on the way and at the end, and that a restart keeps it."""

from __future__ import annotations

import asyncio

import numpy as np

from penstock.deployments.gate import learner as learner_module
from penstock.deployments.gate import server
from penstock.deployments.gate.learner import GateLearner
from penstock.deployments.gate.server import GateServer
from penstock.deployments.gate.service import GateService
from penstock.deployments.gate.types import GateSetup, Running
from penstock.deployments.gate.wire import features_message, text_message
from penstock.deployments.prediction import predictor_file
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.deployments.prediction.text_digest import digest_text
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

FEATURES = Features("m", "alice", max_tokens=4000, text=digest_text("Tell me of the mill."))


def label(name, length, ended="stop"):
    return pb.Label(
        features=features_message(FEATURES), length=length, ended=ended, request_id=name
    )


def learn_all(learner):
    while learner.learn():
        pass


def at_risk(learner):
    return learner.predictor.ends.groups[()].at_risk.sum()


def test_running_answers_are_learnt_from_once():
    """One gets every step, the other only the end: both have counted the same."""
    often, once = GateLearner(LengthPredictor()), GateLearner(LengthPredictor())
    for learner in (often, once):
        learner.watch("a", FEATURES)
    for generated in range(1, 301):
        often.progress([Running("a", generated), Running("never heard of", 500)])
        learn_all(often)
    halfway = at_risk(often)
    assert halfway > 0 and often.num_learnt == 0
    for learner in (often, once):
        learner.ended("a")
        learner.labels.append(label("a", 310))
        learn_all(learner)
        assert learner.num_learnt == 1
    assert abs(at_risk(often) - at_risk(once)) < 0.1 < at_risk(once) - halfway
    often.progress([Running("a", 400)])  # a late report
    assert not often.learn()


def test_what_gathers_is_learnt_from_together_and_is_the_same():
    """Running answers and ends wait for GATHER_S; what the groups count does not depend on it."""
    together, alone = GateLearner(LengthPredictor()), GateLearner(LengthPredictor())
    for learner in (together, alone):
        for i in range(5):
            learner.watch(f"r{i}", FEATURES)
    together.learn_due(1.0, 100.0)  # there is nothing yet
    for generated in (100, 200, 300):
        running = [Running(f"r{i}", generated + 10 * i) for i in range(5)]
        together.progress(running)
        together.learn_due(1.0, 100.0 + learner_module.GATHER_S / 2)
        for each in running:
            alone.progress([each])
            learn_all(alone)
    together.labels.append(label("r0", 310))
    assert not together.predictor.ends.groups and together.num_learnt == 0
    together.learn_due(1.0, 100.0 + learner_module.GATHER_S)
    alone.labels.append(label("r0", 310))
    learn_all(alone)
    assert together.num_learnt == alone.num_learnt == 1
    both = [each.predictor.ends.groups[()].both for each in (together, alone)]
    assert abs(both[0] - both[1]).max() < 0.01


def test_a_label_that_cannot_be_read_spoils_no_other():
    learner = GateLearner(LengthPredictor())
    bad = label("a", 30)
    bad.features.text_keys = b"abc"
    odd = label("b", 30)
    del odd.features.text_facts[3:]
    learner.labels.extend([bad, label("c", 30), odd, label("d", 40, "no such end")])
    learn_all(learner)
    assert learner.num_learnt == 1


def test_an_end_without_a_label_leaves_the_progress_and_nothing_else():
    learner = GateLearner(LengthPredictor())
    learner.watch("a", FEATURES)
    learner.progress([Running("a", 300)])
    learner.ended("a")  # an error: it is not learnt from, nor is what was due
    assert not learner.learn() and not learner.predictor.ends.groups


def test_reports_of_workers_reach_the_predictor():
    sent = pb.ToIngress()
    service = GateService(GateSetup(), LengthPredictor(), lambda _: sent, 0.0)
    service.ingress_joined("i")
    report = pb.WorkerReport(address="w", epoch=7)
    report.report.num_blocks, report.report.block_size, report.report.max_num_seqs = 500, 16, 8
    features = features_message(FEATURES)
    text = text_message("a", features)
    features.ClearField("text_keys")
    features.ClearField("text_facts")
    offer = pb.Offer(request_id="a", features=features, credit_epoch=7)
    service.receive("i", pb.FromIngress(number=1, reports=[report], offers=[offer]), 0.0)
    assert not service.judge_next(0.0)  # its text is not there
    service.receive("i", pb.FromIngress(number=2, texts=[text]), 0.0)
    assert service.learner._running == {}
    assert service.judge_next(0.0) and not service.learner.learn()
    assert service.learner._running["a"].features == FEATURES
    report.report.sequence, report.report.step_s = 1, 0.01
    for column, value in [("request_ids", "a"), ("generated", 200), ("prompt_tokens", 9)]:
        getattr(report.report, column).append(value)
    report.report.max_tokens.append(4000)
    service.receive("i", pb.FromIngress(number=3, reports=[report]), 1.0)
    assert service.learner.learn() and at_risk(service.learner) > 10  # bins up to 199 tokens
    service.ingress_left("i")
    assert not service.learner._running


def same(one, other):
    distributions = [each.predict(FEATURES).cumulative for each in (one, other)]
    return np.allclose(*distributions, rtol=1e-5)  # weights of words are kept in fp32


def test_a_gate_that_starts_again_predicts_as_before(tmp_path, monkeypatch):
    """`predictor_file`: what one process had learnt, the next one begins with."""
    monkeypatch.setattr(server, "SNAPSHOT_S", 0.05)
    setup = GateSetup(host="127.0.0.1", snapshot_file=str(tmp_path / "lengths.npz"))
    asks = [FEATURES, Features("m", "bob"), Features("another")]

    async def live(labels):
        server = GateServer(setup)
        await server.where(setup)
        learner = server.service.learner
        begins = [learner.predictor.predict(each).cumulative for each in asks]
        if labels:
            learner.watch("runs", FEATURES)
            learner.progress([Running("runs", 700)])
            learner.labels.extend(labels)
            async with asyncio.timeout(60):
                while learner.num_learnt < len(labels) or learner._due:
                    await asyncio.sleep(0.02)
                learner.labels.append(label("last", 40))  # what is there now is saved again
                while learner.num_learnt == len(labels):
                    await asyncio.sleep(0.02)
                saved = predictor_file.load(setup.snapshot_file)
                while not same(saved, learner.predictor):
                    await asyncio.sleep(0.02)
                    saved = predictor_file.load(setup.snapshot_file)
        ends = [learner.predictor.predict(each).cumulative for each in asks]
        await server.close()
        return begins, ends

    fresh, learnt = asyncio.run(live([label(f"r{i}", 30 + i) for i in range(40)]))
    restarted, _ = asyncio.run(live([]))
    for before, saved, after in zip(fresh, learnt, restarted, strict=True):
        assert np.allclose(saved, after, rtol=1e-5)
        assert not np.allclose(before, after, rtol=1e-2)
