"""A server for tests that kill it: `... -m tests.deployments.batch.engine_server PORT [DATA_DIR]`.

The HTTP API over an engine in this process, without Ray; with DATA_DIR also files and batches, the
lease of which is a quick one (quick_lease.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import uvicorn

from penstock.deployments.ingress.http.app import build_app
from penstock.deployments.ingress.http.in_process import batch_executor
from tests.deployments.batch.quick_lease import shorten
from tests.deployments.serving import EngineBackend, core_over


class EngineServer:
    """The server as a process. A context manager."""

    def __init__(self, port: int, data_dir: Path | None = None):
        self._data_dir = data_dir
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EngineServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.deployments.batch.engine_server", str(self._port)]
        command += [] if self._data_dir is None else [str(self._data_dir)]
        self._process = subprocess.Popen(command)
        deadline_s = time.monotonic() + 150
        while True:
            try:
                httpx.get(f"{self.url}/ready").raise_for_status()
                return
            except httpx.HTTPError:
                assert self._process.poll() is None, "the server has ended"
                assert time.monotonic() < deadline_s, "the server did not start"
                time.sleep(0.05)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


async def main(port: int, data_dir: Path | None) -> None:
    core = core_over(EngineBackend())
    if data_dir is not None:
        shorten()
        executing = asyncio.ensure_future(batch_executor(core, data_dir).run())
        executing.add_done_callback(lambda _: sys.exit("the executor has ended"))
    app = build_app(core, data_dir=data_dir)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, lifespan="off")
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    asyncio.run(main(int(sys.argv[1]), folder))
