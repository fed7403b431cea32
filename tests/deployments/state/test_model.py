"""Random sequences of calls on each store, against a plain model in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.deployments.options import StateOptions
from penstock.deployments.state.factory import open_store
from penstock.deployments.state.store import ABSENT, ANY, Bucket, Conflict, Fenced, Gap, Slice
from tests.deployments.state.servers import BUDGET, Backend, RedisServer, as_user, redis_backend

NAMES = ("a", "b")
CAPACITY = 20.0
FIRST_VERSION = 1  # older than any


@dataclass
class Model:
    """What a store should hold. Versions are those that the store gave."""

    values: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    streams: dict[str, tuple[list[bytes], int]] = field(default_factory=dict)  # and the fence
    buckets: dict[str, float] = field(default_factory=dict)
    versions: dict[str, list[int]] = field(default_factory=dict)  # all that were given

    def expected(self, name: str, which: str) -> Any:
        given_ones = self.versions.get(name, [])
        current = self.values[name][1] if name in self.values else None
        return {
            "any": ANY,
            "absent": ABSENT,
            "current": current or FIRST_VERSION,
            "stale": next((v for v in reversed(given_ones) if v != current), FIRST_VERSION),
        }[which]

    def is_met(self, name: str, expect: Any) -> bool:
        current = self.values[name][1] if name in self.values else None
        return expect is ANY or current == (None if expect is ABSENT else expect)

    def append(self, name: str, first: int, records: list[bytes], fence: int) -> Any:
        """The next index, or the error's class. A gap and a fence come before a difference."""
        stored, highest = self.streams.get(name, ([], 0))
        if fence < highest:
            return Fenced
        if first > len(stored):
            return Gap
        overlap = stored[first : first + len(records)]
        if overlap != records[: len(overlap)]:
            return Conflict
        stored = stored + records[len(overlap) :]
        self.streams[name] = (stored, fence)
        return len(stored)

    def take(self, costs: dict[str, float]) -> tuple[bool, tuple[float, ...]]:
        levels = {name: self.buckets.get(name, CAPACITY) for name in costs}
        if is_granted := all(cost <= levels[name] for name, cost in costs.items()):
            levels = {name: min(CAPACITY, levels[name] - cost) for name, cost in costs.items()}
            self.buckets |= levels
        return is_granted, tuple(levels.values())


names = st.sampled_from(NAMES)
expects = st.sampled_from(["any", "absent", "current", "stale"])
bodies = st.binary(max_size=3)
calls = st.one_of(
    st.tuples(st.just("get"), names),
    st.tuples(st.just("put"), names, bodies, expects),
    st.tuples(st.just("delete"), names, expects),
    st.tuples(
        st.just("append"),
        names,
        st.integers(-3, 1),  # from the end
        st.lists(st.sampled_from([b"x", b"y"]), max_size=3),
        st.integers(0, 3),
    ),
    st.tuples(st.just("read"), names, st.integers(0, 6), st.integers(1, 4)),
    st.tuples(st.just("take"), st.dictionaries(names, st.integers(-3, 9), min_size=1)),
)


class Checker:
    """Does each call on the store and on the model, and compares what they say."""

    def __init__(self, store: Any, example: int) -> None:
        self.store, self.model, self.example = store, Model(), example

    def name(self, name: str) -> str:
        return f"{self.example}/{name}"

    async def get(self, name: str) -> None:
        found = await self.store.get(self.name(name), **BUDGET)
        assert (found and (found.value, found.version)) == self.model.values.get(name)

    async def put(self, name: str, body: bytes, which: str) -> None:
        expect = self.model.expected(name, which)
        call = self.store.put(self.name(name), body, expect=expect, **BUDGET)
        if not self.model.is_met(name, expect):
            with pytest.raises(Conflict):
                await call
            return
        version = await call
        assert all(version > old for old in self.model.versions.get(name, []))
        self.model.versions.setdefault(name, []).append(version)
        self.model.values[name] = (body, version)

    async def delete(self, name: str, which: str) -> None:
        expect = self.model.expected(name, which)
        call = self.store.delete(self.name(name), expect=expect, **BUDGET)
        if not self.model.is_met(name, expect):
            with pytest.raises(Conflict):
                await call
            return
        await call
        for kept in (self.model.values, self.model.streams, self.model.buckets):
            kept.pop(name, None)

    async def append(self, name: str, offset: int, records: list[bytes], fence: int) -> None:
        first = max(0, len(self.model.streams.get(name, ([], 0))[0]) + offset)
        told = self.model.append(name, first, records, fence)
        call = self.store.append(self.name(name), first, records, fence=fence, **BUDGET)
        if isinstance(told, int):
            assert await call == told
            return
        with pytest.raises(Conflict) as raised:
            await call
        assert type(raised.value) is told

    async def read(self, name: str, start: int, limit: int) -> None:
        stored = self.model.streams.get(name, ([], 0))[0]
        found = await self.store.read(self.name(name), start, limit=limit, **BUDGET)
        assert found == Slice(start, tuple(stored[start : start + limit]))

    async def take(self, costs: dict[str, float]) -> None:
        buckets = [Bucket(self.name(name), CAPACITY, 0, cost) for name, cost in costs.items()]
        taken = await self.store.take(buckets, **BUDGET)
        assert (taken.is_granted, taken.levels) == self.model.take(costs)
        assert taken.wait_s == (0 if taken.is_granted else float("inf"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield running
    running.kill()


@pytest.mark.parametrize("kind", ["embedded", "redis", "transactions"])
def test_any_sequence_of_calls(kind, tmp_path, server):
    if kind == "embedded":
        backend = Backend(StateOptions(state_url=f"sqlite://{tmp_path}/s"), is_shared=False)
    elif kind == "redis":
        backend = redis_backend(server)
    else:
        backend = as_user(server, "penstock-plain", tmp_path)
    examples = itertools.count()

    with asyncio.Runner() as runner:
        store = runner.run(open_store(backend.options))

        @settings(
            max_examples=120,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        )
        @given(st.lists(calls, min_size=5, max_size=25))
        def check(sequence: list[tuple[Any, ...]]) -> None:
            async def scenario() -> None:
                checker = Checker(store, next(examples))
                for verb, *arguments in sequence:
                    method: Callable[..., Any] = getattr(checker, verb)
                    await method(*arguments)

            runner.run(scenario())

        check()
        runner.run(store.close())
