"""What a reader has missed is sent in messages of bounded length, and nothing of it is lost."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.codec import delta_from, step_bytes
from penstock.workers.channel.delta_size import num_bytes, num_prompt_bytes
from penstock.workers.channel.framing import MessageConnection
from penstock.workers.channel.peer import MAX_STEP_BYTES, Outbox, cut, joined
from penstock.workers.request import Delta, FinishReason, FirstTokenTimes, TokenLogprob
from tests.workers.channel.test_framing import tcp_pair

EPOCH = 7


def size_of(delta: Delta) -> int:
    return num_bytes(delta) + num_prompt_bytes(delta)


def score(token_id: int, num_top: int) -> TokenLogprob:
    top = tuple((120_000 + n, -1.5 - n) for n in range(num_top))
    return TokenLogprob(token_id, -3.25, 70_000, top)


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=30))
    num_top, num_prompt = draw(st.integers(0, 20)), draw(st.integers(0, 9))
    has_scores, has_ended = draw(st.booleans()), draw(st.booleans())
    return Delta(
        "r",
        ids,
        FinishReason.STOP if has_ended else None,
        stop_token_id=ids[-1] if has_ended and ids else None,
        num_cached_tokens=draw(st.integers(0, 99)),
        num_evicted_tokens=3 if has_ended else 0,
        moe_mode="sparse" if has_ended else "exact",
        logprobs=[score(each, num_top) for each in ids] if has_scores else [],
        prompt_logprobs=[score(each, num_top) for each in range(num_prompt)],
        times=FirstTokenTimes(0.5, 0.25) if num_prompt else None,
        engine="10.0.0.1:5",
    )


@given(deltas(), st.integers(0, 20_000))
def test_parts_of_a_delta_give_it_when_joined(delta, most):
    parts, rest = [], deepcopy(delta)
    while rest is not None:
        part, rest = cut(rest, most)
        parts.append(part)
        assert size_of(part) <= most or len(part.token_ids) <= 1
    assert all(part.finish_reason is None for part in parts[:-1])
    assert all(part.times is None and not part.prompt_logprobs for part in parts[1:])
    whole = parts[0]
    for part in parts[1:]:
        whole = joined(whole, part)
    assert whole == delta


def test_what_a_reader_missed_comes_in_messages_that_it_takes():
    """Several prompts with scores in one step, and one stream with very many tokens. All of it as
    one message would be refused, and end the connection and all streams on it."""
    shared = [score(n, 20) for n in range(100)]
    missed = {
        1: Delta("", [5], prompt_logprobs=shared * 300, times=FirstTokenTimes(1.0, 2.0)),
        2: Delta("", [7] * 40_000, FinishReason.LENGTH, logprobs=shared * 400),
        3: Delta("", [9]),
        4: Delta("", [11], prompt_logprobs=shared * 400),
    }
    expected = deepcopy(missed)

    async def scenario() -> tuple[dict[int, Delta], list[int], str]:
        near, far = await tcp_pair()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()
        connection = MessageConnection(
            loop,
            near,
            on_message=lambda _: None,
            on_end=lambda _: None,
            on_room=lambda: outbox.flush(),
        )
        outbox = Outbox(connection, EPOCH, max_pending_bytes=1 << 30)
        while not connection.is_stuck:  # nobody reads
            outbox.push([(9, Delta("", list(range(1000))))])
        outbox.push(list(missed.items()))
        assert outbox.num_pending_bytes == sum(map(size_of, expected.values()))
        got: dict[int, Delta] = {}
        sizes: list[int] = []

        def take(data: bytes) -> None:
            message = pb.DownMessage.FromString(data)
            sizes.append(len(data))
            for each in message.step.deltas:
                delta = delta_from(each, "")
                earlier = got.get(each.stream_id)
                got[each.stream_id] = delta if earlier is None else joined(earlier, delta)
            for stream_id, token_id in zip(message.step.stream_ids, message.step.token_ids):
                got[stream_id] = Delta("", [token_id])

        reader = MessageConnection(
            loop, far, on_message=take, on_end=ended.set_result, max_bytes=MAX_STEP_BYTES
        )
        async with asyncio.timeout(400):
            while not (ended.done() or (len(got) == 5 and not outbox.num_pending_bytes)):
                await asyncio.sleep(0.01)
            while connection.is_stuck and not ended.done():
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        why = ended.result() if ended.done() else ""
        reader.end("done")
        connection.end("done")
        return got, sizes, why

    got, sizes, why = asyncio.run(scenario())
    assert why == ""
    del got[9]
    assert got == expected
    assert sum(sizes) > MAX_STEP_BYTES, "one message would have been too long for this reader"
    assert max(sizes) <= MAX_STEP_BYTES


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_a_delta_is_smaller_on_the_wire_than_in_memory(num_top):
    """So a bound on memory bounds the message."""
    ids = [2**31 - 1] * 100
    scores = [
        replace(score(2**31 - 1, num_top), top=((2**31 - 1, -3e38),) * num_top, rank=2**31 - 1)
        for _ in ids
    ]
    for delta in (Delta("", ids), Delta("", ids, logprobs=scores, prompt_logprobs=scores)):
        size = len(step_bytes({2**31: delta}, 2**64 - 1, 2**31))
        assert size < size_of(delta) / 3 + 100
