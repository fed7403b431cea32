"""Start Ray and Serve, deploy the application, drain it and stop: what the driver process does.

Ray is either started here, and stopped in the end; or the cluster exists, and only the application
is removed from it. app.py defines the application; cli/serve.py reports to the user. Serve and the
application are imported while Ray starts, which is mostly waiting.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import ray
from ray.exceptions import RayError

from penstock.deployments.config import ServeConfig
from penstock.deployments.experts.spec import remove_all
from penstock.deployments.gate.actor import end_gate
from penstock.deployments.hub_model import pinned
from penstock.deployments.placement import ClusterResources, uses_gpus, variables_of_workers
from penstock.deployments.supervision.actors import NAMESPACE
from penstock.deployments.supervision.environments import Environments
from penstock.deployments.supervision.fork_server import ForkServer
from penstock.deployments.supervision.processes import (
    descendants,
    end,
    hold_aborts,
    kill_descendants,
)
from penstock.deployments.supervision.ray_processes import SYSTEM_CONFIG, only_what_is_used
from penstock.deployments.supervision.ray_workarounds import (
    deploy_application,
    is_start_timeout,
    log_raylet_messages,
)
from penstock.deployments.supervision.raylet import watch_raylet
from penstock.deployments.supervision.registry import RegistryClient
from penstock.deployments.supervision.replicas import cluster_resources
from penstock.deployments.supervision.view import ClusterView, IngressInfo
from penstock.workers.cpu_affinity import allowed_cores, keep_to
from penstock.workers.errors import ConfigError, LoadError

log = logging.getLogger("penstock.serve")

POLL_S = 0.1
STATUS_EVERY_S = 1.0
EXIT_S = 2.0  # from SIGTERM to SIGKILL
AT_ONCE_S = 1.0  # for killed processes to end
OBJECT_STORE_BYTES = 128 << 20  # tokens do not pass through Ray's object store
DRAIN_SLACK_S = 2.0  # for ingresses to notice the drain, and to deregister after it
PREDICTOR_FILE = "predictor.npz"
GATE_S = 5.0  # longest that a start waits for the gate, without which it could serve
UNHEALTHY_S = 120.0  # longest that a start waits for Serve to replace a replica that has died


class StartError(RuntimeError):
    """The cluster did not come up. The message is for the operator."""


class Cluster:
    """Ray, Serve and the application. `stop` may be called at any point."""

    def __init__(
        self,
        config: ServeConfig,
        on_ray_end: Callable[[str], None] | None = None,
        forks: ForkServer | None = None,
    ):
        """`on_ray_end` is called on another thread, with the cause, if a Ray of its own ends.
        `forks`: for the processes of that Ray; made when it starts if None, closed by `stop`."""
        self._config = config
        self._on_ray_end = on_ray_end
        self._forks = forks
        self._stopping = threading.Event()
        self._is_local = config.ray_address is None
        self._folder: str | None = None
        self._registry = RegistryClient(config.app_name)
        self._last_view = ClusterView()
        self._environments = Environments()

    def start_ray(self, is_first_try: bool = True) -> None:
        """Start Ray here, or connect to the cluster that the configuration names.

        Ray gives its processes a fixed time, which a busy machine can miss, so there are two tries.
        Raises StartError if Ray does not start.
        """
        try:
            self._init_ray()
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            raise StartError(f"Ray did not start: {error}") from error
        except Exception as error:
            if not is_start_timeout(error):
                raise
            if self._is_local and is_first_try:
                log.warning("Ray did not start within its 30 s; trying once more")
                ray.shutdown()
                end(descendants(os.getpid()), EXIT_S)
                self._forks = None  # it is one of them
                self.start_ray(is_first_try=False)
                return
            raise StartError(
                "Ray did not start in time. Is the machine busy, or out of memory or disk? "
                "--ray-dir FOLDER keeps Ray's logs"
            ) from error

    def _init_ray(self) -> None:
        config = self._config
        log_raylet_messages()
        threading.Thread(target=_import_serve, daemon=True).start()
        quiet = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
        if not self._is_local:
            ray.init(address=config.ray_address, **quiet)
            return
        if self._forks is None:
            self._forks = ForkServer()
        reserved = [each.engine.cores for each in config.each_model if each.engine.cores]
        if reserved:  # inherited by Ray's processes, and so by all replicas
            keep_to(allowed_cores().difference(*reserved))
            self._forks.keep_to(allowed_cores())
        folder = config.ray_dir or self._folder
        if folder is None:
            folder = self._folder = tempfile.mkdtemp(prefix="penstock-ray-")
        of_workers = partial(variables_of_workers, config)
        with only_what_is_used(self._environments, self._forks, of_workers):
            ray.init(
                address="local",  # overrides RAY_ADDRESS
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=os.path.abspath(folder),
                _system_config=SYSTEM_CONFIG,
                **quiet,
            )
        if self._on_ray_end is not None:
            watch_raylet(self._on_ray_end, self._stopping)

    @property
    def logs(self) -> str:
        """Where the logs of all processes are, in words."""
        if not self._is_local:
            return "in Ray's folder of each machine (/tmp/ray), session_latest/logs"
        folder = self._config.ray_dir or self._folder
        kept = "" if self._config.ray_dir else " (removed at the end; --ray-dir keeps them)"
        return f"{folder}/session_latest/logs/serve{kept}"

    def deploy(self) -> None:
        """Deploy; return before the replicas are ready. Raises StartError if GPUs are missing."""
        from ray import serve

        from penstock.deployments.app import application, wire

        cluster = cluster_resources()
        if self._is_local:
            self._check_gpus(cluster)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled")
        self._registry.call_when_up("begin")  # its process starts only now
        try:
            config = pinned(self._config)
        except (ConfigError, LoadError) as error:
            raise StartError(str(error)) from None
        if not self._is_local:
            deploy_application(application(config, cluster))
            return
        if self._folder is not None:
            config = _with_predictor_files(config, self._folder)
        forked_with = {} if self._forks is None else self._forks.of_workers
        app = wire(config, channel_host="127.0.0.1", forked_with=forked_with)
        serve.run_many(
            [serve.RunTarget(target=app, name=self._config.app_name)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _check_gpus(self, cluster: ClusterResources | None) -> None:
        """Raise StartError if this machine has too few GPUs."""
        num_gpus = 0 if cluster is None else int(cluster.num_gpus)
        on_gpus = [each for each in self._config.each_model if uses_gpus(each, cluster)]
        wanted = [each.max_workers * each.engine.num_ranks for each in on_gpus]
        if num_gpus < sum(wanted):
            each_of = " and ".join(str(each.num_workers) for each in on_gpus)
            raise StartError(
                f"each worker needs a GPU, or one for each of its ranks, {sum(wanted)} in all: "
                f"num_workers is {each_of}, and this machine has {num_gpus} GPUs; lower "
                "--num-workers, --tensor-parallel-size or --pipeline-parallel-size, or use "
                "--device cpu"
            )

    def wait_until_up(self, report: Callable[[ClusterView], None]) -> None:
        """Return once every ingress is connected to every worker and, if it comes within GATE_S
        of that, to the gate: before, workers admit requests by themselves. Calls `report` with
        each view.

        On a cluster that exists: of this deployment, so once Serve has replaced the replicas of an
        earlier one. Raises StartError with the cause as soon as a replica cannot start.
        """
        from ray import serve

        config, next_status_s, healthy_s = self._config, 0.0, time.monotonic()
        up_s = math.inf
        is_new = self._is_local
        while True:
            view = self.view()
            report(view)
            if view.failures:
                raise StartError(view.failures[0])
            is_up = len(view.ingresses) >= config.min_ingress and all(
                num_reached(each, ingress) >= each.min_workers
                for ingress in view.ingresses
                for each in config.each_model
            )
            if is_up and is_new:
                up_s = min(up_s, time.monotonic())
                has_gates = not any(each.lacks_gate for each in view.ingresses)
                if has_gates or time.monotonic() > up_s + GATE_S:
                    return
            if time.monotonic() >= next_status_s:
                next_status_s = time.monotonic() + STATUS_EVERY_S
                application = serve.status().applications.get(config.app_name)
                is_new = self._is_local or (
                    application is not None and application.status == "RUNNING"
                )
                if application is None or application.status != "UNHEALTHY":
                    healthy_s = time.monotonic()
                is_over = time.monotonic() > healthy_s + UNHEALTHY_S
                if application is not None and (is_over or application.status == "DEPLOY_FAILED"):
                    causes = [each.message for each in application.deployments.values()]
                    raise StartError("\n".join([application.message, *filter(None, causes)]))
            time.sleep(POLL_S)

    def view(self) -> ClusterView:
        """The living replicas; while the registry cannot be reached, its last answer."""
        with contextlib.suppress(RayError, TimeoutError, ValueError):
            self._last_view = self._registry.call_now("view")
        return self._last_view

    def drain(self, is_hurried: Callable[[], bool]) -> None:
        """Let requests finish: until the drain is over, or `is_hurried` returns true."""
        from ray import serve

        if not self._is_local:  # Serve drains the replicas that it removes
            return
        config = self._config
        drain_s = config.drain_notice_s + config.drain_s + DRAIN_SLACK_S
        deadline_s = time.monotonic() + drain_s
        try:
            self._registry.call_now("drain")
            has_ingresses = self._has_ingresses
        except (RayError, TimeoutError, ValueError):
            # Serve tells its replicas by itself. The workers drain as well, and each serves the
            # requests that it has.
            log.warning("the registry does not answer: Serve drains the ingresses")
            serve.delete(config.app_name, _blocking=False)
            has_ingresses = self._is_deployed
        while has_ingresses() and time.monotonic() < deadline_s and not is_hurried():
            time.sleep(POLL_S)
        for each in config.each_model:
            with contextlib.suppress(RayError):
                end_gate(each.gate_scope)  # it saves what it has learnt

    def _has_ingresses(self) -> bool:
        return bool(self.view().ingresses)

    def _is_deployed(self) -> bool:
        """Whether Serve still has replicas of the application, also such as drain."""
        from ray import serve

        try:
            return self._config.app_name in serve.status().applications
        except (RayError, TimeoutError):
            return False

    def stop(self) -> None:
        """End and remove every process and folder that was started or made here."""
        self._stopping.set()
        # Listed before Ray ends them: a process whose parent has died is no longer a descendant,
        # and an interrupted start leaves processes that Ray does not know.
        pids = descendants(os.getpid()) if self._is_local else []
        if ray.is_initialized():
            if not self._is_local:
                from ray import serve

                serve.delete(self._config.app_name)
                for each in self._config.each_model:
                    end_gate(each.gate_scope)
            ray.shutdown(wait_for_processes=True)
        end(pids, EXIT_S)
        if self._forks is not None:
            self._forks.close()
        self._environments.close()
        self.remove_folder()

    def stop_at_once(self) -> None:
        """`stop` without Ray's help; callable on any thread, while others are blocked. The caller
        then ends this process."""
        self._stopping.set()
        if self._is_local:
            hold_aborts()
            kill_descendants(AT_ONCE_S)
        self.remove_folder()

    def remove_folder(self) -> None:
        for each in self._config.each_model:
            if self._is_local and each.engine.expert_cache_gb is not None:
                remove_all(each.engine.expert_store_dir, self._config.app_name)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _import_serve() -> None:
    """Import what `deploy` needs, which then waits for the end of it, or reports its error."""
    with contextlib.suppress(ImportError):
        importlib.import_module("penstock.deployments.app")


def num_reached(config: ServeConfig, ingress: IngressInfo) -> int:
    """The workers of that model which an ingress is connected with."""
    if not config.key:
        return ingress.num_workers
    return dict(ingress.workers_of).get(config.model_name, 0)


def _with_predictor_files(config: ServeConfig, folder: str) -> ServeConfig:
    """Without a file that stays, a restarted gate still keeps what was learnt: in the folder that
    is removed with the cluster."""
    if config.models:
        models = tuple(_with_predictor_files(each, folder) for each in config.models)
        return replace(config, models=models)
    if config.predictor_file is not None:
        return config
    name = f"{config.key}-{PREDICTOR_FILE}" if config.key else PREDICTOR_FILE
    return replace(config, predictor_file=os.path.join(folder, name))
