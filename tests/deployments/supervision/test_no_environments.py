"""What the raylet is told in place of a runtime environment, over HTTP as it asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPConnection

import pytest
from ray.core.generated import runtime_env_agent_pb2 as messages

from penstock.deployments.supervision.no_environments import LARGEST_BYTES, NoEnvironments


@pytest.fixture
def port() -> Iterator[int]:
    environments = NoEnvironments()
    yield environments.listen("127.0.0.1")
    environments.close()


def post(port: int, path: str, length: int | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    body = messages.GetOrCreateRuntimeEnvRequest(serialized_runtime_env="{}").SerializeToString()
    headers = {} if length is None else {"Content-Length": str(length)}
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    return response.status, response.read()


def test_an_environment_is_refused_with_the_remedy(port):
    status, body = post(port, "/get_or_create_runtime_env")
    reply = messages.GetOrCreateRuntimeEnvReply.FromString(body)
    assert (status, reply.status) == (200, messages.AGENT_RPC_STATUS_FAILED)
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
    assert post(port, path, length)[0] == status


def test_it_listens_anew_for_a_second_start_and_not_once_closed():
    environments = NoEnvironments()
    environments.listen("127.0.0.1")
    port = environments.listen("127.0.0.1")
    assert post(port, "/get_runtime_envs_info")[0] == 200
    environments.close()
    with pytest.raises(ConnectionRefusedError):
        post(port, "/get_runtime_envs_info")
