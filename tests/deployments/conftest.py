"""Shared by the tests of a file: an event loop, a model, a server with plain clients, Ray nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from tests.deployments import serving as servers
from tests.deployments.serving import EngineBackend, Serving

if TYPE_CHECKING:
    from tests.deployments.nodes import Nodes


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines on one event loop. One that fails leaves nothing there: it is run again."""
    with asyncio.Runner() as runner:

        def run_alone(work: Coroutine[Any, Any, Any]) -> Any:
            try:
                return runner.run(work)
            except BaseException:
                runner.run(_cancel_the_others())
                raise

        yield run_alone


async def _cancel_the_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for each in others:
        each.cancel()
    if others:
        await asyncio.wait(others, timeout=20)


@pytest.fixture(scope="module")
def model() -> Any:
    """The built-in model in fp32, on one thread."""
    return servers.model()


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[Nodes]:
    """A Ray cluster of several nodes on this machine: only its head, until a test adds nodes."""
    from tests.deployments.nodes import Nodes

    made = Nodes()
    yield made
    made.close()


@pytest.fixture(scope="module")
def backend() -> Iterator[EngineBackend]:
    """A real engine, for servers that a test makes."""
    made = servers.EngineBackend()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with servers.engine_serving() as running:
        yield running


@pytest.fixture(scope="module")
def raw(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.base_url, timeout=30) as plain:
        yield plain


@pytest.fixture(scope="module")
def channel(serving: Serving) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(serving.grpc_target) as opened:
        yield opened
