"""A redis-server of a row's own, with an append-only file, that can be killed and started again."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import redis

from benchmarks.faults.table.rows import CannotInject
from penstock.deployments.bench.own_server import free_port

START_S = 20.0


class RedisProcess:
    """Use as an async context manager."""

    def __init__(self) -> None:
        if shutil.which("redis-server") is None:
            raise CannotInject("redis-server is not installed here")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = Path(tempfile.mkdtemp(prefix="pst-redis-"))
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> RedisProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.send(signal.SIGCONT)
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def start(self) -> None:
        """With the same port, folder and data. Raises TimeoutError."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self._folder), "--appendonly", "yes", "--appendfsync", "everysec"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        async with asyncio.timeout(START_S):
            while True:
                try:
                    self.ask("PING")
                    return
                except redis.RedisError:
                    await asyncio.sleep(0.02)

    def ask(self, *command: Any) -> Any:
        """A command of an operator. Raises redis.RedisError."""
        with redis.Redis(port=self.port, retry=None, socket_timeout=2) as client:  # type: ignore[arg-type]
            return client.execute_command(*command)

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def cut_its_file(self, num_bytes: int) -> None:
        """Take bytes from the end of the append-only file, as a loss of power does."""
        file = max(self._folder.glob("appendonlydir/*.incr.aof"), key=os.path.getsize)
        os.truncate(file, max(file.stat().st_size - num_bytes, 0))
