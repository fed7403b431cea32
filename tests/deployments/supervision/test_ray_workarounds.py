"""Each workaround still meets the internals of Ray that it was written for, and has its effect."""

from __future__ import annotations

import inspect
import logging
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray import JobID
from ray._private import node, state, utils, worker
from ray._private.authentication import authentication_utils
from ray.serve import context, schema
from ray.serve._private import constants, logging_utils, replica

from penstock.deployments.supervision import ray_workarounds
from penstock.workers.errors import ConfigError


def test_the_version_of_ray_is_the_one_that_was_looked_at():
    assert ray.__version__.startswith(f"{ray_workarounds.SEEN_ON}.")


def test_a_cluster_without_tokens_is_refused(monkeypatch):
    ray_workarounds.require_token_auth()  # not connected: there is nothing to refuse
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert authentication_utils.is_token_auth_enabled()  # so conftest.py has it, for this process
    ray_workarounds.require_token_auth()
    monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda: False)
    with pytest.raises(ConfigError, match=r"RAY_AUTH_MODE=token on every node.*--insecure"):
        ray_workarounds.require_token_auth()


def test_the_port_of_a_replica_is_bound_to_loopback(monkeypatch):
    assert "add_port_to_grpc_server(" in inspect.getsource(replica)
    addresses = []
    monkeypatch.setattr(constants, "RAY_SERVE_USE_GRPC_BY_DEFAULT", False)
    monkeypatch.setattr(
        replica, "add_port_to_grpc_server", lambda server, address: addresses.append(address) or 7
    )
    ray_workarounds.keep_serve_port_local()
    assert replica.add_port_to_grpc_server(None, "[::]:0") == 7
    assert addresses == ["127.0.0.1:0"]


def test_the_port_stays_open_where_serve_itself_uses_it(monkeypatch):
    before = replica.add_port_to_grpc_server
    monkeypatch.setattr(constants, "RAY_SERVE_USE_GRPC_BY_DEFAULT", True)
    ray_workarounds.keep_serve_port_local()
    assert replica.add_port_to_grpc_server is before


def test_ray_leaves_the_handler_of_sigterm_alone(monkeypatch):
    monkeypatch.setattr(utils, "set_sigterm_handler", utils.set_sigterm_handler)
    monkeypatch.setattr(node.atexit, "register", lambda _: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        node.Node._register_shutdown_hooks(SimpleNamespace())
        assert signal.getsignal(signal.SIGTERM) is not before, "Ray replaces it no more"
    finally:
        signal.signal(signal.SIGTERM, before)
    ray_workarounds.keep_own_sigterm_handler()
    node.Node._register_shutdown_hooks(SimpleNamespace())
    assert signal.getsignal(signal.SIGTERM) is before


def test_messages_of_the_raylet_go_to_the_log_and_not_to_stdout(monkeypatch, capfd, caplog):
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    ray_workarounds.log_raylet_messages()

    class Subscriber:
        """Gives the listener one message; at the next call the connection is gone."""

        def __init__(self):
            self.messages = [(b"", {"job_id": None, "error_message": "A worker died"})]

        def subscribe(self):
            pass

        def poll(self):
            if not self.messages:
                raise ConnectionError("closed")
            return self.messages.pop()

    driver = SimpleNamespace(gcs_error_subscriber=Subscriber(), current_job_id=JobID.nil())
    with caplog.at_level(logging.DEBUG, "penstock.ray"):
        worker.listen_error_messages(driver, threading.Event())
    assert "(raylet) A worker died" in caplog.messages
    assert "A worker died" not in capfd.readouterr().out


def test_serve_still_reads_the_variable_that_joins_the_loops():
    (name,) = ray_workarounds.one_event_loop()
    assert name in inspect.getsource(constants)


def test_the_niceness_of_workers_is_still_a_setting_of_ray():
    assert "RAY_worker_niceness" in ray_workarounds.driver_environment()
    raylet = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"
    assert b"worker_niceness" in raylet.read_bytes()


def test_serve_still_reads_the_variable_that_keeps_its_log_out_of_the_output():
    assert ray_workarounds.driver_environment()["RAY_SERVE_LOG_TO_STDERR"] == "0"
    assert '"RAY_SERVE_LOG_TO_STDERR"' in inspect.getsource(constants)
    assert "if RAY_SERVE_LOG_TO_STDERR" in inspect.getsource(logging_utils)


def test_a_start_that_took_too_long_raises_a_bare_exception():
    source = inspect.getsource(node)
    assert "raise Exception(" in source
    assert ray_workarounds.is_start_timeout(Exception("30 s"))
    assert not ray_workarounds.is_start_timeout(ValueError("no"))


def test_the_logger_is_the_one_that_serve_configures():
    assert ray_workarounds.serve_logger().name == constants.SERVE_LOGGER_NAME


def test_ray_still_knows_what_its_autoscaler_may_start():
    assert "GCS_AUTOSCALER_CLUSTER_CONFIG_KEY" in inspect.getsource(state)
    assert callable(state.state.get_max_resources_from_cluster_config)


def test_serve_is_deployed_by_its_configuration_and_other_applications_stay(monkeypatch):
    """What other applications were deployed with is in the details of Serve."""
    assert "deployed_app_config" in inspect.getsource(schema.ApplicationDetails)
    ours = {"name": "penstock", "import_path": "penstock.deployments.app:build_app", "args": {}}
    other = {"name": "other", "route_prefix": "/other", "import_path": "other:app"}
    details = {
        "other": {"deployed_app_config": other},
        "code": {"deployed_app_config": None},  # deployed by serve.run: no configuration has it
        "penstock": {"deployed_app_config": {**ours, "args": {"kv": "int8"}}},
    }

    class Client:
        deployed = None

        def get_serve_details(self):
            return {"applications": details}

        def deploy_apps(self, config):
            Client.deployed = config

    monkeypatch.setattr(context, "_get_global_client", lambda: Client())
    ray_workarounds.deploy_application(ours)
    applications = Client.deployed.applications
    assert [each.name for each in applications] == ["other", "penstock"]
    assert applications[1].args == {}
