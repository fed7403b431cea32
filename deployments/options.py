"""The settings of a cluster in groups, as `--help` and the reference show them.

`ServeConfig` (config.py) inherits from all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from penstock.workers.settings import option

AUTO_FILE = "auto"  # as predictor_file: a file in the user's state folder
ANY_NAME = "*"  # among served_model_name: requests may have any name


@dataclass(frozen=True, kw_only=True)
class ServedModelOptions:
    """How clients see the model."""

    GROUP: ClassVar[str] = "model"

    served_model_name: str | tuple[str, ...] | None = option(
        None,
        "names of the model in the API, in YAML a list; answers bear the first; '*' among them: "
        "requests may have any name; none: the last part of the model's path or id",
        is_list=True,
    )
    reasoning_marks: str | None = option(
        "auto",
        "marks around a model's reasoning, which chat answers return in a separate field; auto: "
        "the published marks that its chat template or tokenizer contains; none: no separation; "
        "the name of a model's reasoning in vLLM, as qwen3; or two marks, as '<think> </think>'",
    )
    tool_call_parser: str = option(
        "auto",
        "form in which the model writes tool calls; auto: the form that its chat template shows; "
        "plain: tools are described in the system message, and calls are in the form of Hermes; or "
        "a form by name (docs/guide/tool-calls.md)",
    )


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where clients and Prometheus connect."""

    GROUP: ClassVar[str] = "listeners"

    host: str = option(
        "127.0.0.1", "address to listen on for HTTP and gRPC; 0.0.0.0: all interfaces"
    )
    http_port: int = option(8000, "port of the OpenAI-compatible HTTP API", min=1, max=65535)
    grpc_port: int = option(8001, "port of the gRPC API", min=1, max=65535)
    api_keys_file: str | None = option(
        None,
        "file with one API key a line, which `penstock keys` makes; read again when it changes; "
        "none: every client that can reach the ports is served (docs/operations/security.md)",
    )
    max_connections: int | None = option(
        None,
        "maximum HTTP connections of one ingress; at this number the connection that has been idle "
        "for longest is closed for a new one; none: the limit of open files less 256",
        min=8,
    )
    max_connections_per_address: int | None = option(
        None,
        "maximum HTTP connections from one address (IPv6: one /64 network); raise it where a proxy "
        "brings all clients; none: half of max_connections",
        min=1,
    )
    unknown_fields: Literal["ignore", "refuse"] = option(
        "ignore",
        "what an HTTP request gets that has fields which are not served; ignore: an answer without "
        "them, which names them in the header x-penstock-ignored-fields; refuse: an error",
    )
    metrics_port: int = option(
        9400,
        "port of the Prometheus metrics; further ingress replicas on a machine use the next free "
        "ports; 0: no metrics",
        min=0,
        max=65535,
    )
    metrics_host: str = option(
        "127.0.0.1", "address to listen on for metrics, which need no API key"
    )
    api_metrics: bool = option(
        False,
        "serve /metrics, /ping and /load on http_port, too; there /metrics and /load need an API "
        "key with the role metrics. Where ingress replicas share the port, each scrape has the "
        "counts of one of them",
    )


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    """Who may connect, and what tenants share."""

    GROUP: ClassVar[str] = "security"

    insecure: bool = option(
        False,
        "serve without API keys also where other machines can connect (host), and on a Ray cluster "
        "without token authentication; else such a server does not start",
    )
    tls_cert_file: str | None = option(
        None,
        "file with the certificate of HTTP and gRPC, in PEM, with those of intermediate CAs below "
        "it; a new one is taken within 10 s; none: no TLS (penstock certs init makes one)",
    )
    tls_key_file: str | None = option(
        None, "file with the key of tls_cert_file, in PEM, closed to other users"
    )
    tls_client_ca_file: str | None = option(
        None,
        "file with the CAs that sign the certificates of clients, in PEM: a client without one is "
        "refused; none: clients need none",
    )
    cluster_certs_dir: str | None = option(
        None,
        "folder with the certificates of the cluster's own processes, as penstock certs init makes "
        "it, on each machine: TLS between ingress, worker and gate, each of which proves its role; "
        "none: these connections are not encrypted",
    )
    allowed_hosts: str | None = option(
        None,
        "with loopback as host and no API keys: further names, with commas between them, under "
        "which clients reach this server (a tunnel, a proxy); others are refused, because a web "
        "page can give itself a name that leads here",
    )
    allowed_origins: str | None = option(
        None,
        "origins of web pages that may use the HTTP API from a browser (CORS), with commas between "
        "them, as https://app.example.com, or * for all, which needs API keys; none: a page of "
        "another origin cannot read answers",
    )
    prefix_sharing: Literal["tenant", "all"] = option(
        "tenant",
        "who shares the prefix cache; tenant: requests with keys of the same tenant; all: every "
        "request, so that a client can find out by the time of an answer what others have asked",
    )


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Where the traces of requests go."""

    GROUP: ClassVar[str] = "traces"

    otlp_traces_endpoint: str | None = option(
        None,
        "address to which each ingress sends OpenTelemetry traces of its requests, by OTLP over "
        "HTTP, as http://collector:4318 (/v1/traces is added where there is no path); needs "
        "pip install 'penstock[otel]'; none: no traces (docs/operations/tracing.md)",
    )
    otlp_traces_sample_ratio: float = option(
        1.0,
        "share of the requests that are traced, 0 to 1; for a request with a traceparent header "
        "the caller has decided, and this share does not count",
        min=0,
        max=1,
    )


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """How many replicas there are."""

    GROUP: ClassVar[str] = "replicas and machine"

    num_workers: int | str = option(
        1,
        "worker replicas, N or MIN:MAX; each has one GPU, or an equal share of a machine's CPUs; "
        "MIN:MAX: as many as the waiting and expected requests need; a minimum of 0 stops all "
        'workers while there are no requests (quote it in YAML: "1:8")',
        min=1,
        is_range=True,
    )
    num_ingress: int | str = option(
        1,
        "ingress replicas, N or MIN:MAX; those on one machine share the HTTP and gRPC ports; "
        "MIN:MAX: one on each node with the Ray resource penstock_ingress, more as connections "
        "need them",
        min=1,
        is_range=True,
    )
    cpus_per_worker: float | None = option(
        None,
        "CPUs that Ray reserves for each worker without a GPU, and its threads; none: an equal "
        "share of the smallest node that has CPUs now",
        above=0,
    )
    scale_down_after_s: float = option(
        200.0,
        "with num_workers MIN:MAX: seconds for which fewer workers would have sufficed, before one "
        "is stopped; 1.5 times the time that a worker takes to start, if that is longer",
        min=0,
    )
    scale_to_zero_after_s: float = option(
        600.0,
        "with num_workers 0:MAX: seconds without requests before the last worker is stopped; three "
        "times the time that a worker takes to start, if that is longer",
        min=0,
    )
    target_wait_s: float | None = option(
        None,
        "with num_workers MIN:MAX: seconds that a request may wait for a worker before more are "
        "started; none: longest_wait_s, or 5",
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class AdmissionOptions:
    """When a request may run, and when it waits or is refused."""

    GROUP: ClassVar[str] = "admission"

    admission: Literal["predicted", "reserve_max", "optimistic"] = option(
        "predicted",
        "when a request is admitted to a worker; predicted: when its predicted peak of KV memory "
        "fits; reserve_max: when its longest possible answer fits; optimistic: at once, and "
        "workers preempt when memory runs out (docs/design/gate.md)",
    )
    max_queued: int = option(
        1024, "maximum requests that wait at the gate; more are refused", min=1
    )
    max_open_requests: int = option(
        4096,
        "maximum requests of all clients that one ingress has at a time, HTTP and gRPC together; "
        "more are refused with overloaded before they are read",
        min=1,
    )
    max_open_mb: int = option(
        256, "maximum MiB of bodies that the open requests of one ingress have together", min=8
    )
    longest_wait_s: float | None = option(
        None,
        "refuse a request at once if it would wait longer than this many seconds, and one that has "
        "waited as long all the same; none: only its own deadline counts",
        above=0,
    )
    wait_timeout_s: float | None = option(
        None,
        "seconds in which a worker must begin a request, and again after the loss of its worker; "
        "else it ends with deadline_exceeded; a request that has begun is not limited; none: 120, "
        "or 600 where all workers may be stopped (num_workers 0:MAX)",
        above=0,
    )
    lost_wait_s: float = option(
        30.0,
        "seconds that a request whose worker was lost waits for another worker, on which it "
        "continues; then it ends with the error worker_lost",
        min=0,
    )
    gate_answer_ms: float | None = option(
        None,
        "milliseconds in which the gate must answer, before an ingress decides about a request "
        "without it; none: 20, or 200 on machines where workers compute on the CPUs",
        above=0,
    )
    predictor_file: str | None = option(
        AUTO_FILE,
        "file that keeps the learnt answer lengths across restarts; auto: one of the application "
        "and the model in $XDG_STATE_HOME/penstock, else ~/.local/state/penstock, of the machine "
        "where the gate runs; none: they are lost when the cluster ends",
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Files and batches that clients create."""

    GROUP: ClassVar[str] = "files and batches"

    data_dir: str | None = option(
        None,
        "folder for uploaded files and for batches, on storage that all ingresses share; none: "
        "/v1/files and /v1/batches are refused",
    )


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """Where that is kept which must survive a process."""

    GROUP: ClassVar[str] = "state"

    state_url: str | None = option(
        None,
        "store for what must survive a process, as journals from which cut streams are continued: "
        "sqlite:///FOLDER (one ingress), redis://HOST:PORT/DB, or rediss:// for TLS; none: a "
        "stream ends with its connection",
    )
    state_password_file: str | None = option(
        None, "file with the password of Redis, read at each connect; none: no password"
    )
    state_prefix: str = option(
        "penstock:", "beginning of all keys in Redis, for its ACL and for several clusters"
    )
    state_ca_file: str | None = option(
        None,
        "file with the certificates that sign that of Redis, in PEM; none: those of the system",
    )
    state_cert_file: str | None = option(
        None, "file with the certificate shown to Redis, in PEM; none: no client certificate"
    )
    state_key_file: str | None = option(None, "file with the key of state_cert_file, in PEM")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Ray, logs and shutdown."""

    GROUP: ClassVar[str] = "cluster"

    ray_address: str | None = option(
        None,
        "address of the Ray cluster to use; auto: the one running on this machine; none: start "
        "Ray here",
    )
    ray_dir: str | None = option(
        None,
        "folder for Ray's files and logs, if Ray is started here; none: a temporary folder, "
        "removed at exit",
    )
    app_name: str = option("penstock", "name of the Ray Serve application")
    drain_s: float = option(30.0, "seconds that running requests have to finish at shutdown", min=0)
    surge_percent: int = option(
        0,
        "in a rolling update, workers that start before old ones stop, in percent of num_workers; "
        "they need free GPUs or CPUs; 0: old ones stop first, one at a time",
        min=0,
        max=100,
    )
    drain_notice_s: float = option(
        0.0,
        "seconds, before drain_s, in which an ingress that stops is not ready and still serves, "
        "for a load balancer to notice; 15 behind one; 0: clients connect to the ingress itself",
        min=0,
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe level to log"
    )
