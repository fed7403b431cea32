"""The service of the gate in the simulator: each request ends, is learnt from, costs something."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gate.sim.events import Simulation
from benchmarks.gate.sim.loads import DATA, GPUS, LOADS, jobs_of
from benchmarks.gate.sim.served import PARTS, Served
from benchmarks.gate.sim.worker import SimWorker


def test_messages_carry_each_request_to_its_end():
    load = replace(LOADS["words"], num_requests=20)
    jobs = jobs_of(load, 0, DATA, workers=2, scale=2.0)
    workers = [SimWorker(i, GPUS[load.gpu]) for i in range(2)]
    policy = Served(workers, longest_wait_s=8.0)
    Simulation(policy, workers, jobs, report_s=0.1).run()
    assert [each.outcome for each in jobs] == ["done"] * 40
    assert {each.worker for each in jobs} == {0, 1}
    while policy.service.learner.learn():
        pass
    assert policy.service.counts.admitted == 40 and policy.service.learner.num_learnt >= 39
    assert set(policy.meter.parts) <= set(PARTS)
    for part in ("wire", "predict", "offer", "tick", "reports", "learn, running", "learn, ends"):
        assert policy.meter.parts[part] > 0, part
