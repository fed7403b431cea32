"""Every place that relies on undocumented behaviour of Ray, one function each.

Each says which behaviour of Ray it works around, and what to look at when Ray is upgraded; its
test fails when the internals have moved. No function imports Ray before it is called.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.workers.errors import ConfigError

log = logging.getLogger("penstock.ray")

SEEN_ON = "2.60"  # the version of Ray for which all of this was found to be needed


def driver_environment() -> dict[str, str]:
    """Environment variables that the process which starts Ray needs, before Ray is imported.

    `RAY_worker_niceness` is internal: Ray starts its workers at nice 15, so every other process of
    the machine takes precedence over replicas. Look for a documented setting, or another default.
    `RAY_task_events_report_interval_ms`, internal too: at 0 the GCS keeps no record of each call of
    an actor. Heartbeats are such calls: in an hour it grew by 133 MB.
    """
    return {
        "RAY_worker_niceness": "0",
        "RAY_task_events_report_interval_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }


def one_event_loop() -> dict[str, str]:
    """Environment variables of a replica whose own code shares Serve's event loop.

    By default Serve runs the code of a deployment on a loop of its own; gRPC then wakes both loops
    for every message. Internal: look in serve/_private/constants.py whether the name is still read.
    """
    return {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}


def require_token_auth() -> None:
    """Raise ConfigError if the Ray cluster that this process is connected to asks for no token.

    Its ports then run the code of anyone who reaches them: Ray unpickles what it receives. Ray has
    no public way to ask. Look for one, or for the release in which tokens cannot be switched off.
    """
    import ray
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    if ray.is_initialized() and not is_token_auth_enabled():
        raise ConfigError(
            "this Ray cluster asks for no token, so that everyone who reaches its ports can run "
            "code on it; start Ray with RAY_AUTH_MODE=token on every node, or say --insecure "
            "(insecure: true)"
        )


def is_start_timeout(error: Exception) -> bool:
    """Whether `ray.init` failed because Ray's processes missed their fixed 30 s.

    Ray raises a bare Exception for it; all its other errors have a type. Look in
    _private/node.py for a typed error, or for a setting of the time.
    """
    return type(error) is Exception


def keep_own_sigterm_handler() -> None:
    """Have `ray.init` leave this process's handler of SIGTERM alone.

    Where Ray starts a node, it replaces the handler by one that kills the node's processes, and
    then raises SystemExit in the main thread, wherever that is. Look for a setting in
    `_register_shutdown_hooks` (_private/node.py).
    """
    from ray._private import utils

    def ignored(handler: Any) -> None:
        """In place of `set_sigterm_handler`."""

    utils.set_sigterm_handler = ignored


def serve_logger() -> logging.Logger:
    """The logger that Serve writes to the file of each replica; without handlers outside a replica.

    Its name is a private constant. Look for a public way to log into that file.
    """
    from ray.serve._private.constants import SERVE_LOGGER_NAME

    return logging.getLogger(SERVE_LOGGER_NAME)


def log_raylet_messages() -> None:
    """Write the messages of Ray's node processes to `log`, at DEBUG, instead of to stdout.

    When a replica ends, Ray prints a paragraph of advice into the output of `penstock serve`,
    `log_to_driver=False` or not; the supervisor reports the end in a line of its own. Look in
    `listen_error_messages` (_private/worker.py) for a setting.
    """
    from ray._private import worker

    def to_log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        log.debug("(%s) %s", data["pid"], " ".join(data["lines"]))

    worker.print_to_stdstream = to_log


def keep_serve_port_local() -> None:
    """Bind the gRPC port that Serve is about to open for this replica to the loopback address.

    Serve opens the port on every interface and unpickles what is sent to it: any machine that can
    connect could run code. Serve uses the port only where its calls go over gRPC instead of Ray.
    Look in serve/_private/replica.py whether the port is still opened, and where.
    """
    from ray.serve._private import constants, replica

    if constants.RAY_SERVE_USE_GRPC_BY_DEFAULT:
        return
    add_port = replica.add_port_to_grpc_server

    def add_local_port(server: Any, address: str) -> int:
        return int(add_port(server, address.replace("[::]", "127.0.0.1")))

    replica.add_port_to_grpc_server = add_local_port


def declared_resources() -> dict[str, float]:
    """The total resources of all nodes that the cluster's autoscaler may start, by name.

    Empty without an autoscaler. Only Ray's own libraries (Data, Train) use this state. Look for a
    public function in ray.autoscaler.sdk.
    """
    from ray._private.state import state

    return dict(state.get_max_resources_from_cluster_config() or {})


def deploy_application(application: dict[str, Any]) -> None:
    """Have Serve deploy an entry of a configuration file, as `serve deploy` does; returns at once.

    Serve versions replicas by their entry, so replicas with an unchanged entry keep running;
    `serve.run` restarts all. Serve removes all applications that a configuration does not name, so
    the configuration keeps the deployed ones. The public ways are the command, and REST by the
    dashboard, which may not run. Look for a function in ray.serve.
    """
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    client = _get_global_client()
    deployed = client.get_serve_details()["applications"]
    others = [
        each["deployed_app_config"]
        for name, each in deployed.items()
        if name != application["name"] and each.get("deployed_app_config")
    ]
    config = {"applications": [*others, application]}
    client.deploy_apps(ServeDeploySchema.model_validate(config))
