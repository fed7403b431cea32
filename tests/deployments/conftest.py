"""A server for the tests of a file, with the engine in this process, and plain ends of it."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import httpx
import pytest

from tests.deployments.serving import EngineBackend, Serving


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    backend = EngineBackend()
    with Serving(backend) as running:
        yield running
    backend.stop()


@pytest.fixture(scope="module")
def raw(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.base_url, timeout=30) as plain:
        yield plain


@pytest.fixture(scope="module")
def channel(serving: Serving) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(serving.grpc_target) as opened:
        yield opened
