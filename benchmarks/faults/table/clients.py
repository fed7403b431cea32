"""Rows about clients: gone, late, slow; and about what they hear when all workers die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import psutil

from benchmarks.faults.table.house import BODY, House, Plan, Streamed, gathered, house, over_grpc
from benchmarks.faults.table.rows import Scale, Seen, row
from benchmarks.faults.table.sse import Events
from benchmarks.faults.worker_process import CONFIG

LOST_WAIT_S = 1.0
END_S = 2.0
PROMPT = "It was a bright morning, and"
FREED_S = 0.2  # and 0.1 s for the question
BUFFER_MIB = 64.0


@row(
    2,
    "Every worker dies",
    injected="kill -9 of both workers: under streams over HTTP and gRPC, and before requests; the "
    "setting lost_wait_s at 1 s (its default is 30 s)",
    promised="a stream ends with one error event, or UNAVAILABLE, within 2 s, never as if it were "
    "whole; a new request gets 503 with Retry-After, or UNAVAILABLE, at once",
)
async def all_workers_die(scale: Scale, seen: Seen) -> None:
    async with house(Plan(settings={"lost_wait_s": LOST_WAIT_S})) as made:
        for _ in range(scale.of(1, 5)):
            begun = [asyncio.Event() for _ in range(4)]
            events = [Events(made.http) for _ in range(2)]

            def note(event: asyncio.Event) -> Any:
                async def told(num_tokens: int) -> None:
                    if num_tokens > 5:
                        event.set()

                return told

            calls: list[Any] = [
                each.post(made.url, PROMPT, note(begun[n]), max_tokens=1000)
                for n, each in enumerate(events)
            ]
            calls += [
                over_grpc(made.target, PROMPT, told=note(event), max_tokens=1000, resume_s=0.0)
                for event in begun[2:]
            ]
            running = [asyncio.ensure_future(call) for call in calls]
            for event in begun:
                await event.wait()
            for worker in made.workers:
                await asyncio.to_thread(worker.kill)
            killed_s = time.monotonic()
            done = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 60)
            seen.most("streams ended after s", time.monotonic() - killed_s)
            for each in events:
                seen.note("over SSE", each.got.error or each.got.finish)
                seen.check(
                    each.got.error and not each.got.finish and not each.is_done,
                    f"SSE: error {each.got.error!r}, finish {each.got.finish!r}, {each.is_done}",
                )
            for got in done[2:]:
                assert isinstance(got, Streamed)
                seen.note("over gRPC", got.error)
                seen.check("UNAVAILABLE" in got.error and not got.finish, f"gRPC: {got}")
            began_s = time.monotonic()
            refused = await made.post(PROMPT)
            retry = refused.headers.get("retry-after")
            seen.note("a new request", f"{refused.status_code}, Retry-After {retry}")
            seen.check(refused.status_code == 503, f"a new request got {refused.status_code}")
            seen.check(retry is not None, "the refusal has no Retry-After")
            seen.check(
                "UNAVAILABLE" in (await over_grpc(made.target, PROMPT)).error, "gRPC: served"
            )
            seen.most("new requests refused after s", time.monotonic() - began_s)
            made.workers.clear()
            for _ in range(2):
                await made.add_worker()
            seen.most("served again after s", await made.ready())
        ended_s = seen.facts["streams ended after s"]
        seen.check(ended_s <= END_S + 0.2, f"streams ended {ended_s} s after the deaths")


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps({**BODY, "prompt": PROMPT, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + content


class _Socket:
    """A request over a bare socket, so that its end can be of any kind."""

    def __init__(self, url: str, body: dict[str, Any], window: int | None = None):
        self._socket = socket.socket()
        if window is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        self._socket.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        self._socket.sendall(_request(body))

    def leave(self, how: str) -> None:
        if how == "RST":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


DEPARTURES = ("RST", "FIN", "gRPC cancel", "RST of unary", "RST in prefill", "RST of n=4", "queued")


@row(
    10,
    "Client gone",
    injected="clients that leave by reset, by FIN and by cancelling, streamed and unary, in "
    "prefill, "
    "with n = 4, and while they wait for a slot",
    promised="their KV blocks are free within 200 ms, and all in the end",
)
async def client_gone(scale: Scale, seen: Seen) -> None:
    engine = replace(CONFIG, max_num_seqs=6)
    async with house(Plan(num_workers=1, engine=engine)) as made:
        for cycle in range(scale.of(len(DEPARTURES), 1000)):
            how = DEPARTURES[cycle % len(DEPARTURES)]
            await _leave(made, how)
            began_s = time.monotonic()
            held = await made.held_blocks(5.0)
            seen.most(f"blocks free after s, {how}", time.monotonic() - began_s)
            seen.check(held == 0, f"{how}: {held} blocks are held 5 s later")
        seen.note("departures", cycle + 1)
        slowest = max(value for name, value in seen.facts.items() if "free after" in name)
        seen.check(slowest <= FREED_S + 0.1, f"blocks were held for {slowest} s")
        seen.check((await made.post(PROMPT)).status_code == 200, "the next request is not served")
        await made.check_free(seen)


async def _leave(made: House, how: str) -> None:
    """Begin a call, or several, and leave in the way that `how` names."""
    body: dict[str, Any] = {"max_tokens": 900, "stream": "unary" not in how}
    if how == "gRPC cancel":
        call = asyncio.ensure_future(over_grpc(made.target, PROMPT, max_tokens=900))
        await _until_held(made)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        return
    if how == "RST of n=4":
        body["n"] = 4
    if how == "RST in prefill":
        body["prompt"] = random.choices(range(3, 1900), k=1000)
    num = 10 if how == "queued" else 1
    sockets = [_Socket(made.url, body) for _ in range(num)]
    await _until_held(made)
    for each in sockets:
        each.leave(how.split()[0])


async def _until_held(made: House) -> None:
    async with asyncio.timeout(20):
        while not (await asyncio.to_thread(made.workers[0].stats)).num_live_blocks:
            await asyncio.sleep(0.002)


@row(
    11,
    "Deadline passes",
    injected="one slot, held for seconds; requests with a deadline of 300 ms over HTTP and gRPC",
    promised="504 / DEADLINE_EXCEEDED and not `length`, within the deadline and 200 ms; never "
    "prefilled",
)
async def deadline(scale: Scale, seen: Seen) -> None:
    engine = replace(CONFIG, max_num_seqs=1)
    async with house(Plan(num_workers=1, engine=engine)) as made:
        for _ in range(scale.of(2, 20)):
            has_slot = asyncio.Event()

            async def told(_: int, has_slot: asyncio.Event = has_slot) -> None:
                has_slot.set()

            holder = asyncio.ensure_future(
                over_grpc(made.target, PROMPT, told=told, max_tokens=1500)
            )
            await has_slot.wait()
            await asyncio.sleep(0.1)  # its prompt is counted
            before = (await asyncio.to_thread(made.workers[0].stats)).num_prompt_tokens
            began_s = time.monotonic()
            over_http = asyncio.ensure_future(
                made.post("No one reads this of", headers={"x-request-timeout-ms": "300"})
            )
            late = await over_grpc(made.target, "Nor is this read by", timeout_s=0.3)
            answer = await over_http
            seen.most("refused after s", time.monotonic() - began_s)
            seen.note("over HTTP", f"{answer.status_code} {answer.json()['error']['code']}")
            seen.note("over gRPC", late.error)
            seen.check(answer.status_code == 504, f"HTTP {answer.status_code}")
            seen.check(late.error == "deadline_exceeded" and not late.finish, f"gRPC {late.error}")
            after = (await asyncio.to_thread(made.workers[0].stats)).num_prompt_tokens
            seen.count("their prompt tokens computed", after - before)
            holder.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await holder
        seen.check(seen.facts["their prompt tokens computed"] == 0, "a late request was computed")
        seen.check(seen.facts["refused after s"] <= 0.5, "the deadline was not kept")
        await made.check_free(seen)


@row(
    12,
    "Slow reader",
    injected="streams with 20 logprobs a token whose clients do not read, beside streams whose "
    "clients do",
    promised="what is buffered is bounded (at most 64 MiB for all of them); the readers' ids are "
    "equal, and their time between tokens grows by less than 10 %; nothing is held in the end",
)
async def slow_reader(scale: Scale, seen: Seen) -> None:
    num = scale.of(4, 16)
    async with house(Plan(num_workers=1, engine=replace(CONFIG, max_num_seqs=32))) as made:
        fields: dict[str, Any] = {"max_tokens": 150}

        async def readers() -> list[Streamed]:
            return await gathered(
                [over_grpc(made.target, PROMPT, seed=n, **fields) for n in range(3)]
            )

        loud = {"max_tokens": 1900, "stream": True, "logprobs": 20, "prompt": [5, 6, 7]}
        alone = await readers()
        async with _reading(made, num, loud):
            beside_good = await readers()
        process = psutil.Process(made.ingresses[0].pid)
        before = process.memory_info().rss
        slow = [_Socket(made.url, loud, window=2048) for _ in range(num)]
        beside_slow = await readers()
        for n, (got, expected) in enumerate(zip(beside_slow, alone, strict=True)):
            seen.count("answers compared")
            seen.check(got.content == expected.content, f"reader {n} got another answer")
        itl = [
            sum(each.arrivals[-1] - each.arrivals[1] for each in found) / len(found)
            for found in (beside_good, beside_slow)
        ]
        seen.note(
            "time of an answer beside slow readers / beside as many good ones", itl[1] / itl[0]
        )
        seen.check(itl[1] / itl[0] < 1.1, f"answers took {itl[1] / itl[0]:.2f} times as long")
        held = await made.held_blocks(60.0)
        grown = (process.memory_info().rss - before) / 2**20
        seen.note("growth of the ingress, MiB", grown)
        seen.check(
            grown <= BUFFER_MIB, f"the ingress grew by {grown:.0f} MiB for {num} slow readers"
        )
        seen.check(held == 0, f"{held} blocks are held for readers that do not read")
        for each in slow:
            each.leave("RST")
        await made.check_free(seen)


@contextlib.asynccontextmanager
async def _reading(made: House, num: int, body: dict[str, Any]) -> AsyncIterator[None]:
    """While it holds, `num` streams are read as they come."""

    async def read() -> None:
        request = {**BODY, **body}
        async with made.http.stream("POST", f"{made.url}/v1/completions", json=request) as answer:
            async for _ in answer.aiter_raw():
                pass

    running = [asyncio.ensure_future(read()) for _ in range(num)]
    await _until_held(made)
    try:
        yield
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
