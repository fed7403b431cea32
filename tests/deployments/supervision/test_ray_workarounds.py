"""Each workaround still meets the internals of Ray that it was written for, and has its effect."""

from __future__ import annotations

import inspect
from pathlib import Path

import ray
from ray._private import node
from ray.serve._private import constants, replica

from penstock.deployments.supervision import ray_workarounds


def test_the_version_of_ray_is_the_one_that_was_looked_at():
    assert ray.__version__.startswith(f"{ray_workarounds.SEEN_ON}.")


def test_the_port_of_a_replica_is_bound_to_loopback(monkeypatch):
    assert "add_port_to_grpc_server(" in inspect.getsource(replica)
    asked = []
    monkeypatch.setattr(constants, "RAY_SERVE_USE_GRPC_BY_DEFAULT", False)
    monkeypatch.setattr(
        replica, "add_port_to_grpc_server", lambda server, address: asked.append(address) or 7
    )
    ray_workarounds.keep_serve_port_local()
    assert replica.add_port_to_grpc_server(None, "[::]:0") == 7
    assert asked == ["127.0.0.1:0"]


def test_the_port_stays_open_where_serve_itself_uses_it(monkeypatch):
    before = replica.add_port_to_grpc_server
    monkeypatch.setattr(constants, "RAY_SERVE_USE_GRPC_BY_DEFAULT", True)
    ray_workarounds.keep_serve_port_local()
    assert replica.add_port_to_grpc_server is before


def test_serve_still_reads_the_variable_that_joins_the_loops():
    (name,) = ray_workarounds.one_event_loop()
    assert name in inspect.getsource(constants)


def test_the_niceness_of_workers_is_still_a_setting_of_ray():
    assert "RAY_worker_niceness" in ray_workarounds.driver_environment()
    raylet = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"
    assert b"worker_niceness" in raylet.read_bytes()


def test_a_start_that_took_too_long_raises_a_bare_exception():
    source = inspect.getsource(node)
    assert "raise Exception(" in source
    assert ray_workarounds.is_start_timeout(Exception("30 s"))
    assert not ray_workarounds.is_start_timeout(ValueError("no"))


def test_the_logger_is_the_one_that_serve_configures():
    assert ray_workarounds.serve_logger().name == constants.SERVE_LOGGER_NAME
