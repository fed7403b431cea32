"""The policies as Ray Serve calls them: ten times a second, in its controller.

Serve pickles this module by value and imports the others on the head node. An exception here would
stop the controller's work for all applications, so each call ends in a number. app.py names the
classes in `autoscaling_config`.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from penstock.deployments.autoscale.feed import LoadFeed, Sample
from penstock.deployments.autoscale.forecast import ForecastConfig
from penstock.deployments.autoscale.ingress_policy import IngressState, decide_ingresses
from penstock.deployments.autoscale.policy import decide
from penstock.deployments.autoscale.starts import PRIOR_S, StartTimes
from penstock.deployments.autoscale.types import Decision, PolicyConfig, PolicyState, Signals
from penstock.deployments.supervision.view import ScaleReport

log = logging.getLogger("penstock.autoscale")

DECIDE_S = 1.0
BATCH_DUE_S = 86_400.0  # the window of a batch: it raises the number only as far as that needs
FAILURES_S = 600.0  # failed starts count for this long


class _Scaling(ABC):
    """Decides the number of replicas of one deployment, once a second."""

    def __init__(self, app_name: str, gate_scope: str | None):
        self._feed = LoadFeed(app_name, gate_scope)
        self._decided_s = float("-inf")
        self._number: int | None = None

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: ray.serve.config.AutoscalingContext. Returns the number, and no state."""
        now = time.monotonic()
        if self._number is None or now - self._decided_s >= DECIDE_S:
            self._decided_s = now
            try:
                self._number = self._decide(context, self._feed.latest(), now)
            except Exception:
                log.exception("the autoscaling policy failed: the number of replicas stays")
                self._number = context.target_num_replicas
        return self._number, {}

    @abstractmethod
    def _decide(self, context: Any, sample: Sample | None, now: float) -> int:
        """The number of replicas wanted at `now`. `sample` None: there are no recent figures."""

    def _report(self, context: Any, number: int, kind: str, reason: str) -> None:
        self._feed.report(
            ScaleReport(
                deployment=context.deployment_name,
                number=number,
                ready=context.current_num_replicas,
                minimum=context.capacity_adjusted_min_replicas,
                maximum=context.capacity_adjusted_max_replicas,
                kind=kind,
                reason=reason,
                at=time.time(),
            )
        )


class WorkerScaling(_Scaling):
    """As many workers as the gate's load needs (policy.py)."""

    def __init__(
        self,
        app_name: str,
        start_s: float = PRIOR_S,
        gate_scope: str | None = None,
        **policy: Any,
    ):
        """`start_s`: start-up time of a worker, before one was observed. `gate_scope`: of the
        model's gate, where there are several models. `policy`: fields of PolicyConfig, those of
        its forecast as a mapping; the bounds are Serve's."""
        super().__init__(app_name, gate_scope or app_name)
        self._is_of_several = gate_scope is not None
        forecast = ForecastConfig(**policy.pop("forecast", {}))
        self._policy = {**policy, "forecast": forecast}
        self._state: PolicyState | None = None
        self._starts = StartTimes(start_s)
        self._failures: deque[tuple[float, int]] = deque()  # when, and their number until then

    def _decide(self, context: Any, sample: Sample | None, now: float) -> int:
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        config = PolicyConfig(min_workers=low, max_workers=max(high, 1), **self._policy)
        self._starts.observe(context.target_num_replicas, context.current_num_replicas, now)
        if self._state is None:  # at the first decision, also after a restart of the controller
            self._state = PolicyState(number=context.target_num_replicas)
        decision = decide(self._signals(context, sample, now), self._state, now, config)
        self._state = decision.state
        self._log(decision, context.target_num_replicas)
        self._report(context, decision.number, decision.kind, decision.reason)
        return decision.number

    def _signals(self, context: Any, sample: Sample | None, now: float) -> Signals | None:
        if sample is None or sample.load is None:
            return None
        load, ready = sample.load, context.current_num_replicas
        return Signals(
            gate_epoch=load.gate_epoch,
            offered_work_s=load.offered_work_s,
            offered_kv_s=load.offered_kv_s,
            backlog_s=load.backlog_s,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            oldest_wait_s=load.oldest_wait_s,
            ready=ready,
            starting=max(context.target_num_replicas - ready, 0),
            start_s=self._starts.start_s,
            failed_starts=self._failed_starts(self._num_failures(context, sample), now),
            batch_work_s=load.batch_work_s,
            batch_due_s=BATCH_DUE_S if load.batch_work_s else math.inf,
        )

    def _num_failures(self, context: Any, sample: Sample) -> int:
        """Of all replicas; of several models, of this one's workers."""
        if self._is_of_several:
            return dict(sample.view.failures_of).get(context.deployment_name, 0)
        return sample.view.num_failures

    def _failed_starts(self, num_failures: int, now: float) -> int:
        """Failed starts of the last ten minutes. `num_failures`: ever, by the registry's count."""
        failures = self._failures
        if not failures or failures[-1][1] != num_failures:
            failures.append((now, num_failures))
        while len(failures) > 1 and now - failures[1][0] > FAILURES_S:
            failures.popleft()
        return max(num_failures - failures[0][1], 0)

    def _log(self, decision: Decision, target: int) -> None:
        if decision.number != target:
            log.warning("workers: %s", decision.reason)


class IngressScaling(_Scaling):
    """One ingress on each ingress node, and enough for the connections (ingress_policy.py)."""

    def __init__(self, app_name: str):
        super().__init__(app_name, None)
        self._state = IngressState()

    def _decide(self, context: Any, sample: Sample | None, now: float) -> int:
        if sample is None:
            return int(context.target_num_replicas)
        connections = sum(each.num_connections for each in sample.view.ingresses)
        number, reason, self._state = decide_ingresses(
            sample.num_ingress_nodes, connections, self._state, now
        )
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        number = min(max(number, low), high)
        kind = "hold" if number == context.target_num_replicas else "change"
        self._report(context, number, kind, reason)
        return number
