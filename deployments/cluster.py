"""A cluster's life as one driver process sees it: start Ray and Serve, deploy, drain, stop.

Either the Ray of this machine is started here and ends with us, or one that exists is used and only
our application is removed. What runs on it is deployments/app.py's; who is told, serve_command's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

import ray
from ray import serve
from ray.exceptions import RayError

from penstock.deployments.app import wire
from penstock.deployments.config import ServeConfig
from penstock.deployments.experts.spec import remove_all
from penstock.deployments.gate.server import end_gate
from penstock.deployments.supervision.processes import descendants, end
from penstock.deployments.supervision.registry import NAMESPACE, ClusterView, RegistryClient
from penstock.deployments.supervision.replicas import wants_gpus
from penstock.workers.cpu_affinity import allowed_cores, keep_to

log = logging.getLogger("penstock.serve")

POLL_S = 0.1
STATUS_EVERY_S = 1.0
EXIT_S = 2.0  # that processes have to end once they were told to
OBJECT_STORE_BYTES = 128 << 20  # tokens do not pass through Ray's object store
DRAIN_SLACK_S = 2.0  # for ingresses to hear of it, and to say goodbye
PREDICTOR_FILE = "predictor.npz"
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


class StartError(RuntimeError):
    """The cluster did not come up. The message is for the operator."""


class Cluster:
    """Ray, Serve and the application. `stop` may be called at any point."""

    def __init__(self, config: ServeConfig):
        self._config = config
        self._is_local = config.ray_address is None
        self._folder: str | None = None
        self._registry = RegistryClient(config.app_name)
        self._last_view = ClusterView()

    def start_ray(self, is_first_try: bool = True) -> None:
        """Start Ray here, or connect with the one that the configuration names.

        Ray gives its processes a fixed time, which a busy machine can miss, so it has two tries.
        Raises StartError if it does not come up.
        """
        try:
            self._init_ray()
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            raise StartError(f"Ray did not start: {error}") from error
        except Exception as error:
            if type(error) is not Exception:  # Ray says with a bare one that its 30 s are over
                raise
            if self._is_local and is_first_try:
                log.warning("Ray did not start within its 30 s; trying once more")
                ray.shutdown()
                end(descendants(os.getpid()), EXIT_S)
                self.start_ray(is_first_try=False)
                return
            raise StartError(
                "Ray did not start in time; is the machine busy, or out of memory or disk? "
                "(--ray-dir FOLDER keeps Ray's logs)"
            ) from error

    def _init_ray(self) -> None:
        config = self._config
        quiet = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
        if not self._is_local:
            ray.init(address=config.ray_address, **quiet)
            return
        if config.engine.cores is not None:  # Ray's processes, and so all of ours, inherit it
            keep_to(allowed_cores() - config.engine.cores)
        folder = config.ray_dir or self._folder
        if folder is None:
            folder = self._folder = tempfile.mkdtemp(prefix="penstock-ray-")
        ray.init(
            address="local",  # whatever RAY_ADDRESS says
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=os.path.abspath(folder),
            **quiet,
        )

    def deploy(self) -> None:
        """Have all replicas begin; returns before they are up. Raises StartError if they cannot."""
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        if self._is_local and wants_gpus(self._config) and num_gpus < self._config.num_workers:
            raise StartError(
                f"workers need a GPU each: {self._config.num_workers} are wanted, this machine has "
                f"{num_gpus}; choose another --num-workers, or --device cpu"
            )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled")
        self._registry.call_now("begin")
        config = self._config
        if self._folder is not None and config.predictor_file is None:
            # For a gate that is killed: the folder goes when the cluster ends.
            config = replace(config, predictor_file=os.path.join(self._folder, PREDICTOR_FILE))
        app = wire(config, channel_host="127.0.0.1" if self._is_local else None)
        serve.run_many(
            [serve.RunTarget(target=app, name=self._config.app_name)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def wait_until_up(self, tell: Callable[[ClusterView], None]) -> None:
        """Returns once every ingress is connected with every worker; `tell` hears of each change.

        Raises StartError with the cause as soon as one of them cannot start.
        """
        config, next_status_s = self._config, 0.0
        while True:
            view = self.view()
            tell(view)
            if view.failures:
                raise StartError(view.failures[0])
            reach = [ingress.num_workers for ingress in view.ingresses]
            if len(reach) >= config.num_ingress and min(reach) >= config.num_workers:
                return
            if time.monotonic() >= next_status_s:
                next_status_s = time.monotonic() + STATUS_EVERY_S
                application = serve.status().applications.get(config.app_name)
                if application is not None and application.status in FAILED:
                    causes = [each.message for each in application.deployments.values()]
                    raise StartError("\n".join([application.message, *filter(None, causes)]))
            time.sleep(POLL_S)

    def view(self) -> ClusterView:
        """All that is alive; while the registry is away, what it said last."""
        with contextlib.suppress(RayError, TimeoutError, ValueError):
            self._last_view = self._registry.call_now("view")
        return self._last_view

    def drain(self, is_hurried: Callable[[], bool]) -> None:
        """Let requests under way end: for `drain_s`, or until somebody hurries."""
        if not self._is_local:  # Serve drains what it takes away, and others' requests go on
            return
        with contextlib.suppress(RayError, TimeoutError, ValueError):
            self._registry.call_now("drain")
        deadline_s = time.monotonic() + self._config.drain_s + DRAIN_SLACK_S
        while self.view().ingresses and time.monotonic() < deadline_s and not is_hurried():
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Leave nothing behind: no process, port or folder that was started or made here."""
        # Found before Ray is told to end them: a process whose parent has died is no longer ours,
        # and a start that was broken off half-way has left some that Ray does not know of.
        pids = descendants(os.getpid()) if self._is_local else []
        if ray.is_initialized():
            if not self._is_local:
                serve.delete(self._config.app_name)
                end_gate(self._config.app_name)
            ray.shutdown(wait_for_processes=True)
        end(pids, EXIT_S)
        self.remove_folder()

    def stop_at_once(self) -> None:
        """`stop` without asking anybody; on any thread, whatever the others are waiting for."""
        if self._is_local:
            end(descendants(os.getpid()), 0.0)
        self.remove_folder()

    def remove_folder(self) -> None:
        if self._is_local and self._config.engine.expert_cache_gb is not None:
            remove_all(self._config.engine.expert_store_dir, self._config.app_name)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
