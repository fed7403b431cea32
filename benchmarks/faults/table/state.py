"""Rows about what survives a process: ingresses, the state store, and a disk that is full."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults.proxy import proxy
from benchmarks.faults.table.house import House, Plan, Streamed, house, over_grpc
from benchmarks.faults.table.redis_process import RedisProcess
from benchmarks.faults.table.rows import CannotInject, Scale, Seen, row
from benchmarks.faults.table.sse import Events

PROMPT = "It was a bright morning, and"
LONG: dict[str, Any] = {"max_tokens": 500, "seed": 5}
RESUME_S = 60.0
REFUSED_S = 1.0  # a durable call, while the store is down
RECOVERED_S = 2.0


@row(
    5,
    "Ingress dies",
    injected="kill -9 of the ingress under streams over SSE and gRPC, and SIGSTOP of it for 10 "
    "s; a "
    "second ingress and a Redis are there",
    promised="clients go on at the other ingress (Last-Event-ID, Resume) with the whole text, no "
    "token "
    "twice; the thawed ingress has no voice",
    needs=("redis",),
)
async def ingress_dies(scale: Scale, seen: Seen) -> None:
    async with (
        RedisProcess() as redis,
        house(Plan(num_ingresses=2, settings={"state_url": redis.url})) as made,
    ):
        expected = await over_grpc(made.ingresses[1].target, PROMPT, **LONG)
        for how in ["killed"] * scale.of(1, 10) + ["stopped"] * scale.of(0, 2):
            first, second = made.ingresses
            events, num = Events(made.http), asyncio.Event()
            async with proxy(first.target) as relay:

                async def told(num_tokens: int, num: asyncio.Event = num) -> None:
                    if num_tokens > 30:
                        num.set()

                over_sse = asyncio.ensure_future(events.post(first.url, PROMPT, told, **LONG))
                streaming = asyncio.ensure_future(
                    over_grpc(relay.address, PROMPT, told=told, resume_s=RESUME_S, **LONG)
                )
                await num.wait()
                relay.target = second.target
                if how == "killed":
                    await asyncio.to_thread(first.kill)
                else:
                    first.send(signal.SIGSTOP)
                    relay.cut()
                    over_sse.cancel()
                began_s = time.monotonic()
                with contextlib.suppress(httpx.HTTPError, asyncio.CancelledError):
                    await over_sse
                await events.resume(second.url)
                got = await streaming
                seen.most("whole again after s", time.monotonic() - began_s)
            for name, each in (("SSE", events.got), ("gRPC", got)):
                seen.count("streams continued")
                seen.check(each.content == expected.content, f"{name}: {_unequal(each, expected)}")
            seen.note("resumable", events.headers.get("x-penstock-resumable"))
            if how == "stopped":
                first.send(signal.SIGCONT)
            else:
                made.ingresses.remove(first)
                await made.add_ingress()
        await made.check_free(seen)


def _unequal(got: Streamed, expected: Streamed) -> str:
    num = len(got.token_ids)
    is_prefix = got.token_ids == expected.token_ids[:num]
    words = "a prefix of them" if is_prefix else "and other ones"
    return f"{num} of {len(expected.token_ids)} tokens, {words}; error {got.error!r}"


@dataclass(frozen=True)
class StoreFault:
    """One way for a Redis to fail, and to come back."""

    begin: Callable[[RedisProcess], Awaitable[None]]
    end: Callable[[RedisProcess], Awaitable[None]]
    for_s: float = 3.0
    refuses: bool = True  # durable calls fail while it lasts


async def _kill(redis: RedisProcess) -> None:
    redis.kill()


async def _start(redis: RedisProcess) -> None:
    await redis.start()


async def _stop(redis: RedisProcess) -> None:
    redis.send(signal.SIGSTOP)


async def _thaw(redis: RedisProcess) -> None:
    redis.send(signal.SIGCONT)


def _told(*command: Any) -> Callable[[RedisProcess], Awaitable[None]]:
    async def tell(redis: RedisProcess) -> None:
        await asyncio.to_thread(redis.ask, *command)

    return tell


async def _cut_file(redis: RedisProcess) -> None:
    redis.kill()
    redis.cut_its_file(7)


STORE_FAULTS = {
    "killed": StoreFault(_kill, _start),
    "stopped": StoreFault(_stop, _thaw, for_s=20.0),
    "full": StoreFault(
        _told("CONFIG", "SET", "maxmemory", "1"), _told("CONFIG", "SET", "maxmemory", "0")
    ),
    "read-only": StoreFault(_told("REPLICAOF", "127.0.0.1", "1"), _told("REPLICAOF", "NO", "ONE")),
    "file cut by 7 bytes": StoreFault(_cut_file, _start, for_s=1.0),
}


@row(
    7,
    "State store down",
    injected="Redis killed, stopped for 20 s, full (maxmemory), a read-only replica, and its "
    "file cut "
    "by 7 bytes; under streams",
    promised="inference goes on with equal ids; durable calls get 503 within 1 s; it recovers "
    "within "
    "2 s; an idempotent request is answered once",
    needs=("redis",),
)
async def store_down(scale: Scale, seen: Seen) -> None:
    names = ("killed", "full") if scale.is_quick else tuple(STORE_FAULTS)
    async with RedisProcess() as redis, house(Plan(settings={"state_url": redis.url})) as made:
        expected = await over_grpc(made.target, PROMPT, seed=1, max_tokens=60)
        for name in names:
            fault, is_over = STORE_FAULTS[name], asyncio.Event()

            async def infer(name: str = name, is_over: asyncio.Event = is_over) -> None:
                while not is_over.is_set():
                    got = await over_grpc(made.target, PROMPT, seed=1, max_tokens=60)
                    seen.count("answers compared")
                    seen.check(
                        got.content == expected.content, f"{name}: {_unequal(got, expected)}"
                    )

            key = {"idempotency-key": f"before-{uuid.uuid4().hex}"}
            before = await made.post(PROMPT, headers=key)
            inferring = [asyncio.ensure_future(infer()) for _ in range(3)]
            await fault.begin(redis)
            began_s = time.monotonic()
            await asyncio.sleep(0.3)
            while time.monotonic() < began_s + (
                min(fault.for_s, 4.0) if scale.is_quick else fault.for_s
            ):
                await _durable(made, seen, name, fault)
                await asyncio.sleep(0.3)
            await fault.end(redis)
            recovered_s = time.monotonic()
            while (await _keyed(made)).status_code != 200:
                if time.monotonic() > recovered_s + 20:
                    break
                await asyncio.sleep(0.05)
            after_s = time.monotonic() - recovered_s
            seen.note(f"recovered after s, {name}", after_s)
            seen.check(
                after_s <= RECOVERED_S, f"{name}: durable calls work again after {after_s:.1f} s"
            )
            is_over.set()
            await asyncio.gather(*inferring)
            again = await made.post(PROMPT, headers=key)
            if name != "file cut by 7 bytes":  # whose last second may be lost
                is_same = (
                    again.status_code == 200 and again.json()["choices"] == before.json()["choices"]
                )
                seen.check(is_same, f"{name}: the key of an earlier answer gave {again.text[:80]}")
        await made.check_free(seen)


async def _keyed(made: House) -> httpx.Response:
    return await made.post(PROMPT, headers={"idempotency-key": uuid.uuid4().hex}, max_tokens=2)


async def _durable(made: House, seen: Seen, name: str, fault: StoreFault) -> None:
    began_s = time.monotonic()
    answer = await _keyed(made)
    seen.count("durable calls while it lasted")
    if fault.refuses:
        seen.most("durable calls refused after s", time.monotonic() - began_s)
        seen.check(answer.status_code == 503, f"{name}: a durable call got {answer.status_code}")
        seen.check(
            time.monotonic() - began_s <= REFUSED_S,
            f"{name}: a durable call was refused after {time.monotonic() - began_s:.2f} s",
        )


@contextlib.contextmanager
def small_disk(num_mib: int) -> Iterator[Path]:
    """A folder of its own file system. Raises CannotInject."""
    with tempfile.TemporaryDirectory(prefix="pst-disk-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_mib}m,mode=0700", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CannotInject(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


@row(
    20,
    "Disk full",
    injected="the state folder on a disk of 1 MiB, which another file then fills; room again later",
    promised="inference lives with equal ids; streams say that they cannot be resumed, durable "
    "calls "
    "get 503; both work again once there is room; warnings at most once a minute",
    needs=("root",),
)
async def disk_full(scale: Scale, seen: Seen) -> None:
    with small_disk(1) as folder:
        settings = {"state_url": f"sqlite://{folder}/state"}
        async with house(Plan(settings=settings)) as made:
            expected = await over_grpc(made.target, PROMPT, seed=1, max_tokens=60)
            for _ in range(scale.of(1, 5)):
                filler = folder / "filler"
                with contextlib.suppress(OSError), filler.open("wb") as out:
                    while True:
                        out.write(os.urandom(4096))
                        out.flush()
                refused: list[int] = []
                for n in range(30):
                    events = Events(made.http)
                    await events.post(made.url, PROMPT, seed=1, max_tokens=60, user=f"{n}" * 20)
                    got = events.got
                    seen.count("answers compared")
                    seen.check(got.content == expected.content, f"{_unequal(got, expected)}")
                    seen.note("resumable on a full disk", events.headers["x-penstock-resumable"])
                    refused.append((await _keyed(made)).status_code)
                seen.note("durable calls on a full disk", f"{refused.count(503)} of 30 got 503")
                seen.check(set(refused) <= {200, 503}, f"durable calls got {sorted(set(refused))}")
                seen.check(refused[-1] == 503, "the disk was not full for the store")
                filler.unlink()
                began_s = time.monotonic()
                while (await _keyed(made)).status_code != 200 and time.monotonic() < began_s + 30:
                    await asyncio.sleep(0.1)
                seen.most("durable again after s", time.monotonic() - began_s)
                seen.check(time.monotonic() - began_s < 10.0, "it did not recover within 10 s")
            await made.check_free(seen)
