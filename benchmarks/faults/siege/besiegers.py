"""The process of hostile clients: started, told when to end, and what it counts each second."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

from benchmarks.faults.siege.attacks import ATTACKS, Siege, silent_connections

HOST = "127.0.0.1"
TELL_S = 1.0
SILENT = "silent connections"
Counts: TypeAlias = Counter[tuple[str, str]]  # by attack and outcome


@dataclass(frozen=True)
class Plan:
    """Where the hostile clients go. rate: requests a second; num_silent: connections; niceness: of
    their process."""

    http_port: int
    grpc_port: int
    key: str
    rate: float
    num_silent: int
    niceness: int


def _besiege(pipe: Connection, plan: Plan) -> None:
    """A process of hostile clients: tells its counts each second."""
    os.nice(plan.niceness)
    asyncio.run(_all_attacks(pipe, plan))


async def _all_attacks(pipe: Connection, plan: Plan) -> None:
    siege = Siege(HOST, plan.http_port, plan.grpc_port, plan.key, plan.rate, random.Random(0))
    tasks = [
        asyncio.ensure_future(part.attack(siege, name))
        for name, part in ATTACKS.items()
        for _ in range(part.number)
    ]
    for _ in range(plan.num_silent):
        tasks.append(asyncio.ensure_future(silent_connections(siege, SILENT)))
    while not pipe.poll():
        await asyncio.sleep(TELL_S)
        for task in tasks:
            if task.done():
                task.result()
        pipe.send(siege.counts)
    pipe.recv()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def besieging(plan: Plan) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_besiege, args=(theirs, plan), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        ours.send("stop")
        process.join(30)
        process.kill()


def num_requests(counts: Counts) -> int:
    """Hostile requests that were sent. Connections that say nothing have sent none."""
    return sum(number for (name, _), number in counts.items() if name != SILENT)
