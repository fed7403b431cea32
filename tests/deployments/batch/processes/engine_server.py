"""A server for tests that kill it: the HTTP API over an engine in its process, without Ray.

With a data folder also files and batches, the lease of which is a quick one (quick_lease.py).
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import httpx
import uvicorn

from penstock.deployments.ingress.http.app import build_app
from penstock.deployments.ingress.http.in_process import batch_executor
from tests.deployments.batch.processes.quick_lease import shorten
from tests.deployments.forked import Forked
from tests.deployments.serving import EngineBackend, core_over


class EngineServer:
    """The server as a process. A context manager."""

    def __init__(self, port: int, data_dir: Path | None = None):
        self._data_dir = data_dir
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._process: Forked | None = None

    def __enter__(self) -> EngineServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._process = Forked(serve, self._port, self._data_dir)
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

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send(number)


def serve(port: int, data_dir: Path | None) -> None:
    asyncio.run(_serve(port, data_dir))


async def _serve(port: int, data_dir: Path | None) -> None:
    core = core_over(EngineBackend())
    if data_dir is not None:
        shorten()
        executing = asyncio.ensure_future(batch_executor(core, data_dir).run())
        executing.add_done_callback(lambda _: sys.exit("the executor has ended"))
    app = build_app(core, data_dir=data_dir)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, lifespan="off")
    await uvicorn.Server(config).serve()
