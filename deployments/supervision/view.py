"""The registry's view of a cluster: nodes, replicas, and scaling decisions."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.workers.progress import PHASES, Progress
from penstock.workers.stats import EngineStats, WorkerInfo

EXPIRY_S = 3.0  # without a heartbeat: no longer listed


@dataclass(frozen=True, slots=True)
class JobReport:
    """A batch that runs outside the server, by its own report."""

    job: str
    number: int  # of the report
    owner: str  # whose API key it was sent with
    name: str  # of its input
    host: str
    state: str  # running, finished, interrupted, failed
    num_lines: int
    num_completed: int
    num_failed: int
    num_in_flight: int
    cause: str  # why requests are sent again; empty: none are
    at: float  # seconds since 1970, by the clock of the ingress that got it


@dataclass(frozen=True, slots=True)
class OperatorWarning:
    """Something that limits a process now. `detail`: the cause, for the operator's terminal; it may
    have addresses and paths, `text` has none."""

    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class IngressInfo:
    """One ingress replica: its addresses, its connections, and its deployment."""

    ingress_id: str
    pid: int
    http_address: str
    grpc_address: str
    num_workers: int
    metrics_address: str = ""  # none if metrics are off
    num_connections: int = 0  # of HTTP clients, and gRPC calls that run
    node: str = ""  # of the cluster, on which it runs
    is_draining: bool = False  # it finishes its requests, then ends
    generation: int = 0  # of the deployment that it belongs to
    digest: str = ""  # of that deployment's settings
    jobs: tuple[JobReport, ...] = ()  # that it got in the last minute
    # The models' own, in words, each with its model's name; empty: they have none.
    sampling_defaults: tuple[tuple[str, str], ...] = ()
    # What an operator should know of tool calls, each with its model's name.
    tool_notes: tuple[tuple[str, str], ...] = ()
    workers_of: tuple[tuple[str, int], ...] = ()  # `num_workers` by the name of their model
    lacks_gate: bool = False  # it is not connected with the gate of each model that has one
    num_waiting: int = 0  # of its requests, at the gates
    warnings: tuple[OperatorWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A living node of the Ray cluster."""

    node: str  # the beginning of its id
    num_cpus: float
    num_gpus: float
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class ScaleReport:
    """A decision of the autoscaler about one deployment, with its reason."""

    deployment: str  # "Ingress", "Worker", or with several models "Worker-" and its name
    number: int  # replicas wanted
    ready: int
    minimum: int
    maximum: int
    kind: str  # "up", "down", "hold", ...
    reason: str
    at: float  # seconds since 1970


@dataclass(frozen=True, slots=True)
class StartingWorker:
    """A worker that fetches or loads the model."""

    node: str  # of the cluster, on which it runs
    pid: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All live processes, by their last heartbeats."""

    workers: tuple[tuple[WorkerInfo, EngineStats], ...] = ()
    ingresses: tuple[IngressInfo, ...] = ()
    failures: tuple[str, ...] = ()  # messages of the last replicas that could not start
    num_failures: int = 0  # all of them
    failures_of: tuple[tuple[str, int], ...] = ()  # and of each deployment
    is_draining: bool = False  # the cluster stops: ingresses accept no new requests
    pid: int = 0  # of the registry itself
    scaling: tuple[ScaleReport, ...] = ()  # the last decision for each autoscaled deployment
    scale_changes: tuple[ScaleReport, ...] = ()  # the last ones that changed a number, oldest first
    nodes: tuple[NodeInfo, ...] = ()
    starting: tuple[StartingWorker, ...] = ()

    @property
    def start(self) -> Progress | None:
        """Of all workers that start: the earliest phase of any, with the bytes of all that are in
        it; None: none starts."""
        phases = [each.progress.phase for each in self.starting]
        phase = min(phases, key=PHASES.index, default=None)
        if phase is None:
            return None
        of_phase = [each.progress for each in self.starting if each.progress.phase == phase]
        return Progress(
            phase, sum(each.done for each in of_phase), sum(each.total for each in of_phase)
        )


def short_node(node_id: str) -> str:
    """The beginning of a node's id, by which people tell nodes apart."""
    return node_id[:8]
