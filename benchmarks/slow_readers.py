"""What clients that behave badly cost their neighbours, on a real `penstock serve`.

Neighbours stream answers over gRPC and HTTP, beside each kind of bad company and, just before,
without it: clients that stop reading (before: the same clients, reading, for what they ask for is
work in itself), clients that disconnect in mid-answer, and calls whose deadline passes. Shown are
the neighbours' inter-token times, and the ratio within a round, as medians over the rounds. Then,
with every slot of the worker taken:

- how soon after a disconnect the blocks are free: the time until a request that waits for just that
  slot has its first token, which is an upper bound (its own prefill and both ways are in it);
- that an expired request is never prefilled: the worker's counter of prompt tokens;
- that the blocks come back: the pool as the worker announces it, before and after.

    python benchmarks/slow_readers.py
    python benchmarks/slow_readers.py --rounds 1 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from server_process import served
from tqdm import tqdm

from penstock.deployments.bench_figures import Slo, figures_of
from penstock.deployments.bench_load import Job
from penstock.deployments.bench_serve import BenchCall, run_load
from penstock.deployments.bench_targets import Target, target_of
from penstock.deployments.client import AsyncClient, ClientError

NUM_SLOTS = 16
PROMPT_LEN = 24
LONG = 1800  # tokens of an answer that nobody waits for
STAY_S = 5.0  # how long a long answer is held on to
SETTLE_S = 2.5  # until the worker has announced itself anew
FREE_TARGET_S = 0.2
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Server:
    """The addresses of the server, and what the benchmark does with them."""

    def __init__(self, urls: dict[str, str]):
        self.urls = urls
        self.http = httpx.AsyncClient(base_url=urls["HTTP, SSE"], timeout=60)
        self.grpc_target = urls["gRPC"].removeprefix("grpc://")
        self.rng = np.random.default_rng(0)

    def prompt(self) -> list[int]:
        """Ids that nobody has sent before: the prefix cache has nothing to give."""
        return [int(n) for n in self.rng.integers(3, 2000, size=PROMPT_LEN)]

    async def worker(self) -> dict[str, int]:
        """What the worker last announced."""
        status = (await self.http.get("/v1/penstock/status")).json()
        worker: dict[str, int] = status["workers"][0]
        return worker

    async def idle(self) -> dict[str, int]:
        """What the worker announces once nothing runs. Raises TimeoutError."""
        async with asyncio.timeout(60):
            while True:
                await asyncio.sleep(SETTLE_S)
                worker = await self.worker()
                if worker["num_running"] == worker["num_waiting"] == 0:
                    return worker

    async def open_http(self, max_tokens: int, *, reads: bool = True, **more: Any) -> socket.socket:
        """A stream over a plain socket, which takes next to nothing in unless it is read."""
        sock = socket.socket()
        if not reads:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        host, port = self.urls["HTTP, SSE"].removeprefix("http://").split(":")
        await loop.sock_connect(sock, (host, int(port)))
        body = json.dumps(
            {
                "prompt": self.prompt(),
                "max_tokens": max_tokens,
                "stream": True,
                **GREEDY,
                **more,
            }
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        await loop.sock_sendall(sock, head.encode() + body)
        if reads:
            await loop.sock_recv(sock, 4096)  # the first token is there
        return sock


def reset(sock: socket.socket) -> None:
    """Break a connection off without a goodbye."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# Bad company: each runs until it is cancelled, and tells how often it did what it does.


async def take_long(server: Server, counts: dict[str, int], *, reads: bool) -> None:
    """On half the slots: ask for a long answer, of many bytes, and read all of it or nothing."""

    async def over_http() -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock = await server.open_http(LONG, reads=reads, logprobs=5)
            counts["streams"] += 1
            try:
                async with asyncio.timeout(STAY_S):
                    while not reads or await loop.sock_recv(sock, 1 << 16):
                        await asyncio.sleep(0 if reads else STAY_S)
            except TimeoutError:
                pass
            finally:
                reset(sock)

    async def over_grpc() -> None:
        async with AsyncClient(server.grpc_target) as client:
            while True:
                prompt = server.prompt()
                stream = client.generate(prompt, max_tokens=LONG, logprobs=5, **GREEDY)
                counts["streams"] += 1
                try:
                    async with asyncio.timeout(STAY_S):
                        async for _ in stream:
                            await asyncio.sleep(0 if reads else STAY_S)
                except TimeoutError:
                    pass
                finally:
                    await stream.aclose()

    half = NUM_SLOTS // 4
    await asyncio.gather(*(each() for each in (over_http, over_grpc) for _ in range(half)))


async def read_on(server: Server, counts: dict[str, int]) -> None:
    await take_long(server, counts, reads=True)


async def stop_reading(server: Server, counts: dict[str, int]) -> None:
    await take_long(server, counts, reads=False)


async def disconnect(server: Server, counts: dict[str, int]) -> None:
    """Twenty times a second: a stream is begun and broken off."""

    async def over_grpc(client: AsyncClient) -> None:
        stream = client.generate(server.prompt(), max_tokens=LONG, **GREEDY)
        await anext(stream)
        await stream.aclose()

    async def over_http() -> None:
        reset(await server.open_http(LONG))

    async with AsyncClient(server.grpc_target) as client, asyncio.TaskGroup() as group:
        while True:
            group.create_task(over_grpc(client) if counts["streams"] % 2 else over_http())
            counts["streams"] += 1
            await asyncio.sleep(0.05)


async def expire(server: Server, counts: dict[str, int]) -> None:
    """Twenty times a second: a call with ten milliseconds to live."""

    async def one(client: AsyncClient) -> None:
        with contextlib.suppress(ClientError):
            await client.complete(server.prompt(), max_tokens=LONG, **GREEDY)

    async with (
        AsyncClient(server.grpc_target, timeout_s=0.01) as client,
        asyncio.TaskGroup() as group,
    ):
        while True:
            group.create_task(one(client))
            counts["streams"] += 1
            await asyncio.sleep(0.05)


Company = Callable[[Server, dict[str, int]], Awaitable[None]]
# What the neighbours are compared with: the same requests, but well-behaved; None: nobody.
COMPANY: dict[str, tuple[Company | None, Company]] = {
    "clients that do not read (against the same, reading)": (read_on, stop_reading),
    "clients that disconnect (against nobody)": (None, disconnect),
    "deadlines that expire (against nobody)": (None, expire),
}


async def neighbours(server: Server, targets: list[Target], args: Any) -> dict[str, float]:
    """Inter-token milliseconds of well-behaved streams, half of them over each path."""
    job = Job(0.0, PROMPT_LEN, args.output_len)
    each = args.neighbours // len(targets)
    loads = [
        run_load(
            target,
            [BenchCall(job, server.prompt(), args.output_len, None) for _ in range(2 * each)],
            max_concurrency=each,
        )
        for target in targets
    ]
    outcomes = [outcome for done in await asyncio.gather(*loads) for outcome in done]
    figures = figures_of(outcomes, Slo())
    assert not figures["errors"], figures["errors"]
    return {"p50": figures["itl_ms"]["p50"], "p99": figures["itl_ms"]["p99"]}


@contextlib.asynccontextmanager
async def beside(company: Company | None, server: Server) -> AsyncIterator[dict[str, int]]:
    counts = {"streams": 0}
    if company is None:
        yield counts
        return
    task = asyncio.ensure_future(company(server, counts))
    try:
        await asyncio.sleep(0.5)
        yield counts
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def measure_company(server: Server, args: argparse.Namespace) -> list[dict[str, Any]]:
    targets = [
        target_of(url, model=None, api_key=None, is_chat=False, sampling=GREEDY, extra_body={})
        for url in server.urls.values()
    ]
    rounds = []
    for number in tqdm(range(args.rounds + 1), unit="round"):
        figures: dict[str, Any] = {}
        for name, (good, bad) in COMPANY.items():
            async with beside(good, server):
                before = await neighbours(server, targets, args)
            await server.idle()
            async with beside(bad, server) as counts:
                beset = await neighbours(server, targets, args)
            await server.idle()
            figures[name] = {"before": before, "beside": beset, "num": counts["streams"]}
        if number:  # the first one warms up
            rounds.append(figures)
    for target in targets:
        await target.close()
    return rounds


async def hold_slots(server: Server, client: AsyncClient, num: int) -> list[Any]:
    """So many streams that have begun and stay."""
    streams = [client.generate(server.prompt(), max_tokens=LONG, **GREEDY) for _ in range(num)]
    for stream in streams:
        await anext(stream)
    return streams


async def release(streams: list[Any]) -> None:
    for stream in streams:
        await stream.aclose()


async def measure_release(server: Server, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds from a disconnect to the first token of whoever waited for that slot."""

    async def leave_grpc(client: AsyncClient) -> Callable[[], Awaitable[None]]:
        [stream] = await hold_slots(server, client, 1)
        return stream.aclose  # type: ignore[no-any-return]

    async def leave_http(goodbye: bool) -> Callable[[], Awaitable[None]]:
        sock = await server.open_http(LONG)

        async def leave() -> None:
            sock.close() if goodbye else reset(sock)

        return leave

    took: dict[str, list[float]] = {"gRPC cancel": [], "HTTP close": [], "HTTP reset": []}
    async with AsyncClient(server.grpc_target) as client, AsyncClient(server.grpc_target) as other:
        for _ in tqdm(range(args.disconnects), unit="disconnect"):
            for way, seconds in took.items():
                holders = await hold_slots(server, client, NUM_SLOTS - 1)
                if way == "gRPC cancel":
                    leave = await leave_grpc(other)
                else:
                    leave = await leave_http(goodbye=way == "HTTP close")
                waiter = client.generate(server.prompt(), max_tokens=2, **GREEDY)
                first = asyncio.ensure_future(anext(waiter))
                await asyncio.sleep(0.2)
                assert not first.done(), "a slot was free"
                left_s = time.perf_counter()
                await leave()
                await first
                seconds.append(time.perf_counter() - left_s)
                await waiter.aclose()
                await release(holders)
    return took


async def measure_expired(server: Server, num: int) -> dict[str, int]:
    """Prompt tokens that the worker computed while all slots were held and `num` calls expired."""
    before = await server.idle()
    num_told = 0
    async with (
        AsyncClient(server.grpc_target) as client,
        AsyncClient(server.grpc_target, timeout_s=0.05) as hasty,
    ):
        holders = await hold_slots(server, client, NUM_SLOTS)
        for _ in range(num):
            try:
                await hasty.complete(server.prompt(), max_tokens=4, **GREEDY)
            except ClientError as error:
                num_told += error.code == "deadline_exceeded"
        await release(holders)
    after = await server.idle()
    return {
        "expired": num_told,
        "sent": num,
        "prompt_tokens": after["num_prompt_tokens"] - before["num_prompt_tokens"],
        # The last token of a prompt is counted with the token that is sampled from it.
        "of_the_holders": NUM_SLOTS * (PROMPT_LEN - 1),
        "live_blocks_left": after["num_live_blocks"],
    }


async def measure(args: argparse.Namespace, urls: dict[str, str]) -> dict[str, Any]:
    server = Server(urls)
    try:
        company = await measure_company(server, args)
        took = await measure_release(server, args)
        return {
            "company": company,
            "release_s": took,
            "expired": await measure_expired(server, args.expired),
        }
    finally:
        await server.http.aclose()


def table(results: dict[str, Any]) -> str:
    lines = ["| company | ITL p50 without | with | ratio | ITL p99 without | with | ratio |"]
    lines.append("|" + " --- |" * 7)
    rounds = results["company"]
    for name in COMPANY:
        cells = [name]
        for key in ("p50", "p99"):
            before, beset = (
                [each[name][when][key] for each in rounds] for when in ("before", "beside")
            )
            ratios = [b / a for a, b in zip(before, beset)]
            cells += [f"{statistics.median(before):.1f} ms", f"{statistics.median(beset):.1f} ms"]
            cells.append(f"{statistics.median(ratios):.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| a client leaves by | blocks free within, p50 | most | target |"]
    lines.append("|" + " --- |" * 4)
    for way, seconds in results["release_s"].items():
        p50, most = (1e3 * value for value in (statistics.median(seconds), max(seconds)))
        target = f"at most {1e3 * FREE_TARGET_S:.0f} ms"
        lines.append(f"| {way} | {p50:.0f} ms | {most:.0f} ms | {target} |")
    expired = results["expired"]
    extra = expired["prompt_tokens"] - expired["of_the_holders"]
    lines.append(
        f"\n{expired['expired']} of {expired['sent']} calls expired while they waited; prompt "
        f"tokens computed for them: {extra} (target 0). Live blocks left in the end: "
        f"{expired['live_blocks_left']} (target 0)."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--neighbours", type=int, default=4, help="well-behaved streams")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    parser.add_argument("--disconnects", type=int, default=10, help="of each kind")
    parser.add_argument("--expired", type=int, default=50, help="calls that expire in the queue")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    flags = ["--threads", str(args.threads), "--max-num-seqs", str(NUM_SLOTS)]
    load_before = os.getloadavg()[0]
    with served(args.model, flags) as (urls, _):
        results = asyncio.run(measure(args, urls))
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "args": {name: str(value) for name, value in vars(args).items()},
    }
    print(
        f"\n{about['date']}, {about['cores']} cores, {args.model}, {args.threads} compute threads, "
        f"{args.neighbours} neighbours, {NUM_SLOTS} slots, medians of {args.rounds} rounds; load "
        f"average {load_before:.1f} before, {about['load_after']:.1f} after\n"
    )
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps({"about": about, **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
