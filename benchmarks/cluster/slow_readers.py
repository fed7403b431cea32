"""What clients that behave badly cost their neighbours, on a real `penstock serve`.

Neighbours stream answers over gRPC and HTTP, beside each kind of bad company and, just before or
just after, without it: clients that stop reading (against the same clients, reading, for what they
ask for is work in itself), clients that disconnect at their first token, and calls whose deadline
passes (both, 20 a second, against as many calls that end by themselves, each of as many tokens as
the worker makes for a bad one before it hears of its end; and, 2 a second, against none). Shown
are the neighbours' inter-token times, and the ratio within a round, as medians over the rounds;
none against none shows what the host does by itself. Then, with every slot taken:

- how soon after a disconnect the blocks are free: the time until a request that waits for just that
  slot has its first token, which is an upper bound (its own prefill and both ways are in it);
- that an expired request is never prefilled: the worker's counter of prompt tokens;
- that the blocks come back: the pool as the worker announces it, before and after.

    python -m benchmarks.cluster.slow_readers
    python -m benchmarks.cluster.slow_readers --rounds 1 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.cluster.bad_clients import (
    COMPANY,
    GREEDY,
    LONG,
    NUM_SLOTS,
    OFTEN_S,
    PROMPT_LEN,
    Likewise,
    Server,
    beside,
    reset,
    take_few,
    tokens_of_each,
)
from benchmarks.common import record
from benchmarks.common.server_process import served
from penstock.deployments.bench.figures import Slo, figures_of
from penstock.deployments.bench.load import Job
from penstock.deployments.bench.open_loop import BenchCall, run_load
from penstock.deployments.bench.targets import Target, target_of
from penstock.deployments.client import AsyncClient, ClientError

FREE_TARGET_S = 0.2


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


async def measure_company(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    targets = [
        target_of(url, model=None, api_key=None, is_chat=False, sampling=GREEDY, extra_body={})
        for url in server.urls.values()
    ]
    pairs, made = [], {}
    for name, (good, bad) in COMPANY.items():
        if args.only not in name:
            continue
        if isinstance(good, Likewise):
            assert bad is not None, name
            made[name] = await tokens_of_each(bad, server)
            good = partial(take_few, num=made[name], every_s=OFTEN_S, is_grpc=good.is_grpc)
        pairs.append((name, good, bad))
    rounds = []
    for number in tqdm(range(args.rounds + 1), unit="round"):
        figures: dict[str, Any] = {}
        for name, good, bad in pairs:
            seen: dict[str, dict[str, float]] = {}
            for which in (("good", "bad"), ("bad", "good"))[number % 2]:
                async with beside(good if which == "good" else bad, server) as counts:
                    seen[which] = await neighbours(server, targets, args)
                    seen[which]["num"] = counts["streams"]
                await server.idle()
            figures[name] = seen
        if number:  # the first one warms up
            rounds.append(figures)
    for target in targets:
        await target.close()
    return {"rounds": rounds, "tokens_of_each": made}


async def hold_slots(server: Server, client: AsyncClient, num: int) -> list[Any]:
    """`num` streams that have begun and stay."""
    streams = [client.generate(server.prompt(), max_tokens=LONG, **GREEDY) for _ in range(num)]
    for stream in streams:
        await anext(stream)
    return streams


async def release(streams: list[Any]) -> None:
    for stream in streams:
        await stream.aclose()


async def measure_release(server: Server, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds from a disconnect to the first token of the request that waited for that slot."""

    async def leave_grpc(client: AsyncClient) -> Callable[[], Awaitable[None]]:
        [stream] = await hold_slots(server, client, 1)
        return stream.aclose

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
    lines = [
        "| company | ITL p50 without | with | ratio (quartiles) "
        "| ITL p99 without | with | ratio (quartiles) |"
    ]
    lines.append("|" + " --- |" * 7)
    rounds, made = results["company"]["rounds"], results["company"]["tokens_of_each"]
    for name in rounds[0]:
        cells = [f"{name[:-1]}, each of {made[name]} tokens)" if name in made else name]
        for key in ("p50", "p99"):
            before, beset = (
                [each[name][which][key] for each in rounds] for which in ("good", "bad")
            )
            ratios = [b / a for a, b in zip(before, beset)]
            cells += [f"{statistics.median(before):.1f} ms", f"{statistics.median(beset):.1f} ms"]
            low, middle, high = np.percentile(ratios, [25, 50, 75])
            cells.append(f"**{middle:.2f}** ({low:.2f}, {high:.2f})")
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
    parser.add_argument("--compute-cores", metavar="LIST", help="of the server")
    parser.add_argument("--neighbours", type=int, default=4, help="well-behaved streams")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    parser.add_argument("--only", metavar="TEXT", default="", help="company whose name has it")
    parser.add_argument("--disconnects", type=int, default=10, help="of each kind")
    parser.add_argument("--expired", type=int, default=50, help="calls that expire in the queue")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    flags = ["--threads", str(args.threads), "--max-num-seqs", str(NUM_SLOTS)]
    if args.compute_cores is not None:
        flags += ["--compute-cores", args.compute_cores]
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
        f"\n{about['date']}, {about['cores']} cores, {args.model}, {args.threads} compute threads "
        f"on {args.compute_cores or 'any core'}, "
        f"{args.neighbours} neighbours, {NUM_SLOTS} slots, medians of {args.rounds} rounds; load "
        f"average {load_before:.1f} before, {about['load_after']:.1f} after\n"
    )
    print(table(results))
    if args.json:
        record.write(args.json, __file__, {"about": about, **results}, threads=args.threads)


if __name__ == "__main__":
    main()
