"""The three clients of fault runs hear the same of each call, from real servers over an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.faults.clients import NAMES, CallError, Clients, Heard
from benchmarks.faults.workload import FEATURES
from tests.deployments.serving import Serving, engine_serving

SHORT = [feature for feature in FEATURES if feature != "long"]  # longer than these servers permit


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with engine_serving() as running:
        yield running


@pytest.fixture(scope="module")
def heard(serving: Serving) -> dict[tuple[str, str], Heard]:
    """Of each feature by each client; calls without a seed get one."""

    async def all_calls() -> dict[tuple[str, str], Heard]:
        async with Clients(serving.base_url, serving.grpc_target, "builtin") as clients:
            found = {}
            for feature in SHORT:
                number = FEATURES.index(feature)
                seed = 77 if feature == "unseeded" else None
                for name in NAMES:
                    found[feature, name] = await clients.call(name, number, seed)
            return found

    return asyncio.run(all_calls())


@pytest.mark.parametrize("feature", SHORT)
def test_clients_agree(heard: dict[tuple[str, str], Heard], feature: str) -> None:
    by_grpc, by_openai, by_http = (heard[feature, name] for name in ("gRPC", "openai", "HTTP"))
    assert by_openai.answer == by_http.answer
    assert by_grpc.answer.text == by_http.answer.text
    assert by_grpc.answer.ids == by_http.answer.ids
    assert by_grpc.answer.tool_calls == by_http.answer.tool_calls
    assert sum(map(len, by_http.answer.ids.values())) > 5
    for each in (by_grpc, by_openai, by_http):
        assert each.request_id
        assert -1 in each.answer.ends  # the usage
        assert each.arrivals == sorted(each.arrivals)


def test_a_call_has_its_feature(heard: dict[tuple[str, str], Heard]) -> None:
    assert heard["tools", "HTTP"].answer.tool_calls or heard["tools", "HTTP"].answer.text
    assert set(heard["n", "gRPC"].answer.ids) == {0, 1, 2}
    for name in NAMES:
        assert heard["logprobs", name].answer.scored[0]
        assert heard["json_schema", name].answer.text[0].startswith("{")


def test_a_refused_call_is_lost_at_once(serving: Serving) -> None:
    async def call() -> None:
        async with Clients(serving.base_url, serving.grpc_target, "no-such-model") as clients:
            await clients.call("HTTP", 0)

    with pytest.raises(CallError, match="no-such-model"):
        asyncio.run(call())
