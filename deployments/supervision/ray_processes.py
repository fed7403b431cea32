"""Starts the Ray node of `penstock serve` with the processes that it uses, and with no others.

Beside the control plane (GCS) and the raylet, Ray starts five Python programs on a head node, some
300 MB and seconds of CPU time: the dashboard's server, which with `include_dashboard=False` only
reports usage statistics; the dashboard's agent, for jobs and for Ray's own metrics; the agent that
makes runtime environments; the monitor of the autoscaler; the log monitor, which copies output of
replicas to the driver. This cluster has one node, whose replicas log into files and serve metrics
of their own, and environments.py makes their environments. A cluster that `ray start` made has them
all, and is where jobs are submitted.

Ray has no settings for it, so this replaces functions of its own, as ray_workarounds.py does.
Nothing here imports Ray before it is called.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.deployments.placement import ClusterResources
from penstock.deployments.supervision.environments import Environments
from penstock.deployments.supervision.fork_server import ForkServer
from penstock.deployments.supervision.preloaded import PRELOADED

# In place of an agent: the raylet requires both, ends when one does, and must not be outlived. Its
# parent is process 1 where the raylet ended before the shell looked. A terminal sends Ctrl-C to all
# processes of the command: to this one, too, which must outlast the server's drain.
PLACEHOLDER = (
    *("sh", "-c"),
    "trap '' INT; while [ $PPID != 1 ] && kill -0 $PPID; do sleep 5; done 2>/dev/null",
)
PLACEHOLDER_FLAGS = ("--dashboard_agent_command", "--runtime_env_agent_command")
NOT_STARTED = ("start_api_server", "start_log_monitor", "start_monitor")  # methods of ray's Node
WORKER_FLAG = "--python_worker_command"
RESOURCES_FLAG = "--static_resource_list"
NO_PORT = 1  # of an agent that does not listen: only root may open it, so no one else answers
RAYLET = "raylet"
# For `ray.init(_system_config=...)`: processes collect no metrics for the agent, which would pass
# them on, and do not wait for it. `ray.init` does not wait for a first worker process either: the
# driver imports Serve meanwhile, which it cannot while it waits (Ray holds the GIL).
SYSTEM_CONFIG = {
    "enable_metrics_collection": False,
    "prestart_worker_first_driver": False,
    **PRELOADED,
}


@contextlib.contextmanager
def only_what_is_used(
    environments: Environments,
    forks: ForkServer,
    of_workers: Callable[[ClusterResources], Mapping[str, str]],
) -> Iterator[None]:
    """Meanwhile `ray.init` starts no process that nothing here uses.

    `environments`: answers in place of the agent that makes them. `of_workers`: the variables of
    the workers on a node with these resources, for `ForkServer.serve`.

    Look in `start_head_processes` (_private/node.py) and `start_raylet` (_private/services.py) for
    settings. Raises AttributeError if Ray lacks one of the functions that are replaced.
    """
    from ray._private import services, utils, worker
    from ray._private.node import Node

    start_process = services.start_ray_process

    def start(command: Sequence[str], process_type: str, *args: Any, **options: Any) -> Any:
        if process_type == RAYLET:
            command = forking(without_agents(command, environments), forks)
        started = start_process(command, process_type, *args, **options)
        if process_type == RAYLET:
            forks.serve(started.process.pid, of_workers(resources_of(command)))
        return started

    with contextlib.ExitStack() as replaced:
        for name in NOT_STARTED:
            replaced.enter_context(_replaced(Node, name, _nothing))
        replaced.enter_context(_replaced(services, "start_ray_process", start))
        # It imports what the dashboard's agent needs, for a flag of the agent.
        replaced.enter_context(_replaced(utils, "get_dashboard_dependency_error", _nothing))
        # Under `uv run`, or with RAY_RUNTIME_ENV_HOOK, Ray asks for an environment by itself, and
        # no agent would make it. The processes run this process's Python anyway.
        replaced.enter_context(_replaced(worker, "_maybe_modify_runtime_env", _unchanged))
        yield


def without_agents(command: Sequence[str], environments: Environments) -> list[str]:
    """The raylet's command with placeholders for its agents.

    Also writes the files by which agents tell the raylet their ports: it waits for them.
    `environments` begins to listen on the raylet's address.
    """
    from ray import _raylet

    names: Any = _raylet  # compiled, without types
    flags = _flags(command)
    ports = {
        names.DASHBOARD_AGENT_LISTEN_PORT_NAME: NO_PORT,
        names.METRICS_AGENT_PORT_NAME: NO_PORT,
        names.METRICS_EXPORT_PORT_NAME: NO_PORT,
        names.RUNTIME_ENV_AGENT_PORT_NAME: environments.listen(flags["--node_ip_address"]),
    }
    for name, port in ports.items():
        names.persist_port(flags["--session_dir"], flags["--node_id"], name, port)
    placeholder = shlex.join(PLACEHOLDER)
    return [
        f"{flag}={placeholder}" if (flag := part.split("=", 1)[0]) in PLACEHOLDER_FLAGS else part
        for part in command
    ]


def resources_of(command: Sequence[str]) -> ClusterResources:
    """Those of the raylet with this command: its node's, as Ray has found them."""
    names_and_amounts = _flags(command)[RESOURCES_FLAG].split(",")
    amounts = map(float, names_and_amounts[1::2])
    resources = dict(zip(names_and_amounts[::2], amounts, strict=True))
    return ClusterResources.of_ray([{"Alive": True, "Resources": resources}])


def _flags(command: Sequence[str]) -> dict[str, str]:
    return dict(part.split("=", 1) for part in command if part.startswith("--") and "=" in part)


def forking(command: Sequence[str], forks: ForkServer) -> list[str]:
    """The raylet's command, by which it asks the fork server for worker processes."""

    def changed(part: str) -> str:
        flag, _, value = part.partition("=")
        if flag != WORKER_FLAG:
            return part
        return f"{flag}={subprocess.list2cmdline(forks.command(shlex.split(value)))}"

    return [changed(part) for part in command]


def _nothing(*_: Any, **__: Any) -> None:
    """In place of NOT_STARTED, and of the look at what the dashboard needs."""


def _unchanged(runtime_env: Any, _skip_env_hook: bool) -> Any:
    """In place of what asks for a runtime environment."""
    return runtime_env


@contextlib.contextmanager
def _replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, before)
