"""What each process of a server imports: no more than it uses, whatever is installed beside it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PRELOAD = "penstock.deployments.supervision.preloaded"
MODEL = {"torch", "transformers", "safetensors", "triton"}
TABLES = {"pandas", "pyarrow"}
FRONT = {"aiohttp", "prometheus_client", "penstock.deployments.ingress.http"}
REDIS = {"redis", "penstock.deployments.state.redis"}


def imported_by(*modules: str, also: str = "") -> set[str]:
    """All modules that a new process has, once it has imported these in turn."""
    lines = [f"import {each}" for each in modules]
    script = "\n".join([*lines, also, "import json, sys", "print(json.dumps(list(sys.modules)))"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("module", "unused"),
    [
        ("penstock.deployments.app", MODEL | TABLES | FRONT | REDIS),  # the driver
        ("penstock.deployments.ingress.listeners", MODEL | TABLES | REDIS),
        ("penstock.deployments.gate.server", MODEL | TABLES | FRONT | REDIS | {"ray.serve"}),
        ("penstock.deployments.supervision.registry", MODEL | TABLES | {"ray.serve", "grpc"}),
        # of the worker, before it sets the variables that torch's libraries read
        ("penstock.deployments.worker.replica", MODEL | TABLES | FRONT | REDIS),
    ],
)
def test_a_process_imports_nothing_that_it_does_not_use(module, unused):
    modules = imported_by(PRELOAD, "ray", module)
    assert module in modules and not modules & unused


def test_the_fork_server_imports_what_all_processes_use_and_no_model():
    also = "from penstock.deployments.supervision import fork_server as server\n"
    also += "server._import([*server.BEFORE_THE_RAYLET, *server.AFTER_THE_RAYLET])\n"
    first = imported_by(also=also)
    assert not imported_by(PRELOAD, "ray", "ray.serve._private.controller") - first
    also += "server._import(server.AFTER_THE_FIRST)"
    modules = imported_by(also=also)
    assert not modules & (MODEL | TABLES | REDIS)
    for process in ("ingress.listeners", "gate.server", "worker.replica", "supervision.registry"):
        module = f"penstock.deployments.{process}"
        assert not imported_by(PRELOAD, "ray", module) - modules
    workers = "ray._private.workers"  # runs as a program
    own = {workers, f"{workers}.default_worker"}
    assert not imported_by(PRELOAD, "ray", *own) - modules - own


def test_the_process_that_forks_workers_imports_what_a_worker_loads_a_model_with():
    also = """
from penstock.deployments.supervision import fork_server as server
server._import([*server.BEFORE_THE_RAYLET, *server.AFTER_THE_RAYLET, *server.OF_WORKERS])
import os, sys
before = set(sys.modules)
from penstock.workers.config import EngineConfig
from penstock.workers.worker import Worker
assert len(os.listdir("/proc/self/task")) == 1
Worker.load(EngineConfig(model="builtin"), model_name="m", host="127.0.0.1").stop()
assert set(sys.modules) == before, set(sys.modules) - before
"""
    assert "torch" in imported_by(also=also)


def test_a_driver_starts_the_fork_server_before_it_imports_ray():
    assert "ray" not in imported_by("penstock.deployments.supervision.fork_server")


def test_before_the_raylet_the_fork_server_does_not_load_ray():
    also = "from penstock.deployments.supervision import fork_server as server\n"
    also += "server._import(server.BEFORE_THE_RAYLET)"
    assert "ray" not in imported_by(also=also)


def test_serve_finds_no_pandas_and_others_do():
    pytest.importorskip("pandas")
    assert "pandas" in imported_by("ray.serve"), "Serve imports it no more: preloaded.py can go"
    assert not imported_by(PRELOAD, "ray.serve") & TABLES
    found = imported_by(PRELOAD, "ray.serve", "pandas", "pyarrow", also="assert pandas.DataFrame")
    assert found >= TABLES


def test_serve_does_not_load_openmp_before_the_worker_sets_its_variables():
    script = "assert 'gomp' not in open('/proc/self/maps').read()"
    imported_by(PRELOAD, "ray.serve", "penstock.deployments.worker.replica", also=script)
