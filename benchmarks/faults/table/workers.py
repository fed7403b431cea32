"""Rows about workers: killed, hung, out of memory or of KV, with NaN, and killed by a request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from dataclasses import replace
from typing import Any

from benchmarks.faults.table import inside
from benchmarks.faults.table.cgroup import memory_cap
from benchmarks.faults.table.desk import Desk, Hand, Watched, desk
from benchmarks.faults.table.rows import Scale, Seen, row
from benchmarks.faults.worker_process import CONFIG
from benchmarks.faults.workload import FEATURES, Answer, make_call
from penstock.deployments.ingress.core.call import Call, CallOptions
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.workers.request import FinishReason, RequestError, SamplingParams

PLACES = (0, 1, 7, 16, -1)  # tokens that the client has at the kill; -1: all but a few
PAUSE_S = 2.0  # after a death
HANG_S = 5.5  # 5 s until it moves, and half a second of computation on a busy machine
LONG = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 400}


def plain(prompt: Any, **params: Any) -> Call:
    prompt = tuple(prompt) if isinstance(prompt, list) else prompt
    return Call(prompt, SamplingParams(**{**LONG, **params}), CallOptions())


def compare(seen: Seen, name: str, got: Answer, expected: Answer) -> None:
    seen.count("answers compared")
    seen.check(got == expected, f"{name}: the answer differs from the undisturbed one")


async def killed_at(made: Desk, place: int, number: int, seen: Seen) -> Watched:
    """Call `number`, whose worker is killed when the client has `place` tokens."""
    expected = await made.expect(number)
    feature, call, num_choices = make_call(number)
    total = sum(map(len, expected.ids.values()))
    place = max(total - 3, 1) if place < 0 else min(place, max(total - 3, 0))
    victim: list[Hand] = []

    async def kill() -> None:
        victim.append(await made.busy())
        await made.kill(victim[0])

    async def told(num_tokens: int) -> None:
        if num_tokens >= max(place, 1) and not victim:
            await kill()

    if place == 0:  # in the queue, or in prefill
        running = asyncio.ensure_future(made.run(call, num_choices))
        await kill()
        got, watched = await running
    else:
        got, watched = await made.run(call, num_choices, told)
    compare(seen, f"{feature} after {place} tokens", got, expected)
    if victim:
        seen.count("workers killed")
        made.hands.remove(victim[0])
        await made.add()
    return watched


@row(
    1,
    "Worker dies mid-stream",
    injected="kill -9 of its worker after 0, 1, 7, 16 and all but 3 tokens; every feature in turn",
    promised="the stream continues on another worker: equal ids, text, logprobs' ranks, tool "
    "calls, "
    "finish and usage; pause <= 2 s",
)
async def worker_dies(scale: Scale, seen: Seen) -> None:
    rng = random.Random(scale.seed)
    async with desk(2) as made:
        for n in range(scale.of(5, 55)):
            number = n % len(FEATURES) + len(FEATURES) * rng.randrange(scale.of(2, 50))
            place = PLACES[(n + n // len(PLACES)) % len(PLACES)]
            watched = await killed_at(made, place, number, seen)
            seen.most("longest pause s", watched.longest_gap_s)
        seen.check(
            seen.facts["longest pause s"] <= PAUSE_S,
            f"a client waited {seen.facts['longest pause s']} s, and not {PAUSE_S} s at most",
        )
        seen.check(seen.facts.get("workers killed"), "no worker was killed")
        await made.check_free(seen)


@row(
    3,
    "Worker hangs",
    injected="SIGSTOP of its worker in mid-stream for 10 s, then SIGCONT",
    promised="the request moves within 5 s; what the thawed worker sends is dropped; equal ids; "
    "its "
    "blocks become free",
)
async def worker_hangs(scale: Scale, seen: Seen) -> None:
    async with desk(2) as made:
        calls = [plain("The sea was", seed=n, max_tokens=600) for n in range(4)]
        expected = [await made.alone(n, call) for n, call in enumerate(calls)]
        for _ in range(scale.of(1, 4)):
            victim: list[Hand] = []

            async def told(num_tokens: int, victim: list[Hand] = victim) -> None:
                if num_tokens > 20 and not victim:
                    victim.append(made.hands[0])
                    made.hands[0].process.send(signal.SIGSTOP)

            running = [asyncio.ensure_future(made.run(call, 1, told)) for call in calls]
            while not victim:
                await asyncio.sleep(0.005)
            thaw = asyncio.get_running_loop().call_later(
                10.0, victim[0].process.send, signal.SIGCONT
            )
            for n, (got, watched) in enumerate(await asyncio.gather(*running)):
                compare(seen, f"request {n}", got, expected[n])
                seen.most("longest pause s", watched.longest_gap_s)
            await asyncio.sleep(max(0.0, thaw.when() - asyncio.get_running_loop().time()) + 0.1)
            seen.count("workers stopped")
            await made.connected(2)  # the thawed one is of use again
        pause_s = seen.facts["longest pause s"]
        seen.check(1.0 < pause_s <= HANG_S, f"the longest pause was {pause_s} s; at most {HANG_S}")
        await made.check_free(seen)


@row(
    16,
    "Host out of memory",
    injected="a memory limit (cgroup) around one worker, which then takes more than it allows",
    promised="the worker dies, and not the ingress; its streams continue with equal ids",
    needs=("root",),
)
async def out_of_memory(scale: Scale, seen: Seen) -> None:
    async with desk(2) as made:
        call = plain("The winter was", seed=3, max_tokens=600)
        expected = await made.alone("winter", call)
        for _ in range(scale.of(1, 3)):
            victim: list[Hand] = []

            async def told(num_tokens: int, victim: list[Hand] = victim) -> None:
                if num_tokens > 20 and not victim:
                    victim.append(await made.busy())

            running = asyncio.ensure_future(made.run(call, 1, told))
            while not victim:
                await asyncio.sleep(0.005)
            hand = victim[0]
            with memory_cap(hand.process.pid, extra_mib=200):
                with contextlib.suppress(EOFError, OSError):
                    for _ in range(40):
                        await asyncio.to_thread(hand.process.ask, inside.eat)
                died = await asyncio.to_thread(hand.process.join, 10.0)
            seen.check(died, "the worker outlived its memory limit")
            seen.note("exit of the worker", hand.process.exit_code)
            got, watched = await running
            compare(seen, "the stream", got, expected)
            seen.most("longest pause s", watched.longest_gap_s)
            await made.remove(hand)
            await made.add()
        await made.check_free(seen)


@row(
    17,
    "KV exhausted",
    injected="20 long requests at once on a pool of 24 blocks, where one needs 16",
    promised="requests are preempted and recomputed with equal ids; all end; a request that can "
    "never fit is refused at admission (400)",
)
async def kv_exhausted(scale: Scale, seen: Seen) -> None:
    small = replace(CONFIG, num_blocks=24, max_num_seqs=16)
    num = scale.of(8, 20)
    calls = [plain(f"The door {n} was", seed=n, max_tokens=220) for n in range(num)]
    async with desk(1, config=small, prepare=inside.nothing) as made:
        expected = [await made.alone(n, call) for n, call in enumerate(calls)]
        got = await asyncio.gather(*(made.run(call) for call in calls))
        for n, (each, _) in enumerate(got):
            compare(seen, f"request {n}", each, expected[n])
        stats = await asyncio.to_thread(made.hands[0].process.stats)
        seen.note("preemptions", stats.num_preemptions)
        seen.check(stats.num_preemptions > 0, "nothing was preempted: the pool was no too small")
        try:
            await made.run(plain(list(range(3, 503)), max_tokens=20))
            seen.check(False, "a prompt of 500 tokens was served by a pool of 384")
        except RequestError as refusal:
            seen.note("a prompt that cannot fit", refusal.code)
        await made.check_free(seen)


@row(
    18,
    "NaN in the logits",
    injected="NaN in the K of one request among five, in mid-stream",
    promised="that request ends with numerical_error; its blocks are not cached; the others' ids "
    "are "
    "equal; it is counted",
)
async def not_a_number(scale: Scale, seen: Seen) -> None:
    async with desk(1, prepare=inside.unsound) as made:
        neighbours = [plain(f"The letter {n} was", seed=n, max_tokens=100) for n in range(4)]
        expected = [await made.alone(n, call) for n, call in enumerate(neighbours)]
        for _ in range(scale.of(1, 5)):
            bad = asyncio.ensure_future(made.run(plain([5, inside.UNSOUND, 7], seed=1)))
            got = await asyncio.gather(*(made.run(call) for call in neighbours))
            for n, (each, _) in enumerate(got):
                compare(seen, f"neighbour {n}", each, expected[n])
            try:
                await bad
                seen.check(False, "the request with NaN was answered")
            except ServiceError as error:
                seen.note("its error", error.code)
                seen.check(error.code == "numerical_error", f"its error was {error.code}")
        stats = await asyncio.to_thread(made.hands[0].process.stats)
        seen.note("counted", stats.num_corrupted)
        seen.check(stats.num_corrupted == scale.of(1, 5), f"{stats.num_corrupted} were counted")
        await made.check_free(seen)


@row(
    25,
    "Request that kills workers",
    injected="a request that aborts each process that computes it, beside five others; workers are "
    "replaced; the client sends it again",
    promised="it is refused with request_killed_workers after a bounded number of workers, and at "
    "once when it comes again; the others end with equal ids",
)
async def poison(scale: Scale, seen: Seen) -> None:
    async with desk(2, prepare=inside.fatal) as made:
        good = [plain(f"The house {n} was", seed=n) for n in range(5)]
        expected = [await made.alone(n, call) for n, call in enumerate(good)]
        is_over = asyncio.Event()

        async def replace_workers() -> None:
            while not is_over.is_set():
                for hand in list(made.hands):
                    if not hand.process.is_alive:
                        seen.count("workers lost")
                        await made.remove(hand)
                        await made.add(waits=False)  # the other one may die meanwhile
                await asyncio.sleep(0.02)

        replacing = asyncio.ensure_future(replace_workers())
        running = [asyncio.ensure_future(made.run(call)) for call in good]
        await asyncio.sleep(0.2)
        for attempt in range(2):
            began_s = time.monotonic()
            try:
                await made.run(plain([5, inside.FATAL, 7]))
                seen.check(False, "the request that kills workers was answered")
            except ServiceError as error:
                seen.check(error.code == "request_killed_workers", f"it ended with {error.code}")
                seen.note(f"attempt {attempt + 1}", error.code)
            again_s = time.monotonic() - began_s
        seen.note("the second refusal took s", again_s)
        seen.check(again_s < 0.05, f"the second refusal took {again_s:.3f} s")
        for n, (got, _) in enumerate(await asyncio.gather(*running)):
            compare(seen, f"neighbour {n}", got, expected[n])
            seen.check(got.ends[0][0] is FinishReason.LENGTH, f"neighbour {n}: {got.ends}")
        is_over.set()
        await replacing
        num_lost = seen.facts.get("workers lost", 0)
        seen.check(3 <= num_lost <= 8, f"{num_lost} workers were lost to one request")
        await made.check_free(seen)
