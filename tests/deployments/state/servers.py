"""Stores for tests: real redis-server processes, and a runner of scenarios on any store."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis

from penstock.deployments.options import StateOptions
from penstock.deployments.state.factory import open_store
from penstock.deployments.state.store import StateError, Store
from tests.deployments.ports import free_port

PAGE = Path(__file__).parents[3] / "docs" / "operations" / "state.md"
BUDGET = {"budget_s": 5.0}
PASSWORD = "of-a-test"
START_S = 60.0


class RedisServer:
    """One redis-server of our own. `start` again after `kill`: the same port, folder and flags."""

    def __init__(self, folder: Path, *flags: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.folder = folder
        self.flags = list(flags)
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(exist_ok=True, parents=True)

    def start(self, *, is_tls: bool = False) -> RedisServer:
        port = (
            ["--port", "0", "--tls-port", str(self.port)] if is_tls else ["--port", str(self.port)]
        )
        self._process = subprocess.Popen(
            [
                *("redis-server", *port, "--bind", "127.0.0.1"),
                *("--dir", str(self.folder), "--save", "", *self.flags),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if not is_tls:
            self._wait()
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.ask("PING")
                return
            except redis.AuthenticationError:
                return
            except redis.RedisError:
                assert time.monotonic() < deadline, "redis-server did not start"
                time.sleep(0.02)

    def ask(self, *command: Any, **login: str) -> Any:
        """A command of an operator."""
        with redis.Redis(port=self.port, retry=None, **login) as client:  # type: ignore[arg-type]
            return client.execute_command(*command)

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


def acl_of_the_page(user: str) -> list[str]:
    """The rules that the operators' page gives for this user, as words."""
    found = re.search(rf"^ACL SETUSER {user} (.*)$", PAGE.read_text(), re.M)
    assert found is not None
    return found[1].split()


@dataclass
class Backend:
    """One kind of store, for `run`."""

    options: StateOptions
    is_shared: bool  # several clients have connections of their own

    def run(self, scenario: Callable[..., Awaitable[Any]], num: int = 1) -> Any:
        """What `scenario(store, ...)` returns, given `num` clients of the same store."""

        async def whole() -> Any:
            stores = [await open_store(self.options) for _ in range(num if self.is_shared else 1)]
            try:
                return await scenario(*(stores * num)[:num])
            finally:
                for store in stores:
                    await store.close()

        return asyncio.run(whole())


def redis_backend(server: RedisServer, **settings: str) -> Backend:
    """With keys of its own."""
    options = {"state_url": server.url, "state_prefix": f"penstock:{uuid.uuid4().hex}:"}
    return Backend(StateOptions(**{**options, **settings}), is_shared=True)


def as_user(server: RedisServer, user: str, folder: Path) -> Backend:
    """As a user of the operators' page, who may call functions ("penstock"), or may not."""
    server.ask("ACL", "SETUSER", user, *acl_of_the_page(user), f">{PASSWORD}")
    password = folder / "password"
    password.write_text(f"{PASSWORD}\n")
    url = server.url.replace("redis://", f"redis://{user}@")
    return redis_backend(server, state_url=url, state_password_file=str(password))


async def until(
    call: Callable[[], Awaitable[Any]], *, within_s: float, every_s: float = 0.05
) -> tuple[Any, float]:
    """The first result of `call` that is no StateError, and after how many seconds it came."""
    began = time.monotonic()
    while True:
        try:
            return await call(), time.monotonic() - began
        except StateError:
            if time.monotonic() - began > within_s:
                raise
        await asyncio.sleep(every_s)


async def append_until(store: Store, name: str, is_over: Callable[[], bool]) -> list[bytes]:
    """Append a record at a time, each repeated until it is acknowledged; returns them."""
    records: list[bytes] = []
    while not is_over():
        index, record = len(records), b"%d" % len(records)
        call = partial(store.append, name, index, [record], budget_s=0.2)
        await until(call, within_s=30.0, every_s=0.02)
        records.append(record)
    return records
