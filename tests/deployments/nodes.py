"""Several Ray nodes on this machine, as `ray.cluster_utils` makes them, and what runs on each.

All have the address of this machine, so the ingresses of several nodes share its ports. They have
the processes of a server's own Ray, and fork those of actors: with Ray's agents, and a Python
program for each actor, these tests take about twice the CPU time. Nodes that the commands of users
start are in manifests/local_nodes.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio
import ray
from ray import serve
from ray._private.state import state
from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster as RayNodes

from penstock.deployments.client import AsyncClient
from penstock.deployments.client.base import CHANNEL_OPTIONS
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.placement import INGRESS_RESOURCE
from penstock.deployments.supervision.environments import Environments
from penstock.deployments.supervision.fork_server import ForkServer
from penstock.deployments.supervision.processes import descendants, end
from penstock.deployments.supervision.ray_processes import SYSTEM_CONFIG, only_what_is_used
from penstock.deployments.supervision.ray_workarounds import driver_environment
from penstock.deployments.supervision.view import ClusterView

OBJECT_STORE_BYTES = 80 << 20
UP_S = 240.0


class Nodes:
    """A head without CPUs, and nodes that come and go."""

    def __init__(self) -> None:
        for name, value in driver_environment().items():
            os.environ.setdefault(name, value)
        self._forks: list[ForkServer] = []
        self._environments: list[Environments] = []
        self._folder = tempfile.mkdtemp(prefix="ps-")  # short: paths of sockets are limited
        # `cluster_utils` notes the head's address there, and takes the folder for granted.
        os.makedirs(os.path.dirname(get_ray_address_file(None)), exist_ok=True)
        of_head = {"num_cpus": 0, "temp_dir": self._folder, "_system_config": SYSTEM_CONFIG}
        with self._few_processes():
            self._ray = RayNodes(initialize_head=True, head_node_args=of_head | self._common())
        self.address: str = self._ray.address

    @staticmethod
    def _common() -> dict[str, Any]:
        return {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}

    def add(self, num_cpus: float = 1, *, is_for_ingress: bool = False) -> Any:
        resources = {INGRESS_RESOURCE: 1} if is_for_ingress else {}
        with self._few_processes():
            node = self._ray.add_node(num_cpus=num_cpus, resources=resources, **self._common())
        self._ray.wait_for_nodes()
        return node

    @contextlib.contextmanager
    def _few_processes(self) -> Iterator[None]:
        """For the start of one node."""
        self._environments.append(Environments())
        self._forks.append(ForkServer())
        with only_what_is_used(self._environments[-1], self._forks[-1], lambda _: {}):
            yield

    def __contains__(self, node: Any) -> bool:
        return node in self._ray.worker_nodes

    def kill(self, node: Any) -> None:
        """As if its machine had lost power."""
        self._ray.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        pids = descendants(os.getpid())
        if ray.is_initialized():  # else Serve would connect to any cluster of this machine
            with contextlib.suppress(Exception):
                serve.shutdown()
        ray.shutdown()
        self._ray.shutdown()
        end(pids, 2.0)
        for forks in self._forks:
            forks.close()
        for environments in self._environments:
            environments.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def within(seconds: float) -> Callable[[ClusterView], None]:
    """For `Cluster.wait_until_up`, which waits without an end: fails with what Serve and the
    registry say once the time is over."""
    deadline_s = time.monotonic() + seconds

    def check(view: ClusterView) -> None:
        assert time.monotonic() < deadline_s, (serve.status(), ray.available_resources(), view)

    return check


@contextlib.contextmanager
def deployed(config: ServeConfig) -> Iterator[Cluster]:
    """`config`, deployed on the cluster that it names, until all its replicas serve."""
    ray.shutdown()  # a test that failed, and runs once more, has left its connection
    cluster = Cluster(config)
    try:
        cluster.start_ray()
        cluster.deploy()
        cluster.wait_until_up(within(UP_S))
        yield cluster
    finally:
        serve.delete(config.app_name)


class ClientOfOneConnection(AsyncClient):
    """Shares its connection with no other, so that clients spread over the ingresses."""

    def _connect(self, target: str, credentials: Any) -> Any:
        own = ("grpc.use_local_subchannel_pool", 1)
        return grpc.aio.insecure_channel(target, options=[*CHANNEL_OPTIONS, own])


def nodes_of(replica: str) -> list[str]:
    """Ids of the nodes on which the living replicas of a deployment run."""
    return [
        actor["Address"]["NodeID"]
        for actor in state.actor_table(None).values()
        if actor["State"] == "ALIVE" and f"#{replica}#" in actor["Name"]
    ]


def nodes_of_class(name: str) -> list[str]:
    """The same for actors that are no replicas, by the name of their class."""
    return [
        actor["Address"]["NodeID"]
        for actor in state.actor_table(None).values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"] == name
    ]
