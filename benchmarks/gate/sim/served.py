"""The gate's service as a policy of the simulator: messages in, messages out, and what each costs.

Everything that the gate's process does for a request but Ray and the connection itself: messages
are encoded and decoded as on the wire, offers carry the features of their text, workers report
within 0.1 s of a change and once a second, and the predictor learns from running and ended answers
in the pauses. All requests ask; none is admitted on credit.
"""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gate.sim.policies import Decision, Policy
from benchmarks.gate.sim.worker import Job
from penstock.deployments.gate.service import GateService
from penstock.deployments.gate.types import GateSetup, Report
from penstock.deployments.gate.wire import features_message, text_message
from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.deployments.prediction.snapshot import snapshot
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

INGRESS = "ingress"
REPORT_S = 1.0  # without a change
BEAT_S, LEARN_S, SNAPSHOT_S = 0.25, 0.05, 60.0  # as server.py has them
CALLS = {  # of the gate, the learner and the predictor, and the parts that they belong to
    "predict": ("learner.predictor.predict_both",),
    "offer": ("gate.offer", "gate.confirm", "gate.admit"),
    "tick": ("gate.tick",),
    "learn, running": ("learner.predictor.progress_all",),
}
PARTS = (
    *("wire", "predict", "offer", "tick", "reports", "ends", "learn, running", "learn, ends"),
    *("replies", "snapshots", "rest"),
)


class CpuMeter:
    """CPU seconds of this process by part; a part within another one is not counted twice."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def within(self, part: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self._turn()
        self._open.append(part)
        try:
            return call(*args, **named)
        finally:
            self._turn()
            self._open.pop()

    def wrap(self, owner: Any, path: str, part: str) -> None:
        """From now on the method at `path` counts as that part."""
        *above, name = path.split(".")
        for each in above:
            owner = getattr(owner, each)
        call = getattr(owner, name)
        setattr(owner, name, lambda *args, **named: self.within(part, call, *args, **named))

    def _turn(self) -> None:
        now = time.process_time()
        if self._open:
            self.parts[self._open[-1]] += now - self._since
        self._since = now


@dataclass
class Served(Policy):
    """GateService, driven by messages."""

    longest_wait_s: float | None = None
    meter: CpuMeter = field(default_factory=CpuMeter)
    wants_reports = True

    def __post_init__(self) -> None:
        self._sent = pb.ToIngress()
        setup = GateSetup(longest_wait_s=self.longest_wait_s)
        self.service = GateService(setup, LengthPredictor(), lambda _: self._sent, 0.0)
        self.service.ingress_joined(INGRESS)
        for part, paths in CALLS.items():
            for path in paths:
                self.meter.wrap(self.service, path, part)
        self._jobs: dict[str, Job] = {}
        self._decided: list[Decision] = []
        self._number = 0
        self._listed: list[tuple[float, object]] = [(-REPORT_S, None)] * len(self.workers)
        self._next = {"beat": BEAT_S, "learn": LEARN_S, "save": SNAPSHOT_S}
        for each in self.workers:
            each.victim = "largest"

    @property
    def num_waiting(self) -> int:
        return self.service.num_waiting + len(self.service.inbox) + len(self._decided)

    def arrive(self, job: Job, now: float) -> str | None:
        self._jobs[job.job_id] = job
        self._receive("rest", self._offer(job), now)
        return None

    def tick(self, now: float) -> list[Decision]:
        self.meter.within("rest", self._judge, now)
        self._reply(now)
        decided, self._decided = self._decided, []
        return decided

    def declined(self, job: Job, now: float) -> None:
        message = self._offer(job)
        message.declined.append(job.job_id)
        self._receive("rest", message, now)

    def completed(self, job: Job, now: float) -> None:
        message = pb.FromIngress()
        message.ended.add(request_id=job.job_id, generated=job.generated)
        message.labels.add(
            features=features_message(job.features),
            length=job.generated,
            ended=job.ended,
            request_id=job.job_id,
        )
        self._receive("ends", message, now)

    def report(self, worker: int, report: Report, now: float) -> None:
        """To be called every 0.1 s."""
        self._meanwhile(now)
        sent_s, before = self._listed[worker]
        listed = ({each.request_id for each in report.running}, report.num_preemptions)
        if listed == before and now - sent_s < REPORT_S:
            return
        self._listed[worker] = (now, listed)
        self._receive("reports", self._report_message(worker, report), now)

    def _offer(self, job: Job) -> pb.FromIngress:
        features = features_message(job.features)
        message = pb.FromIngress(texts=[text_message(job.job_id, features)])
        features.ClearField("text_keys")
        features.ClearField("text_facts")
        message.offers.add(request_id=job.job_id, features=features, prefix=job.prefix)
        return message

    def _report_message(self, index: int, report: Report) -> pb.FromIngress:
        shape, message = self.workers[index].shape, pb.FromIngress()
        sent = message.reports.add(address=f"worker-{index}", epoch=index + 1)
        columns = sent.report
        columns.num_blocks = shape.num_blocks - int(shape.watermark * shape.num_blocks)
        columns.block_size, columns.max_num_seqs = shape.block_size, shape.slots
        columns.sequence, columns.step_s = report.sequence, report.step_s
        columns.num_preemptions = report.num_preemptions
        columns.request_ids.extend(each.request_id for each in report.running)
        columns.generated.extend(each.generated for each in report.running)
        columns.prompt_tokens.extend(each.prompt_tokens for each in report.running)
        columns.max_tokens.extend(each.max_tokens or 0 for each in report.running)
        return message

    def _receive(self, part: str, message: pb.FromIngress, now: float) -> None:
        self._number += 1
        message.number = self._number
        data = message.SerializeToString()  # by the ingress
        decoded = self.meter.within("wire", pb.FromIngress.FromString, data)
        self.meter.within(part, self.service.receive, INGRESS, decoded, now)
        self._reply(now)

    def _judge(self, now: float) -> None:
        while self.service.judge_next(now):
            pass
        self.service.tick(now)

    def _reply(self, now: float) -> None:
        """Send what has gathered, with the credits that each message renews."""
        message, self._sent = self._sent, pb.ToIngress()
        if not message.ByteSize():
            return
        credits = self.meter.within("replies", self.service.credits, INGRESS, now)
        self.meter.within("wire", message.credits.CopyFrom, credits)
        self.meter.within("wire", message.SerializeToString)
        for ticket in message.tickets:
            self._decided.append((self._jobs[ticket.request_id], ticket.epoch - 1))
        for refusal in message.refusals:
            self._decided.append((self._jobs[refusal.request_id], refusal.reason))

    def _meanwhile(self, now: float) -> None:
        """What the process does by the clock."""
        while self._next["learn"] <= now:
            self._next["learn"] += LEARN_S
            self.meter.within("learn, ends", self.service.learner.learn_due, math.inf, now)
        while self._next["beat"] <= now:
            self._next["beat"] += BEAT_S
            self.meter.within("replies", self._beat)
            self.meter.within("rest", self.service.tick, now)
            self._reply(now)
        while self._next["save"] <= now:
            self._next["save"] += SNAPSHOT_S
            self.meter.within("snapshots", self._save)

    def _beat(self) -> None:
        self._sent.figures.CopyFrom(self.service.figures())

    def _save(self) -> None:
        snapshot(copy.deepcopy(self.service.learner.predictor))
