"""The HTTP answers to the raylet's requests for a runtime environment."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from ray._private.runtime_env.context import RuntimeEnvContext
from ray.core.generated import runtime_env_agent_pb2 as messages

from penstock.deployments.supervision.environments import LARGEST_BYTES, Environments


@pytest.fixture
def port() -> Iterator[int]:
    environments = Environments()
    yield environments.listen("127.0.0.1")
    environments.close()


def post(
    port: int, path: str, wanted: dict[str, Any] | None = None, length: int | None = None
) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    request = messages.GetOrCreateRuntimeEnvRequest(serialized_runtime_env=json.dumps(wanted or {}))
    headers = {} if length is None else {"Content-Length": str(length)}
    connection.request("POST", path, request.SerializeToString(), headers)
    response = connection.getresponse()
    return response.status, response.read()


def test_variables_are_set(port):
    variables = {"A": "1", "B": "x y"}
    status, body = post(port, "/get_or_create_runtime_env", {"env_vars": variables, "pip": None})
    reply = messages.GetOrCreateRuntimeEnvReply.FromString(body)
    assert (status, reply.status) == (200, messages.AGENT_RPC_STATUS_OK)
    context = RuntimeEnvContext.deserialize(reply.serialized_runtime_env_context)
    assert vars(context) == vars(RuntimeEnvContext(env_vars=variables))


def test_another_environment_is_refused_with_the_remedy(port):
    wanted = {"env_vars": {"A": "1"}, "working_dir": "gcs://a.zip", "pip": ["b"]}
    status, body = post(port, "/get_or_create_runtime_env", wanted)
    reply = messages.GetOrCreateRuntimeEnvReply.FromString(body)
    assert (status, reply.status) == (200, messages.AGENT_RPC_STATUS_FAILED)
    assert "this one has pip, working_dir" in reply.error_message
    assert "penstock serve --ray-address auto" in reply.error_message


def test_there_is_none_to_delete_or_list(port):
    status, body = post(port, "/delete_runtime_env_if_possible")
    reply = messages.DeleteRuntimeEnvIfPossibleReply.FromString(body)
    assert (status, reply.status) == (200, messages.AGENT_RPC_STATUS_OK)
    status, body = post(port, "/get_runtime_envs_info")
    assert status == 200
    assert not messages.GetRuntimeEnvsInfoReply.FromString(body).runtime_env_states


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [("/elsewhere", None, 404), ("/get_runtime_envs_info", LARGEST_BYTES + 1, 413)],
)
def test_other_requests_are_refused(port, path, length, status):
    assert post(port, path, length=length)[0] == status


def test_other_machines_are_not_answered(port):
    """An address of this machine other than the one that is listened at stands for another one."""
    with socket.create_connection(("127.0.0.1", port), 30, ("127.0.0.2", 0)) as other:
        try:
            other.sendall(b"POST /get_runtime_envs_info HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
            assert other.recv(64) == b""
        except ConnectionError:
            pass  # closed before it was read
    assert post(port, "/get_runtime_envs_info")[0] == 200


def test_it_listens_anew_for_a_second_start_and_not_once_closed():
    environments = Environments()
    environments.listen("127.0.0.1")
    port = environments.listen("127.0.0.1")
    assert post(port, "/get_runtime_envs_info")[0] == 200
    environments.close()
    with pytest.raises(ConnectionRefusedError):
        post(port, "/get_runtime_envs_info")
