"""Callers of a live cluster: mixed calls by real clients, each answer compared with the right one.

The right answer of a call is that of an undisturbed run. A call without a seed has none: the seed
that the ingress chose is read from the call's journal, and the call is made again with it when
nothing is disturbed any more.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.faults.clients import NAMES, CallError, Clients, Heard
from benchmarks.faults.cluster import LiveCluster
from benchmarks.faults.workload import Answer, make_fields, where
from penstock.deployments.ingress.journal.journals import stream_name
from penstock.deployments.ingress.journal.records import head_from
from penstock.deployments.options import StateOptions
from penstock.deployments.state.factory import open_store
from penstock.deployments.state.store import StateError, Store

STORE_BUDGET_S = 5.0
DIFFERENCES_SHOWN = 20


@dataclass
class Seen:
    """What callers saw so far."""

    num_calls: int = 0
    by_feature: Counter[str] = field(default_factory=Counter)
    by_client: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    resent: Counter[str] = field(default_factory=Counter)
    arrivals: list[list[float]] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)  # time.monotonic() of each whole answer
    num_tokens: int = 0
    unseeded: list[tuple[int, str, int, Answer]] = field(default_factory=list)
    num_without_journal: int = 0

    def differs(self, number: int, client: str, got: Answer, right: Answer) -> None:
        feature = make_fields(number)[0]
        self.differing.append(f"call {number} ({feature}, {client}) differs {where(got, right)}")
        print(self.differing[-1], flush=True)

    def results(self) -> dict[str, Any]:
        return {
            "calls": self.num_calls,
            "calls by feature": dict(sorted(self.by_feature.items())),
            "calls by client": dict(sorted(self.by_client.items())),
            "sent again before their first token": dict(self.resent),
            "unseeded calls compared": len(self.unseeded),
            "unseeded calls without a journal to compare": self.num_without_journal,
            "differing answers": len(self.differing),
            "differences": self.differing[:DIFFERENCES_SHOWN],
            "lost requests": dict(self.lost),
        }


class Callers:
    """Calls of one cluster. `num_calls`: different ones."""

    def __init__(self, cluster: LiveCluster, clients: Clients, store: Store | None, num_calls: int):
        self._cluster, self._clients, self._store = cluster, clients, store
        self._num_calls = num_calls
        self._expected: dict[tuple[int, str], Answer] = {}
        self.undisturbed: list[Heard] = []

    async def learn(self, num_callers: int) -> None:
        """Run every call by every client, as many at a time as callers will. Raises CallError."""
        waiting = [(number, name) for number in range(self._num_calls) for name in NAMES]
        waiting = [each for each in waiting if make_fields(each[0])[0] != "unseeded"]

        async def work() -> None:
            while waiting:
                number, name = waiting.pop()
                heard = await self._clients.call(name, number)
                self._expected[number, name] = heard.answer
                self.undisturbed.append(heard)

        await asyncio.gather(*(work() for _ in range(num_callers)))

    async def call_until(
        self, stopping: asyncio.Event, seed: int, seen: Seen, *, every_s: float = 0.0
    ) -> None:
        """One caller: a random call after the other. `every_s`: mean time between their starts."""
        rng = random.Random(seed)
        due_s = time.monotonic()
        while not stopping.is_set():
            if every_s:
                due_s = max(due_s + rng.expovariate(1.0 / every_s), time.monotonic() - every_s)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await self.one(rng.randrange(self._num_calls), rng.choice(NAMES), seen)

    async def one(self, number: int, client: str, seen: Seen) -> None:
        """Run one call, and compare its answer if one is known."""
        seen.num_calls += 1
        feature = make_fields(number)[0]
        seen.by_feature[feature] += 1
        seen.by_client[client] += 1
        try:
            heard = await self._clients.call(client, number)
        except CallError as error:
            seen.lost[error.code] += 1
            print(f"call {number} ({feature}, {client}) is lost: {error}", flush=True)
            return
        seen.resent += heard.resent
        seen.arrivals.append(heard.arrivals)
        seen.finished_s.append(time.monotonic())
        seen.num_tokens += sum(map(len, heard.answer.ids.values()))
        if feature == "unseeded":
            seed = await self._seed_of(heard.request_id)
            if seed is None:
                seen.num_without_journal += 1
            else:
                seen.unseeded.append((number, client, seed, heard.answer))
        elif heard.answer != self._expected[number, client]:
            seen.differs(number, client, heard.answer, self._expected[number, client])

    async def check_unseeded(self, seen: Seen, num_callers: int) -> None:
        """Make the calls without a seed again, with the seeds that the ingresses had chosen."""
        waiting = list(seen.unseeded)

        async def work() -> None:
            while waiting:
                number, client, seed, answer = waiting.pop()
                again = await self._clients.call(client, number, seed)
                if again.answer != answer:
                    seen.differs(number, client, answer, again.answer)

        await asyncio.gather(*(work() for _ in range(num_callers)))

    async def _seed_of(self, request_id: str) -> int | None:
        if self._store is None:
            return None
        try:
            found = await self._store.read(
                stream_name(request_id), limit=1, budget_s=STORE_BUDGET_S
            )
        except StateError:
            return None
        return head_from(found.records[0]).seed if found.records else None


@asynccontextmanager
async def callers_of(cluster: LiveCluster, num_calls: int) -> AsyncIterator[Callers]:
    """Callers with clients of their own, and the store of the journals, where it is shared."""
    store = None
    if cluster.state_url is not None and cluster.state_url.startswith("redis"):
        store = await open_store(StateOptions(state_url=cluster.state_url))
    try:
        async with Clients(cluster.http_url, cluster.grpc_target, cluster.setup.model) as clients:
            yield Callers(cluster, clients, store, num_calls)
    finally:
        if store is not None:
            await store.close()
