"""The same semantics on every store: SQLite, Redis with functions, and Redis by transactions."""

from __future__ import annotations

import asyncio
import random
import re
import time

import pytest

from penstock.deployments.options import StateOptions
from penstock.deployments.state.redis.survey import FUNCTIONS
from penstock.deployments.state.store import (
    ABSENT,
    Bucket,
    Conflict,
    Fenced,
    Gap,
    Slice,
    StateDown,
)
from tests.deployments.state.servers import (
    BUDGET,
    Backend,
    RedisServer,
    as_user,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = RedisServer(tmp_path_factory.mktemp("redis")).start()
    running.ask("FUNCTION", "LOAD", FUNCTIONS.read_bytes())  # these users may not load them
    yield running
    running.kill()


@pytest.fixture(params=["embedded", "redis", "transactions"])
def backend(request, tmp_path, server):
    if request.param == "embedded":
        return Backend(StateOptions(state_url=f"sqlite://{tmp_path}/state"), is_shared=False)
    return as_user(server, "penstock" if request.param == "redis" else "penstock-plain", tmp_path)


def test_each_kind_is_what_it_says(backend, request):
    async def scenario(store):
        return store.status()

    status = backend.run(scenario)
    assert status.is_up
    assert re.match(r"Redis \d+\." if backend.is_shared else "embedded, SQLite 3", status.kind)
    uses_transactions = any("transactions" in note for note in status.notes)
    assert uses_transactions == ("transactions" in request.node.name)


def test_a_value_comes_back_as_it_was_put(backend):
    values = [b"", b"\0\r\n$5\r\n", bytes(range(256)) * 5000]

    async def scenario(store):
        assert await store.get("name", **BUDGET) is None
        for value in values:
            version = await store.put("name", value, **BUDGET)
            found = await store.get("name", **BUDGET)
            assert (found.value, found.version) == (value, version)
        await store.delete("name", **BUDGET)
        assert await store.get("name", **BUDGET) is None
        await store.delete("name", **BUDGET)

    backend.run(scenario)


def test_a_put_with_another_version_changes_nothing(backend):
    async def scenario(store):
        first = await store.put("name", b"1", expect=ABSENT, **BUDGET)
        with pytest.raises(Conflict):
            await store.put("name", b"2", expect=ABSENT, **BUDGET)
        second = await store.put("name", b"2", expect=first, **BUDGET)
        assert second > first
        for expect in (first, second + 1):
            with pytest.raises(Conflict):
                await store.put("name", b"3", expect=expect, **BUDGET)
            with pytest.raises(Conflict):
                await store.delete("name", expect=expect, **BUDGET)
        assert (await store.get("name", **BUDGET)).value == b"2"
        await store.delete("name", expect=second, **BUDGET)
        with pytest.raises(Conflict):
            await store.put("name", b"4", expect=second, **BUDGET)
        third = await store.put("name", b"4", expect=ABSENT, **BUDGET)
        assert third > second, "a version came again after a delete"

    backend.run(scenario)


def test_a_value_expires_and_a_put_decides_its_life_anew(backend):
    async def scenario(store):
        old = await store.put("short", b"1", ttl_s=0.3, **BUDGET)
        await store.put("kept", b"1", ttl_s=0.3, **BUDGET)
        await store.put("kept", b"2", **BUDGET)
        assert (await store.get("short", **BUDGET)).value == b"1"
        await asyncio.sleep(0.4)
        assert await store.get("short", **BUDGET) is None
        assert (await store.get("kept", **BUDGET)).value == b"2"
        with pytest.raises(Conflict):
            await store.put("short", b"2", expect=old, **BUDGET)
        assert await store.put("short", b"2", expect=ABSENT, **BUDGET) > old

    backend.run(scenario)


def test_an_append_repeated_is_no_second_append(backend):
    async def scenario(store):
        assert await store.append("s", 0, [b"a", b"b"], **BUDGET) == 2
        assert await store.append("s", 0, [b"a", b"b"], **BUDGET) == 2
        assert await store.append("s", 1, [b"b", b"c", b"d"], **BUDGET) == 4
        assert await store.append("s", 1, [b"b"], **BUDGET) == 4
        with pytest.raises(Conflict):
            await store.append("s", 3, [b"other", b"e"], **BUDGET)
        with pytest.raises(Gap) as gap:
            await store.append("s", 5, [b"f"], **BUDGET)
        assert gap.value.next == 4
        assert await store.read("s", **BUDGET) == Slice(0, (b"a", b"b", b"c", b"d"))
        assert await store.read("s", 1, limit=2, **BUDGET) == Slice(1, (b"b", b"c"))
        assert await store.read("s", 4, **BUDGET) == Slice(4)
        assert await store.read("nothing", 7, **BUDGET) == Slice(7)

    backend.run(scenario)


def test_an_older_owner_is_fenced(backend):
    async def scenario(old, new):
        await old.append("s", 0, [b"a"], fence=5, **BUDGET)
        assert await new.append("s", 1, [], fence=6, **BUDGET) == 1
        with pytest.raises(Fenced) as fenced:
            await old.append("s", 1, [b"b"], fence=5, **BUDGET)
        assert fenced.value.fence == 6
        with pytest.raises(Fenced):
            await old.append("s", 0, [b"a"], fence=5, **BUDGET)  # nor a repeat
        assert await new.append("s", 1, [b"c"], fence=6, **BUDGET) == 2
        assert (await old.read("s", **BUDGET)).records == (b"a", b"c")

    backend.run(scenario, num=2)


def test_a_version_is_a_fence(backend):
    async def scenario(store):
        first = await store.put("owner", b"1", expect=ABSENT, **BUDGET)
        await store.append("s", 0, [b"a"], fence=first, **BUDGET)
        second = await store.put("owner", b"2", expect=first, **BUDGET)
        await store.append("s", 1, [b"b"], fence=second, **BUDGET)
        with pytest.raises(Fenced) as fenced:
            await store.append("s", 2, [b"c"], fence=first, **BUDGET)
        assert fenced.value.fence == second

    backend.run(scenario)


def test_a_stream_lives_as_long_as_its_last_append_says(backend):
    async def scenario(store):
        await store.append("s", 0, [b"a"], fence=9, ttl_s=0.5, **BUDGET)
        await asyncio.sleep(0.3)
        await store.append("s", 1, [b"b"], fence=9, ttl_s=0.5, **BUDGET)
        await asyncio.sleep(0.3)
        assert (await store.read("s", **BUDGET)).next == 2
        await asyncio.sleep(0.4)
        assert (await store.read("s", **BUDGET)).records == ()
        with pytest.raises(Gap) as gap:
            await store.append("s", 2, [b"c"], fence=9, **BUDGET)
        assert gap.value.next == 0
        assert await store.append("s", 0, [b"new"], fence=1, **BUDGET) == 1
        assert (await store.read("s", **BUDGET)).records == (b"new",)

    backend.run(scenario)


def test_a_stream_keeps_at_least_what_it_must_and_not_much_more(backend):
    async def scenario(store):
        for first in range(0, 2000, 50):
            records = [b"%d" % n for n in range(first, first + 50)]
            await store.append("s", first, records, keep=60, **BUDGET)
        found = await store.read("s", 0, limit=4000, **BUDGET)
        assert 1000 < found.first <= 1940
        assert found.records == tuple(b"%d" % n for n in range(found.first, 2000))
        assert (
            await store.append("s", 1990, [b"%d" % n for n in range(1990, 2001)], **BUDGET) == 2001
        )
        assert (await store.read("s", 1999, **BUDGET)) == Slice(1999, (b"1999", b"2000"))

    backend.run(scenario)


def test_a_read_waits_for_the_next_record(backend):
    async def scenario(reader, writer):
        await writer.append("s", 0, [b"a"], **BUDGET)
        waiting = [
            asyncio.create_task(reader.read("s", 1, wait_s=5, **BUDGET)),
            asyncio.create_task(reader.read("not-yet", wait_s=5, **BUDGET)),
        ]
        await asyncio.sleep(0.2)
        await writer.append("other", 0, [b"x"], **BUDGET)
        assert not any(task.done() for task in waiting)
        began = time.monotonic()
        await writer.append("s", 1, [b"b", b"c"], **BUDGET)
        await writer.append("not-yet", 0, [b"d"], **BUDGET)
        assert [await task for task in waiting] == [Slice(1, (b"b", b"c")), Slice(0, (b"d",))]
        assert time.monotonic() - began < 1.0
        began = time.monotonic()
        assert await reader.read("s", 3, wait_s=0.3, **BUDGET) == Slice(3)
        assert 0.25 < time.monotonic() - began < 2.0

    backend.run(scenario, num=2)


def test_more_readers_wait_than_there_are_connections(backend):
    async def scenario(reader, writer):
        names = [f"s{n}" for n in range(40)]
        tasks = [asyncio.create_task(reader.read(n, wait_s=10, **BUDGET)) for n in names]
        await asyncio.sleep(0.3)
        for name in names:
            await writer.append(name, 0, [name.encode()], **BUDGET)
        found = await asyncio.wait_for(asyncio.gather(*tasks), 9)
        assert [each.records for each in found] == [(name.encode(),) for name in names]

    backend.run(scenario, num=2)


def test_buckets_are_drawn_all_or_none(backend):
    async def scenario(store):
        def small(cost):
            return Bucket("small", 5, 0, cost)

        def large(cost):
            return Bucket("large", 100, 0, cost)

        assert (await store.take([small(3), large(10)], **BUDGET)).levels == (2, 90)
        refused = await store.take([small(3), large(10)], **BUDGET)
        assert (refused.is_granted, refused.levels, refused.wait_s) == (
            False,
            (2, 90),
            float("inf"),
        )
        assert (await store.take([large(90)], **BUDGET)).levels == (0,)
        assert (await store.take([small(-1), large(-1000)], **BUDGET)).levels == (3, 100)
        await store.delete("small", **BUDGET)
        assert (await store.take([small(5)], **BUDGET)).is_granted

    backend.run(scenario)


def test_a_bucket_fills_with_time(backend):
    async def scenario(store):
        def bucket(cost):
            return [Bucket("b", 10, 20, cost)]

        assert (await store.take(bucket(10), **BUDGET)).is_granted
        refused = await store.take(bucket(10), **BUDGET)
        assert not refused.is_granted
        assert 0.2 < refused.wait_s <= 0.5
        await asyncio.sleep(refused.wait_s + 0.05)
        assert (await store.take(bucket(10), **BUDGET)).is_granted
        assert (await store.take(bucket(11), **BUDGET)).wait_s == float("inf")

    backend.run(scenario)


def test_a_bucket_that_does_not_fill_is_forgotten_after_its_time(backend):
    async def scenario(store):
        async def level(name, cost, ttl_s):
            (left,) = (await store.take([Bucket(name, 10, 0, cost, ttl_s)], **BUDGET)).levels
            return left

        assert (await level("day", 4, 0.4), await level("kept", 4, None)) == (6, 6)
        await asyncio.sleep(0.25)
        assert await level("day", 1, 0.4) == 5  # and it lives 0.4 s from now
        await asyncio.sleep(0.25)
        assert await level("day", 0, 0.4) == 5
        await asyncio.sleep(0.45)
        assert (await level("day", 1, 0.4), await level("kept", 1, None)) == (9, 5)

    backend.run(scenario)


def test_of_two_clients_that_put_at_once_one_wins(backend):
    async def scenario(*stores):
        async def claim(store, name):
            try:
                return await store.put(name, b"mine", expect=ABSENT, **BUDGET)
            except Conflict:
                return None

        for name in map(str, range(20)):
            claims = await asyncio.gather(*(claim(store, name) for store in stores))
            assert sum(version is not None for version in claims) == 1

    backend.run(scenario, num=4)


def test_no_increment_of_two_clients_is_lost(backend):
    async def scenario(*stores):
        async def count(store):
            for _ in range(15):
                while True:
                    found = await store.get("n", **BUDGET)
                    number = int(found.value) + 1 if found else 1
                    try:
                        await store.put(
                            "n", b"%d" % number, expect=found.version if found else ABSENT, **BUDGET
                        )
                        break
                    except Conflict:
                        continue

        await asyncio.gather(*map(count, stores))
        assert (await stores[0].get("n", **BUDGET)).value == b"%d" % (15 * len(stores))

    backend.run(scenario, num=3)


def test_of_two_writers_of_a_stream_one_wins_each_index(backend):
    async def scenario(*stores):
        async def write(store, who):
            won, index = [], 0
            while index < 30:
                try:
                    index = await store.append("s", index, [b"%d" % who], **BUDGET)
                    won.append(index - 1)
                except Conflict:
                    index += 1
            return won

        won = await asyncio.gather(*(write(store, who) for who, store in enumerate(stores)))
        records = (await stores[0].read("s", **BUDGET)).records
        assert sorted(index for those in won for index in those) == list(range(30))
        assert all(
            records[index] == b"%d" % who for who, those in enumerate(won) for index in those
        )

    backend.run(scenario, num=2)


def test_no_token_is_taken_twice(backend):
    async def scenario(*stores):
        buckets = [Bucket("a", 50, 0), Bucket("b", 1000, 0)]
        taken = await asyncio.gather(
            *(store.take(buckets, **BUDGET) for store in stores for _ in range(30))
        )
        assert sum(each.is_granted for each in taken) == 50
        assert (await stores[0].take([Bucket("b", 1000, 0, 0)], **BUDGET)).levels == (950,)

    backend.run(scenario, num=2)


def test_a_caller_that_leaves_disturbs_no_other(backend):
    async def scenario(store):
        names = [f"n{i}" for i in range(20)]
        for name in names:
            await store.put(name, name.encode() * 50, **BUDGET)
        pick = random.Random(3)

        async def ask(name, patience_s):
            calls = [
                lambda: store.get(name, **BUDGET),
                lambda: store.put(name, name.encode() * 50, **BUDGET),
                lambda: store.read(name, wait_s=0.5, **BUDGET),
            ]
            task = asyncio.create_task(pick.choice(calls)())
            await asyncio.sleep(patience_s)
            task.cancel()

        async def check(name):
            found = await store.get(name, **BUDGET)
            assert found.value == name.encode() * 50

        for _ in range(30):
            leave = [ask(pick.choice(names), pick.random() * 0.003) for _ in range(10)]
            await asyncio.gather(*leave, *(check(pick.choice(names)) for _ in range(5)))
        await asyncio.gather(*map(check, names))

    backend.run(scenario)


def test_bad_arguments_are_named(backend):
    async def scenario(store):
        bad = [
            (store.get("", **BUDGET), "name"),
            (store.get("a b", **BUDGET), "name"),
            (store.put("a\n", b"", **BUDGET), "name"),
            (store.put("a", b"", ttl_s=0, **BUDGET), "ttl_s"),
            (store.put("a", b"", expect=0, **BUDGET), "expect"),
            (store.put("a", bytes(17 << 20), **BUDGET), "value"),
            (store.append("a", -1, [], **BUDGET), "first"),
            (store.append("a", 0, [], fence=-1, **BUDGET), "fence"),
            (store.append("a", 0, [], keep=0, **BUDGET), "keep"),
            (store.append("a", 0, [b""] * 5000, **BUDGET), "records"),
            (store.read("a", -1, **BUDGET), "start"),
            (store.read("a", limit=0, **BUDGET), "limit"),
            (store.read("a", wait_s=float("inf"), **BUDGET), "wait_s"),
            (store.take([], **BUDGET), "buckets"),
            (store.take([Bucket("a", 1, 1)] * 2, **BUDGET), "twice"),
            (store.take([Bucket("a", 0, 1)], **BUDGET), "capacity"),
            (store.take([Bucket("a", 1, -1)], **BUDGET), "refill_per_s"),
            (store.take([Bucket("a", 1, 1, float("nan"))], **BUDGET), "cost"),
            (store.take([Bucket("a", 1, 0, 1, 0.0)], **BUDGET), "ttl_s"),
            (store.delete("a", expect=-1, **BUDGET), "expect"),
        ]
        for call, word in bad:
            with pytest.raises(ValueError, match=word):
                await call

    backend.run(scenario)


def test_a_closed_store_says_so(backend):
    async def scenario(store):
        waiting = asyncio.create_task(store.read("s", wait_s=30, **BUDGET))
        await asyncio.sleep(0.2)
        await store.close()
        with pytest.raises(StateDown):
            await store.get("a", **BUDGET)
        with pytest.raises(StateDown):
            await store.put("a", b"", **BUDGET)
        await asyncio.wait([waiting], timeout=60)
        assert waiting.done()
        waiting.exception()

    backend.run(scenario)
