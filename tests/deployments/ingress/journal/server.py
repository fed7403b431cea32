"""A server with journals, for tests that kill it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import httpx
import pytest
import uvicorn

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.grpc.server import start_server
from penstock.deployments.ingress.http.app import build_app
from penstock.deployments.ingress.journal.journals import Journals
from penstock.deployments.options import StateOptions
from penstock.deployments.state.factory import open_store
from penstock.workers.request import Delta
from tests.deployments.forked import Forked
from tests.deployments.ingress.patience import be_patient
from tests.deployments.ports import free_port
from tests.deployments.serving import EngineBackend, core_over

TOKEN_S = 0.01


class JournalServer:
    """The server as a process. A context manager; `start` again after `kill`: the same ports."""

    def __init__(self, state_url: str):
        self.http_port, self.grpc_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.target = f"127.0.0.1:{self.grpc_port}"
        self._state_url = state_url
        self._process: Forked | None = None

    def __enter__(self) -> JournalServer:
        self.start()
        try:
            self.wait()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._process = Forked(serve, self.http_port, self.grpc_port, self._state_url)

    def wait(self) -> None:
        """Until it serves."""
        assert self._process is not None
        deadline_s = time.monotonic() + 150
        while True:
            try:
                httpx.get(f"{self.url}/ready").raise_for_status()
                return
            except httpx.HTTPError:
                assert not self._process.has_ended, "the server has ended"
                assert time.monotonic() < deadline_s, "the server did not start"
                time.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()


class SlowBackend(EngineBackend):
    """A real engine whose tokens come slowly, so that a kill meets a stream that has not ended."""

    async def generate(self, admission: AdmissionRequest) -> AsyncIterator[Delta]:
        async with aclosing(super().generate(admission)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield delta
                await asyncio.sleep(TOKEN_S)


def serve(http_port: int, grpc_port: int, state_url: str) -> None:
    asyncio.run(_serve(http_port, grpc_port, state_url))


async def _serve(http_port: int, grpc_port: int, state_url: str) -> None:
    be_patient(pytest.MonkeyPatch())  # for as long as this process lives
    core = core_over(SlowBackend())
    store = await open_store(StateOptions(state_url=state_url))
    journals = Journals(store, f"process {os.getpid()}")
    over_grpc = await start_server(core, f"127.0.0.1:{grpc_port}", journals=journals)
    app = build_app(core, journals=journals)
    config = uvicorn.Config(app, host="127.0.0.1", port=http_port, log_config=None, lifespan="off")
    await uvicorn.Server(config).serve()
    await over_grpc.stop()
