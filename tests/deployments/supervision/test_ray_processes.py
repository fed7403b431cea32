"""Ray's raylet and node are started as ray_processes.py expects it, and what it leaves out."""

from __future__ import annotations

import inspect
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import _raylet
from ray._private import services, utils, worker
from ray._private.node import Node

from penstock.deployments.supervision import ray_processes
from penstock.deployments.supervision.environments import Environments
from penstock.deployments.supervision.fork_server import ForkServer
from penstock.deployments.supervision.processes import descendants, end, is_running

RAYLET = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"


@pytest.fixture
def environments() -> Iterator[Environments]:
    made = Environments()
    yield made
    made.close()


def test_what_is_replaced_is_what_ray_starts_processes_with():
    head = inspect.getsource(Node.start_head_processes)
    node = head + inspect.getsource(Node.start_ray_processes)
    assert all(f"self.{name}(" in node for name in ray_processes.NOT_STARTED)
    source = inspect.getsource(services.start_raylet)
    assert "start_ray_process(" in source
    assert f'"{ray_processes.WORKER_FLAG}=' in source
    assert "get_dashboard_dependency_error()" in source
    assert all(f'"{flag}=' in source for flag in ray_processes.PLACEHOLDER_FLAGS)
    settings = RAYLET.read_bytes()
    assert all(name.encode() in settings for name in ray_processes.SYSTEM_CONFIG)


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


def test_functions_of_ray_are_replaced_only_meanwhile(forks):
    def functions() -> list[object]:
        own = [Node.start_monitor, services.start_ray_process, worker._maybe_modify_runtime_env]
        return [*own, utils.get_dashboard_dependency_error]

    before = functions()
    with ray_processes.only_what_is_used(Environments(), forks, lambda _: {}):
        assert not set(functions()) & set(before)
        assert Node.start_monitor(None) is None  # a real one would need its node
        assert worker._maybe_modify_runtime_env({}, False) == {}
        assert utils.get_dashboard_dependency_error() is None
    assert functions() == before


def test_functions_of_ray_are_put_back_where_its_start_fails(forks):
    before = (Node.start_monitor, services.start_ray_process)

    def fail() -> None:
        with ray_processes.only_what_is_used(Environments(), forks, lambda _: {}):
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fail()
    assert (Node.start_monitor, services.start_ray_process) == before


def test_the_raylet_gets_placeholders_and_the_ports_that_it_waits_for(tmp_path, environments):
    node_id = "ab" * 28
    agent = f"python agent.py --session_dir=elsewhere --node-id={node_id}"
    command = ["raylet", f"--session_dir={tmp_path}", f"--node_id={node_id}", "--head"]
    command += ["--node_ip_address=127.0.0.1"]
    command += [f"{flag}={agent}" for flag in ray_processes.PLACEHOLDER_FLAGS]
    changed = ray_processes.without_agents(command, environments)
    assert changed[:5] == command[:5]
    for part, flag in zip(changed[5:], ray_processes.PLACEHOLDER_FLAGS, strict=True):
        name, _, value = part.partition("=")
        assert (name, tuple(shlex.split(value))) == (flag, ray_processes.PLACEHOLDER)
    raylet: Any = _raylet  # compiled, without types

    def port(name: str) -> int:
        return raylet.wait_for_persisted_port(str(tmp_path), node_id, name, timeout_ms=1000)

    assert port(raylet.METRICS_AGENT_PORT_NAME) == ray_processes.NO_PORT
    with socket.create_connection(("127.0.0.1", port(raylet.RUNTIME_ENV_AGENT_PORT_NAME)), 5):
        pass
    assert len(list(tmp_path.iterdir())) == 4


def test_the_resources_of_a_node_are_those_of_its_raylet():
    command = ["raylet", "--static_resource_list=node:10.0.0.1,1.0,CPU,3.0,GPU,2,memory,66"]
    cluster = ray_processes.resources_of(command)
    assert [(each.num_cpus, each.num_gpus) for each in cluster.nodes] == [(3, 2)]
    assert f'"{ray_processes.RESOURCES_FLAG}=' in inspect.getsource(services.start_raylet)


def test_the_raylet_asks_the_fork_server_for_worker_processes(forks):
    worker = [sys.executable, "/ray/setup_worker.py", "/ray/a folder/default_worker.py", "--a=b"]
    command = ["raylet", f"{ray_processes.WORKER_FLAG}={subprocess.list2cmdline(worker)}", "--b"]
    first, changed, last = ray_processes.forking(command, forks)
    assert (first, last) == ("raylet", "--b")
    name, _, value = changed.partition("=")
    assert (name, shlex.split(value)) == (ray_processes.WORKER_FLAG, forks.command(worker))
    assert forks.command(worker)[-3:] == worker[1:]


def test_a_placeholder_ends_with_the_process_that_started_it():
    start = f"import subprocess; print(subprocess.Popen({ray_processes.PLACEHOLDER!r}).pid)"
    script = f"{start}; import sys, time; sys.stdout.flush(); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    placeholder = int(parent.stdout.readline())
    deadline_s = time.monotonic() + 60
    while not descendants(placeholder) and time.monotonic() < deadline_s:
        time.sleep(0.05)  # it has looked at its parent when it sleeps
    left = [*descendants(parent.pid)]
    try:
        assert placeholder in left and is_running(placeholder)
        parent.kill()
        parent.wait()
        deadline_s = time.monotonic() + 60
        while is_running(placeholder) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert not is_running(placeholder)
    finally:
        parent.kill()
        end([pid for pid in left if is_running(pid)], 0)
