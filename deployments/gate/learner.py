"""Trains the gate's predictor from ends of answers and from progress in worker reports.

Reports list every tenth of a second how far each answer is. Here it is only noted which are due;
learning is done in pieces while the process is idle, from all that gathers in a second:
several answers cost less at once, and one that grows meanwhile is learnt from once.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np

from penstock.deployments.gate.types import Running
from penstock.deployments.gate.wire import features_from
from penstock.deployments.prediction.conformal import LEVELS, coverage
from penstock.deployments.prediction.distribution import LengthDistribution
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.predictor import LengthPredictor, Watch, distribution_of
from penstock.deployments.prediction.residual import words_of
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

log = logging.getLogger("penstock.gate")

MAX_LABELS = 4096  # labels in the queue; older ones are dropped
MAX_ENDS_AT_ONCE = 16  # some 2 ms
MAX_AT_ONCE = 64  # running answers: some 2 ms
# In which a running answer gains some 40 tokens. Twice as long, and more requests are refused in
# the case `overload` of benchmarks/gate/request_cost.py; half as long, and no fewer.
GATHER_S = 1.0
COVERAGE_WEIGHT = 0.01  # of the newest answer


class GateLearner:
    """Feeds one predictor."""

    def __init__(self, predictor: LengthPredictor) -> None:
        self.predictor = predictor
        self.coverage = np.array(LEVELS)
        self.num_learnt = 0
        self.labels: deque[pb.Label] = deque(maxlen=MAX_LABELS)
        self._running: dict[str, Watch] = {}
        self._over: OrderedDict[str, Watch] = OrderedDict()  # ended, label not received yet
        self._due: OrderedDict[str, int] = OrderedDict()  # tokens of each answer to learn from
        self._rested_s = 0.0  # when running answers were last learnt from

    def watch(self, request_id: str, features: Features) -> None:
        """Follow a request that will run; one that a worker declined is known already."""
        if request_id not in self._running:
            self._running[request_id] = Watch(features)

    def progress(self, running: Iterable[Running]) -> None:
        """Note the progress of running answers; learns nothing yet."""
        for each in running:
            watch = self._running.get(each.request_id)
            if watch is not None and watch.is_due(each.generated):
                self._due[each.request_id] = each.generated

    def ended(self, request_id: str) -> None:
        """It ended: the rest is learnt from its label, if one comes."""
        self._due.pop(request_id, None)
        watch = self._running.pop(request_id, None)
        if watch is not None and watch.counted:
            self._over[request_id] = watch
            while len(self._over) > MAX_LABELS:
                self._over.popitem(last=False)

    def learn(self) -> bool:
        """Learn from some labels, or the progress of some answers; False if there are none."""
        if self.labels:
            num = min(len(self.labels), MAX_ENDS_AT_ONCE)
            self._take([self.labels.popleft() for _ in range(num)])
        elif self._due:
            num = min(len(self._due), MAX_AT_ONCE)
            due = [self._due.popitem(last=False) for _ in range(num)]
            self.predictor.progress_all([(self._running[name], out) for name, out in due])
        else:
            return False
        return True

    def learn_for(self, seconds: float) -> bool:
        """Learn for so long at most; whether there is more."""
        until_s = time.monotonic() + seconds
        while self.learn():
            if time.monotonic() >= until_s:
                return True
        return False

    def learn_due(self, seconds: float, now: float) -> None:
        """`learn_for`, at most once every GATHER_S: several answers cost less at once."""
        if now - self._rested_s >= GATHER_S and not self.learn_for(seconds):
            self._rested_s = now

    def _take(self, labels: Sequence[pb.Label]) -> None:
        known: list[tuple[pb.Label, Features]] = []
        for label in labels:
            try:
                features = features_from(label.features)
                words_of(features)  # what they say can be read
                known.append((label, features))
            except ValueError as error:
                log.debug("ignoring an invalid label: %s", error)
        for (label, features), steps in zip(
            known, self.predictor.steps_of([features for _, features in known])
        ):
            self.ended(label.request_id)  # a label may arrive before the end
            watch = self._over.pop(label.request_id, None)
            try:
                self.predictor.observe_predicted(features, steps, label.length, label.ended, watch)
            except ValueError as error:
                log.debug("ignoring an invalid label: %s", error)
                continue
            self.num_learnt += 1
            if not features.ignore_eos:
                self._cover(distribution_of(features, steps.cumulative), label)

    def _cover(self, distribution: LengthDistribution, label: pb.Label) -> None:
        """Whether the quantiles held that were predicted just before it was learnt from."""
        held = coverage(distribution, label.length, label.ended == "stop", label.ended == "cancel")
        for i, hit in enumerate(held):
            if hit is not None:
                self.coverage[i] += COVERAGE_WEIGHT * (hit - self.coverage[i])
