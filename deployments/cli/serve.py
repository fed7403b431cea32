"""`penstock serve`: start a cluster, print its state, and stop it at a signal.

Ray is imported after the configuration has been checked, as the import takes seconds.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from penstock.deployments.cli.signals import (
    PATIENCE_S,
    START_PATIENCE_S,
    Interrupted,
    Signals,
)
from penstock.deployments.cli.throughput import Throughput
from penstock.deployments.config import LOOPBACK, ServeConfig
from penstock.deployments.preflight import check_before_start
from penstock.deployments.supervision.ray_workarounds import driver_environment
from penstock.workers.errors import ConfigError
from penstock.workers.weights.hub import is_hub_id

if TYPE_CHECKING:
    from penstock.deployments.cluster import Cluster
    from penstock.deployments.supervision.view import ClusterView
    from penstock.workers.stats import EngineStats, WorkerInfo

WATCH_S = 0.25


def run_serve(config: ServeConfig) -> int:
    """Run a cluster until a signal ends it; the exit status. Raises ConfigError or StartError."""
    config = config.with_absolute_paths()
    check_before_start(config)
    _prepare_environment(config)
    began_s = time.monotonic()
    _say(f"Penstock {version('penstock')} serves {config.engine.model} as {config.model_name!r}")
    if config.is_open:
        _say(
            f"WARNING: no API keys, and {config.host} is not loopback: every machine that can "
            "reach it can use this server. Write keys into a file, and pass it as --api-keys-file."
        )
    cluster: Cluster | None = None
    is_local = config.ray_address is None
    signals = Signals(
        give_up=lambda: cluster.stop_at_once() if cluster is not None else None,
        # An application is removed from a cluster that exists by asking it.
        start_patience_s=START_PATIENCE_S if is_local else PATIENCE_S,
    )
    try:
        _say("starting Ray" if is_local else f"connecting to Ray at {config.ray_address}")
        from penstock.deployments.cluster import Cluster

        cluster = Cluster(config)
        cluster.start_ray()
        signals.take_over()
        fetch = ", from the hub unless it is here" if is_hub_id(config.engine.model) else ""
        _say(f"loading the model{fetch} ({time.monotonic() - began_s:.1f} s so far)")
        cluster.deploy()
        earlier = frozenset(info.address for info, _ in cluster.view().workers)
        if earlier:
            _say("an earlier deployment serves until its replicas are replaced, in turn")
        cluster.wait_until_up(_WorkerProgress(config.min_workers, earlier).report)
        signals.may_break_off = False
        _say(f"ready after {time.monotonic() - began_s:.1f} s{_weights(cluster.view())}")
        view = cluster.view()
        new = [each for each in view.workers if each[0].address not in earlier]
        _say(effective_settings(config, new))
        for each in sorted({info.sampling_defaults for info in view.ingresses} - {""}):
            _say(f"requests that do not say otherwise: {each} (the model's generation_config.json)")
        for note in sorted({info.tool_note for info in view.ingresses} - {""}):
            _say(note)
        _say(_welcome(config, view))
        _watch(cluster, config, signals)
        cluster.drain(is_hurried=lambda: signals.num_seen > 1)
    except (Interrupted, SystemExit):  # Ray, while it starts, turns SIGTERM into SystemExit
        if is_local:  # Ray's own shutdown takes seconds
            signals.exit_now()
        return 130
    finally:
        signals.may_break_off = False  # the clean-up must not be interrupted
        if cluster is not None:
            cluster.stop()
    _say("stopped")
    return 0


def _prepare_environment(config: ServeConfig) -> None:
    """Set Ray's environment variables, unless the user has set them."""
    for name, value in driver_environment().items():
        os.environ.setdefault(name, value)
    if config.ray_address is None and "RAY_AUTH_MODE" not in os.environ:
        # Ray's ports are open on every interface: the token admits only our own processes.
        os.environ["RAY_AUTH_MODE"] = "token"
        if not os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    is_off = os.environ.get("RAY_AUTH_MODE", "").strip().lower() == "disabled"
    if config.ray_address is None and is_off and not config.insecure:
        raise ConfigError(
            "RAY_AUTH_MODE is 'disabled' in the environment: everyone who reaches Ray's ports "
            "could run code on this machine; unset it or set it to token, or say --insecure "
            "(insecure: true)"
        )


def _watch(cluster: Cluster, config: ServeConfig, signals: Signals) -> None:
    """Print changes and throughput until a signal arrives."""
    throughput = Throughput(time.monotonic)
    num_workers, num_failures = config.min_workers, 0
    while not signals.num_seen:
        time.sleep(WATCH_S)
        view = cluster.view()
        if view.num_failures > num_failures:
            _say(view.failures[-1])
        num_failures = view.num_failures
        if len(view.workers) != num_workers:
            is_less = len(view.workers) < num_workers
            num_workers = len(view.workers)
            if config.is_autoscaled:
                _say(f"{num_workers} workers serve, of {config.num_workers}")
            else:
                what = "a worker was lost and is being replaced" if is_less else "a worker is ready"
                _say(f"{what}: {num_workers} of {config.num_workers} workers serve")
        if line := throughput.line([(info.epoch, stats) for info, stats in view.workers]):
            _say(f"{time.strftime('%H:%M:%S')} {line}")
    if any(stats.num_running + stats.num_waiting for _, stats in cluster.view().workers):
        _say(f"stopping: running requests have {config.drain_s:g} s to finish; Ctrl-C again stops")


class _WorkerProgress:
    """Prints a line for each worker that has loaded the model, but those of `earlier` addresses."""

    def __init__(self, num_workers: int, earlier: frozenset[str] = frozenset()):
        self._num_workers = num_workers
        self._known = set(earlier)
        self._num_seen = 0

    def report(self, view: ClusterView) -> None:
        for info, _ in view.workers:
            if info.address in self._known:
                continue
            self._known.add(info.address)
            self._num_seen += 1
            if self._num_workers > 1:
                _say(f"worker {self._num_seen} of {self._num_workers} is ready")


def _welcome(config: ServeConfig, view: ClusterView) -> str:
    metrics = sorted(each.metrics_address for each in view.ingresses if each.metrics_address)
    watch = "".join(f"  watch http://{address}/metrics  (Prometheus)\n" for address in metrics)
    reach = "; this machine only" if config.host in LOOPBACK else ""
    return (
        f"  HTTP  {config.http_url}/v1  (OpenAI API; /docs in a browser{reach})\n"
        f"  gRPC  {config.address(config.grpc_port)}{_tls_note(config)}\n"
        f"{watch}"
        f"  try   penstock chat{_server_flags(config)}\n"
        "Ctrl-C stops"
    )


def effective_settings(
    config: ServeConfig, workers: Sequence[tuple[WorkerInfo, EngineStats]]
) -> str:
    """What is in force, in three lines. Without workers there is nothing to say of memory."""
    lines = []
    if workers:
        info, stats = workers[0]
        num_tokens = stats.num_blocks * stats.block_size
        lines.append(
            f"  model      up to {info.max_model_len:,} tokens of prompt and answer; "
            f"{info.weights} weights; KV cache {config.engine.kv}"
        )
        if num_tokens:
            lines.append(
                f"  KV cache   {num_tokens:,} tokens a worker: "
                f"{num_tokens / info.max_model_len:.1f} requests of {info.max_model_len:,} tokens "
                f"at a time; at most {stats.max_num_seqs} in a step"
            )
    replicas = f"num_workers {config.num_workers}, num_ingress {config.num_ingress}"
    lines.append(
        f"  admission  {config.admission}; at most {config.max_queued:,} requests wait; {replicas}"
    )
    return "\n".join(lines)


def _weights(view: ClusterView) -> str:
    """The weight format and memory of a worker; empty if none has reported."""
    for info, _ in view.workers:
        if info.weights:
            return f"; {info.weights} weights of {info.weight_bytes / 2**20:.1f} MiB a worker"
    return ""


def _server_flags(config: ServeConfig) -> str:
    """The flags with which the commands reach this server."""
    default = ServeConfig()
    flags = ""
    if config.http_url != default.http_url:
        flags += f" --url {config.http_url}"
    if config.has_tls:
        flags += " --ca-file CA"  # the file of the CA is not this server's
    if config.tls_client_ca_file is not None:
        flags += " --cert-file CERT --key-file KEY"
    return flags


def _tls_note(config: ServeConfig) -> str:
    if not config.has_tls:
        return ""
    return "  (TLS; clients show a certificate)" if config.tls_client_ca_file else "  (TLS)"


def _say(text: str) -> None:
    print(text, flush=True)
