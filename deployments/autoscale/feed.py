"""What the policies read: figures of the gate and the registry, fetched once a second in a thread.

The policies run in Serve's controller, on the loop that keeps all replicas alive: they must never
wait for an answer.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from penstock.deployments.gate.actor import gate_name
from penstock.deployments.gate.load_meter import GateLoad
from penstock.deployments.placement import INGRESS_RESOURCE
from penstock.deployments.supervision.actors import CALL_TIMEOUT_S, NAMESPACE
from penstock.deployments.supervision.registry import RegistryClient
from penstock.deployments.supervision.view import ClusterView, ScaleReport

log = logging.getLogger("penstock.autoscale")

INTERVAL_S = 1.0
STALE_S = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What one turn has fetched."""

    at_s: float  # monotonic
    view: ClusterView
    load: GateLoad | None  # None: the gate did not answer
    num_ingress_nodes: int  # living nodes with the resource for an ingress


class LoadFeed:
    """The newest sample of one application. Its thread ends once nothing refers to the feed."""

    def __init__(self, app_name: str, gate_scope: str | None):
        """`gate_scope`: of the gate to ask, as gate_name takes it; None: no gate is asked."""
        self._gate_scope = gate_scope
        self._registry = RegistryClient(app_name)
        self._sample: Sample | None = None
        self._reports: list[ScaleReport] = []
        self._lock = threading.Lock()
        # Serve makes a new policy, with a feed, at each deployment, and drops the one before.
        threading.Thread(
            target=_run, args=(weakref.ref(self),), name="penstock-load", daemon=True
        ).start()

    def latest(self) -> Sample | None:
        """The newest sample; None: it is older than `STALE_S`, or there is none."""
        sample = self._sample
        return sample if sample and time.monotonic() - sample.at_s < STALE_S else None

    def report(self, report: ScaleReport) -> None:
        """Have the registry show this decision; sent with the next turn."""
        with self._lock:
            self._reports.append(report)

    def turn(self) -> None:
        """Fetch a sample and send the reports. Raises what Ray raises."""
        with self._lock:
            reports, self._reports = self._reports, []
        view: ClusterView = self._registry.call_now("scaled", reports)
        self._sample = Sample(time.monotonic(), view, self._load(), _num_ingress_nodes())

    def _load(self) -> GateLoad | None:
        if self._gate_scope is None:
            return None
        try:
            gate = ray.get_actor(gate_name(self._gate_scope), namespace=NAMESPACE)
            load: GateLoad = ray.get(gate.load.remote(), timeout=CALL_TIMEOUT_S)
        except (RayError, TimeoutError, ValueError) as error:
            log.debug("the gate does not answer the autoscaler: %s", type(error).__name__)
            return None
        return load


def _run(feed_ref: weakref.ref[LoadFeed]) -> None:
    while True:
        began_s = time.monotonic()
        feed = feed_ref()
        if feed is None:
            return
        try:
            feed.turn()
        except Exception as error:  # if this thread ended, the policies would hold for ever
            # As text: a record that kept the error would keep its frames, and in them the feed.
            log.debug("no figures for the autoscaler: %s: %s", type(error).__name__, str(error))
        del feed
        time.sleep(max(0.0, began_s + INTERVAL_S - time.monotonic()))


def _num_ingress_nodes() -> int:
    return sum(
        node["Alive"] and node["Resources"].get(INGRESS_RESOURCE, 0) > 0 for node in ray.nodes()
    )
