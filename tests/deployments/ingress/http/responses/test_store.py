"""What is kept of responses, and for how long: bounds, owners, and readers of a stream."""

from __future__ import annotations

import asyncio

import pytest

from penstock.deployments.ingress.core.call import TextDelta, TokenUsage
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.http.responses.draft import ResponseBuilder
from penstock.deployments.ingress.http.responses.requests import ResponsesRequest
from penstock.deployments.ingress.http.responses.store import (
    ENTRY_BYTES,
    MAX_RUNNING_OF_PRINCIPAL,
    ResponseStore,
    StoredResponse,
)
from penstock.workers.request import FinishReason, SamplingParams

END = TextDelta("", [], FinishReason.STOP, usage=TokenUsage(1))


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def entry(name, *, text="", principal="", frames=None):
    asked = ResponsesRequest(input="a")
    draft = ResponseBuilder(name, "model", asked, params=SamplingParams())
    messages = ({"role": "user", "content": text},)
    return StoredResponse(draft, principal, messages, frames=frames)


def running(name, **options):
    """An entry with a task that has not ended."""
    made = entry(name, **options)
    made.task = asyncio.get_running_loop().create_task(asyncio.sleep(60))
    return made


def kept(store, *names):
    return [name for name in names if store.get(f"resp_{name}", "") is not None]


def test_only_its_owner_finds_an_entry():
    store = ResponseStore()
    mine = entry("a", principal="me")
    store.put(mine)
    assert store.get("resp_a", "me") is mine
    assert store.get("resp_a", "you") is None
    assert store.get("resp_a", "") is None
    assert store.get("resp_b", "me") is None


def test_the_oldest_go_when_there_are_too_many():
    store = ResponseStore(max_entries=2)
    for name in "abc":
        store.put(entry(name))
    assert kept(store, *"abc") == ["b", "c"]
    assert len(store) == 2


def test_the_oldest_go_when_they_are_too_large():
    store = ResponseStore(max_bytes=3 * ENTRY_BYTES)
    store.put(entry("a"))
    store.put(entry("b"))
    store.put(entry("c", text="x" * ENTRY_BYTES))
    assert kept(store, *"abc") == ["b", "c"]
    assert store.num_bytes == 3 * ENTRY_BYTES
    store.put(entry("d", text="ü" * (2 * ENTRY_BYTES)))  # larger than all the room there is
    assert kept(store, *"abcd") == []
    assert store.num_bytes == 0


def test_what_grows_is_counted_again():
    store = ResponseStore(max_bytes=4 * ENTRY_BYTES)
    first, second = entry("a"), entry("b")
    store.put(first)
    store.put(second)
    second.draft.add(TextDelta("x" * (2 * ENTRY_BYTES + 1), []))
    store.put(second)
    assert kept(store, "a", "b") == ["b"]
    assert store.num_bytes == 3 * ENTRY_BYTES + 1
    store.remove(second)
    assert (len(store), store.num_bytes) == (0, 0)
    store.remove(second)
    assert store.num_bytes == 0


def test_one_principal_drops_its_own_and_not_anothers():
    """18 requests of one key had pushed out the conversations of all others."""
    store = ResponseStore(max_entries=10, max_bytes=10 * ENTRY_BYTES + 100_000)
    mine = entry("mine", principal="me")
    store.put(mine)
    for number in range(50):
        store.put(entry(f"you{number}", principal="you"))
    assert store.get("resp_mine", "me") is mine and len(store) == 10
    for number in range(9):
        store.put(entry(f"large{number}", principal="you", text="x" * 60_000))
        assert store.get("resp_mine", "me") is mine
    assert store.num_bytes <= 10 * ENTRY_BYTES + 100_000
    store.remove(mine)
    assert set(store._num_of) == set(store._bytes_of) == {"you"}


def test_frames_are_counted_as_they_come():
    store = ResponseStore(max_bytes=5 * ENTRY_BYTES)
    old, stream = entry("old"), entry("stream", frames=[])
    store.put(old)
    store.put(stream)
    before = store.num_bytes
    stream.tell([b"x" * 1000])
    assert store.num_bytes == before + 1000
    stream.tell([b"x" * 3 * ENTRY_BYTES])
    assert kept(store, "old") == []  # there is room for one of them
    store.put(stream)
    assert store.num_bytes == stream.measure()


def test_responses_in_the_background_have_a_bound_for_each_key():
    async def scenario():
        store = ResponseStore()
        entries = [running(f"r{n}", principal="me") for n in range(MAX_RUNNING_OF_PRINCIPAL)]
        for each in entries:
            store.check_room(0, "me")
            store.put(each)
        with pytest.raises(ServiceError, match="over_share"):
            store.check_room(0, "me")
        store.check_room(0, "you")
        for each in entries:
            each.task.cancel()

    asyncio.run(scenario())


def test_entries_expire():
    clock = Clock()
    store = ResponseStore(ttl_s=10, clock=clock)
    store.put(entry("a"))
    clock.now_s = 6
    store.put(entry("b"))
    clock.now_s = 9.9
    assert kept(store, "a", "b") == ["a", "b"]
    clock.now_s = 10
    assert kept(store, "a", "b") == ["b"]
    assert len(store) == 1


def test_what_runs_is_kept_and_bounded():
    async def scenario():
        store = ResponseStore(max_entries=1, max_running=2)
        one, two = running("a"), running("b")
        store.check_room()
        store.put(one)
        store.check_room()
        store.put(two)
        assert kept(store, "a", "b") == ["a", "b"], "those that run are never dropped"
        with pytest.raises(ServiceError, match="overloaded"):
            store.check_room()
        one.draft.add(END)
        store.check_room()
        store.put(one)
        assert kept(store, "a", "b") == ["b"]
        for each in (one, two):
            each.task.cancel()

    asyncio.run(scenario())


def test_followers_see_every_frame_and_the_end():
    async def follow(made, after):
        return [frame async for frame in made.follow(after)]

    async def scenario():
        made = running("a", frames=[])
        made.tell(["0", "1"])
        early = asyncio.create_task(follow(made, -1))
        from_one = asyncio.create_task(follow(made, 0))
        await asyncio.sleep(0)
        made.tell(["2"])
        await asyncio.sleep(0)
        assert not early.done()
        made.draft.add(END)
        made.tell(["3"])
        assert await early == ["0", "1", "2", "3"]
        assert await from_one == ["1", "2", "3"]
        assert await follow(made, 2) == ["3"]
        assert await follow(made, 10**9) == []
        made.task.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 20))
