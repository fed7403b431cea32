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
    served = [f"{each.engine.model} as {each.model_name!r}" for each in config.each_model]
    _say(f"Penstock {version('penstock')} serves {' and '.join(served)}")
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
        is_remote = any(is_hub_id(each.engine.model) for each in config.each_model)
        fetch = ", from the hub unless it is here" if is_remote else ""
        what = "the model" if not config.models else "the models"
        _say(f"loading {what}{fetch} ({time.monotonic() - began_s:.1f} s so far)")
        cluster.deploy()
        earlier = frozenset(info.address for info, _ in cluster.view().workers)
        if earlier:
            _say("an earlier deployment serves until its replicas are replaced, in turn")
        cluster.wait_until_up(_WorkerProgress(_min_workers(config), earlier).report)
        signals.may_break_off = False
        _say(f"ready after {time.monotonic() - began_s:.1f} s{_weights(cluster.view())}")
        view = cluster.view()
        new = [each for each in view.workers if each[0].address not in earlier]
        for of_model in config.each_model:
            own = [
                each for each in new if not config.models or each[0].model == of_model.model_name
            ]
            title = f"{of_model.model_name}\n" if config.models else ""
            _say(f"{title}{effective_settings(of_model, own)}")
        for name, said in sorted(
            {each for info in view.ingresses for each in info.sampling_defaults}
        ):
            of = f" of {name}" if config.models else ""
            _say(
                f"requests{of} that do not say otherwise: {said} "
                "(the model's generation_config.json)"
            )
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
    counts, num_failures = [WorkerCount(each) for each in config.each_model], 0
    while not signals.num_seen:
        time.sleep(WATCH_S)
        view = cluster.view()
        if view.num_failures > num_failures:
            _say(view.failures[-1])
        num_failures = view.num_failures
        for count in counts:
            count.report(view)
        if line := throughput.line([(info.epoch, stats) for info, stats in view.workers]):
            _say(f"{time.strftime('%H:%M:%S')} {line}")
    if any(stats.num_running + stats.num_waiting for _, stats in cluster.view().workers):
        _say(f"stopping: running requests have {config.drain_s:g} s to finish; Ctrl-C again stops")


class WorkerCount:
    """Prints a line when the number of workers of a model changes."""

    def __init__(self, config: ServeConfig):
        self._config = config
        self._num = config.min_workers

    def report(self, view: ClusterView) -> None:
        config = self._config
        own = [
            info for info, _ in view.workers if not config.key or info.model == config.model_name
        ]
        if len(own) == self._num:
            return
        is_less, self._num = len(own) < self._num, len(own)
        of = f" of {config.model_name}" if config.key else ""
        if config.is_autoscaled:
            _say(f"{self._num} workers{of} serve, of {config.num_workers}")
            return
        what = "was lost and is being replaced" if is_less else "is ready"
        _say(f"a worker{of} {what}: {self._num} of {config.num_workers} workers serve")


def _min_workers(config: ServeConfig) -> int:
    return sum(each.min_workers for each in config.each_model)


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
    """The weight format and memory of a worker; empty if none has reported, or they differ."""
    if len({info.model for info, _ in view.workers}) > 1:
        return ""
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
