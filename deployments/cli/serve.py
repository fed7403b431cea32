"""`penstock serve`: start a cluster, print its state, and stop it at a signal.

Ray is imported after the configuration has been checked, as the import takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from penstock.deployments.cli.signals import Interrupted, Signals
from penstock.deployments.cli.starting.progress import StartProgress
from penstock.deployments.cli.starting.summary import effective_settings, weights_loaded, welcome
from penstock.deployments.cli.throughput import Throughput
from penstock.deployments.config import ServeConfig
from penstock.deployments.hub_model import look_at
from penstock.deployments.model_entries import place, within
from penstock.deployments.preflight import check_before_start, check_formats
from penstock.deployments.supervision.fork_server import ForkServer
from penstock.deployments.supervision.ray_workarounds import keep_own_sigterm_handler
from penstock.deployments.supervision.view import EXPIRY_S
from penstock.workers.stats import worker_name
from penstock.workers.weights.hub import is_hub_id

if TYPE_CHECKING:
    from penstock.deployments.cluster import Cluster
    from penstock.deployments.supervision.view import ClusterView
    from penstock.workers.stats import EngineStats, WorkerInfo

WATCH_S = 0.25
LISTED_S = EXPIRY_S + 1.0  # longest for which a worker that has ended is listed


def run_serve(config: ServeConfig, forks: ForkServer | None) -> int:
    """Run a cluster until a signal ends it; the exit status. Raises ConfigError, LoadError
    or StartError.

    `forks`: for a Ray of its own, closed by the caller; starting/environment.py has set what Ray
    reads.
    """
    config = config.with_absolute_paths()
    check_before_start(config)
    began_s = time.monotonic()
    served = [f"{each.engine.model} as {each.model_name!r}" for each in config.each_model]
    _say(f"Penstock {version('penstock')} serves {' and '.join(served)}")
    config = _looked_up(config)
    if config.is_open:
        _say(
            f"WARNING: no API keys, and {config.host} is not loopback: every machine that can "
            "reach it can use this server. Write keys into a file, and pass it as --api-keys-file."
        )
    cluster: Cluster | None = None
    is_local = config.ray_address is None
    signals = Signals(
        give_up=lambda: cluster.stop_at_once() if cluster is not None else None,
        # An application is removed from a cluster that exists by asking it. A Ray of our own is
        # killed: its own shutdown takes seconds.
        unwinds=not is_local,
    )
    try:
        _say("starting Ray" if is_local else f"connecting to Ray at {config.ray_address}")
        from penstock.deployments.cluster import Cluster

        keep_own_sigterm_handler()
        cluster = Cluster(config, on_ray_end=lambda why: signals.exit(1, why), forks=forks)
        cluster.start_ray()
        what = "the models" if config.models else "the model"
        _say(f"loading {what} ({time.monotonic() - began_s:.1f} s so far)")
        cluster.deploy()
        earlier = frozenset(info.address for info, _ in cluster.view().workers)
        if earlier:
            _say("an earlier deployment serves until its replicas are replaced, in turn")
        num_workers = sum(each.min_workers for each in config.each_model)
        with closing(StartProgress(_say, num_workers, earlier)) as progress:
            cluster.wait_until_up(progress.report)
            progress.finish()
        signals.started()
        _say(f"ready after {time.monotonic() - began_s:.1f} s{weights_loaded(cluster.view())}")
        view = cluster.view()
        new = [each for each in view.workers if each[0].address not in earlier]
        _say_settings(config, new, cluster.logs)
        for name, said in sorted(
            {each for info in view.ingresses for each in info.sampling_defaults}
        ):
            of = f" of {name}" if config.models else ""
            _say(
                f"requests{of} that do not say otherwise: {said} "
                "(the model's generation_config.json)"
            )
        for name, note in sorted({each for info in view.ingresses for each in info.tool_notes}):
            _say(f"{name}: {note}" if config.models else note)
        _say(welcome(config, view))
        _watch(cluster, config, signals)
        cluster.drain(is_hurried=lambda: signals.num_seen > 1)
    except Interrupted:
        return 130
    finally:
        signals.started()  # the clean-up must not be interrupted
        if cluster is not None:
            cluster.stop()
    _say("stopped")
    return 0


def _looked_up(config: ServeConfig) -> ServeConfig:
    """The configuration with the commit of a model of the hub, whose files are looked at before
    Ray starts. Raises ConfigError or LoadError for one that cannot be served."""
    if config.models:
        models = []
        for index, each in enumerate(config.models):
            with within(place(index)):
                models.append(_looked_up(each))
        return replace(config, models=tuple(models))
    if not is_hub_id(config.engine.model):
        return config
    found = look_at(config)
    if found is None:
        _say("this machine does not reach the hub: the cluster's machines ask it")
        return config
    check_formats(found.config.engine, found.text)
    _say(str(found) if config.ray_address is None else f"{found.name} is at {found.name.revision}")
    return found.config


def _watch(cluster: Cluster, config: ServeConfig, signals: Signals) -> None:
    """Print changes and throughput until a signal arrives."""
    throughput = Throughput(time.monotonic)
    counts, num_failures = [WorkerCount(each, _say_now) for each in config.each_model], 0
    warnings = Warnings(_say_now)
    while not signals.num_seen:
        time.sleep(WATCH_S)
        view = cluster.view()
        if view.num_failures > num_failures:
            _say_now(view.failures[-1])
        num_failures = view.num_failures
        for count in counts:
            count.report(view)
        warnings.report(view)
        num_at_gate = sum(each.num_waiting for each in view.ingresses)
        workers = [(info.epoch, stats) for info, stats in view.workers]
        if line := throughput.line(workers, num_at_gate):
            _say_now(line)
    if any(stats.num_running + stats.num_waiting for _, stats in cluster.view().workers):
        _say(f"stopping: running requests have {config.drain_s:g} s to finish; Ctrl-C again stops")


def _say_settings(
    config: ServeConfig, workers: Sequence[tuple[WorkerInfo, EngineStats]], logs: str
) -> None:
    """What is in force, for each model."""
    if not config.models:
        _say(effective_settings(config, workers, logs))
        return
    for each in config.models:
        own = [worker for worker in workers if worker[0].model == each.model_name]
        _say(f"{each.model_name}\n{effective_settings(each, own)}")
    _say(f"  logs       {logs}")


class WorkerCount:
    """Says when a worker of a model no longer reports, reports again, or is new, and which it is,
    by its name in `penstock status`.

    A worker is listed while it reports. On a machine that others use its report may come late: then
    it has not ended, and nothing replaces it. One that has ended is listed for some seconds, and
    its successor may be there by then: while there are more workers than there should be, it waits
    for LISTED_S before it says so.
    """

    def __init__(
        self,
        config: ServeConfig,
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ):
        self._config, self._say, self._now_s = config, say, now_s
        self._too_many_until_s: float | None = None
        self._num = config.min_workers
        self._listed: set[int] = set()
        self._known: set[int] = set()

    def report(self, view: ClusterView) -> None:
        config = self._config
        epochs = {
            info.epoch
            for info, _ in view.workers
            if not config.key or info.model == config.model_name
        }
        if self._may_be_too_many_for_now(len(epochs)):
            return
        listed, self._listed = self._listed, epochs
        new, back = epochs - self._known, (epochs & self._known) - listed
        num, self._num = self._num, len(epochs)
        is_first, self._known = not self._known, self._known | epochs
        of = f" of {config.model_name}" if config.key else ""
        if config.is_autoscaled:
            if len(epochs) != num:
                self._say(f"{len(epochs)} workers{of} serve, of {config.num_workers}")
            return
        if is_first and len(epochs) == num:
            return  # those that were waited for
        serve = f"{len(epochs)} of {config.num_workers} workers serve"
        if (gone := listed - epochs) or len(epochs) < num:
            text = "does not report, and is replaced if it has ended"
            self._say(f"{_names(gone)}{of} {text}: {serve}")
        if back:
            self._say(f"{_names(back)}{of} reports again: {serve}")
        if new:
            self._say(f"{_names(new)}{of} is ready: {serve}")

    def _may_be_too_many_for_now(self, num: int) -> bool:
        if self._config.is_autoscaled or num <= self._config.max_workers:
            self._too_many_until_s = None
            return False
        if self._too_many_until_s is None:
            self._too_many_until_s = self._now_s() + LISTED_S
        return self._now_s() < self._too_many_until_s


class Warnings:
    """Says when a warning of an ingress begins, and when no ingress has it any more."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._known: set[str] = set()

    def report(self, view: ClusterView) -> None:
        if not view.ingresses:  # the registry is new: it has yet to hear of them
            return
        details = {each.text: each.detail for info in view.ingresses for each in info.warnings}
        for text, detail in details.items():
            if text not in self._known:
                self._say(f"WARNING: {text}" + (f" ({detail})" if detail else ""))
        for text in sorted(self._known - details.keys()):
            self._say(f"no longer: {text}")
        self._known = set(details)


def _names(epochs: Collection[int]) -> str:
    """The names of these workers; 'a worker' if none of them was ever seen."""
    names = ", ".join(sorted(worker_name(epoch) for epoch in epochs))
    return f"worker {names}" if names else "a worker"


def _say_now(text: str) -> None:
    """Print an event of a running server with its time."""
    _say(f"{time.strftime('%H:%M:%S')} {text}")


def _say(text: str) -> None:
    print(text, flush=True)
