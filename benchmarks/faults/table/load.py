"""Rows about load: ten times what fits, a burst, descriptors that run out, and a long time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import socket
import time

import httpx
import numpy as np
import psutil

from benchmarks.common.priority import precedence
from benchmarks.faults.probe import HealthProbe
from benchmarks.faults.table import inside
from benchmarks.faults.table.house import BODY, House, Plan, house, over_grpc
from benchmarks.faults.table.rows import Scale, Seen, row
from penstock.deployments.bench.own_server import free_port
from penstock.deployments.gate.types import GateSetup

PROMPT = "It was a bright morning, and"
HEALTH_S = 0.1
SLO_S = 2.0  # the setting longest_wait_s
FLAT_MIB = 48.0
BURST = 1280
LONG = 256  # tokens: clients and refusals, on the workers' cores, take little of what these take


class _Load:
    """What became of requests that came on schedule, whether or not others were answered."""

    def __init__(self, made: House, max_tokens: int = 40):
        self._made = made
        self._max_tokens = max_tokens
        self.first_s: list[float] = []  # from sending to the first token, of those admitted
        self.refusals: dict[str, int] = {}
        self.retry_after: list[float] = []
        self.dropped: list[str] = []  # admitted, and not ended well
        self.num_tokens = 0

    async def one(self, number: int) -> None:
        body = {
            **BODY,
            "prompt": PROMPT,
            "max_tokens": self._max_tokens,
            "seed": number,
            "stream": True,
        }
        began_s, has_begun = time.monotonic(), False
        try:
            async with self._made.http.stream(
                "POST", f"{self._made.url}/v1/completions", json=body
            ) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    code = answer.json()["error"]["code"]
                    kind = f"{answer.status_code} {code}"
                    self.refusals[kind] = self.refusals.get(kind, 0) + 1
                    self.retry_after.append(float(answer.headers.get("retry-after", "inf")))
                    return
                text = ""
                async for line in answer.aiter_lines():
                    if line.startswith("data: ") and not has_begun:
                        has_begun = True
                        self.first_s.append(time.monotonic() - began_s)
                    text = line or text
                    self.num_tokens += line.startswith("data: {")
                if text != "data: [DONE]":
                    self.dropped.append(text[:80])
        except httpx.HTTPError as error:
            self.dropped.append(type(error).__name__)

    async def at_rate(self, per_s: float, seconds: float, rng: random.Random) -> float:
        """Poisson arrivals; returns answers per second."""
        began_s, due_s = time.monotonic(), time.monotonic()
        running: set[asyncio.Task[None]] = set()
        number = 0
        while due_s < began_s + seconds:
            due_s += rng.expovariate(per_s)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            running.add(asyncio.ensure_future(self.one(number)))
            number += 1
        await asyncio.wait(running)
        return len(self.first_s) / (time.monotonic() - began_s)


class _Probes:
    """Asks for /health on both ports. Orchestrators use that for metrics, which has a thread of its
    own; on the clients' port the answer takes its turn behind what came before it."""

    def __init__(self, made: House, metrics_port: int):
        self._probes = [HealthProbe(f"http://127.0.0.1:{metrics_port}"), HealthProbe(made.url)]

    def end(self, seen: Seen) -> None:
        aside, beside = (probe.end() for probe in self._probes)
        seen.note("/health answers", aside.num_answers)
        seen.note("longest /health of the metrics port s", aside.longest_s)
        seen.note("longest /health of the clients' port s", beside.longest_s)
        longest_s = max(aside.longest_s, beside.longest_s)
        seen.check(longest_s <= HEALTH_S, f"/health took {longest_s:.2f} s")
        failed = aside.num_failed + beside.num_failed
        seen.check(not failed, f"/health failed {failed} times")


def _p99(values: list[float]) -> float:
    return sorted(values)[max(0, round(0.99 * len(values)) - 1)] if values else float("inf")


@row(
    8,
    "Overload ×10",
    injected="ten times the measured capacity, open loop, for 60 s; longest_wait_s at 2 s",
    promised="p99 TTFT of what is admitted <= 3 s; the rest is refused with Retry-After <= 120 s; "
    "nothing admitted is dropped; memory flat; /health within 100 ms on both ports; goodput holds; "
    "recovery <= 5 s",
)
async def overload(scale: Scale, seen: Seen) -> None:
    rng = random.Random(scale.seed)
    seconds = scale.of(8, 60)
    gate = GateSetup(host="127.0.0.1", longest_wait_s=SLO_S, max_queued=1024)
    port = free_port()
    settings = {"admission": "predicted", "longest_wait_s": SLO_S, "metrics_port": port}
    plan = Plan(gate=gate, settings=settings)
    async with house(plan) as made:
        first = _Load(made, LONG)
        with precedence():
            calm = await _closed_loop(made, first, scale.of(4, 15))
        seen.note("capacity, answers a second", calm)
        probes = await asyncio.to_thread(_Probes, made, port)
        rss = psutil.Process(made.ingresses[0].pid).memory_info().rss
        load = _Load(made, LONG)
        with precedence():
            goodput = await load.at_rate(10 * calm, seconds, rng)
        await asyncio.to_thread(probes.end, seen)
        grown = (psutil.Process(made.ingresses[0].pid).memory_info().rss - rss) / 2**20
        began_s = time.monotonic()
        answer = await over_grpc(made.target, PROMPT)
        seen.note("served again after s", time.monotonic() - began_s)
        seen.check(not answer.error and time.monotonic() - began_s <= 5.0, "it did not recover")
        seen.note("admitted", len(load.first_s))
        seen.note("refused", load.refusals)
        seen.note("goodput to capacity", goodput / calm)
        seen.note("TTFT p99 s", _p99(load.first_s))
        seen.note("longest Retry-After s", max(load.retry_after, default=0.0))
        seen.note("growth of the ingress, MiB", grown)
        seen.check(_p99(load.first_s) <= 1.5 * SLO_S, f"TTFT p99 {_p99(load.first_s):.1f} s")
        seen.check(load.refusals, "nothing was refused at ten times the load")
        seen.check(all(each <= 120 for each in load.retry_after), "Retry-After is missing or > 120")
        kinds = [kind for kind in load.refusals if kind[:3] not in ("429", "503")]
        seen.check(not kinds, f"refusals of another kind: {kinds}")
        seen.check(not load.dropped, f"{len(load.dropped)} dropped, as {load.dropped[:1]}")
        seen.check(grown <= FLAT_MIB, f"the ingress grew by {grown:.0f} MiB")
        seen.check(goodput >= 0.9 * calm, f"goodput fell to {goodput / calm:.2f} of the capacity")
        await made.check_free(seen)


async def _closed_loop(made: House, load: _Load, seconds: float) -> float:
    """Answers per second with 16 callers."""
    until_s, began_s = time.monotonic() + seconds, time.monotonic()

    async def caller(number: int) -> None:
        while time.monotonic() < until_s:
            await load.one(number)

    await asyncio.gather(*(caller(n) for n in range(16)))
    return len(load.first_s) / (time.monotonic() - began_s)


@row(
    9,
    "Burst of 1,280",
    injected="1,280 requests at once over HTTP",
    promised="/health answers within 100 ms throughout, on both ports; every request ends: served, "
    "or refused with Retry-After",
)
async def burst(scale: Scale, seen: Seen) -> None:
    number = scale.of(320, BURST)
    port = free_port()
    plan = Plan(
        gate=GateSetup(host="127.0.0.1"), prepare=inside.nothing, settings={"metrics_port": port}
    )
    async with house(plan) as made:
        await over_grpc(made.target, PROMPT)
        probes = await asyncio.to_thread(_Probes, made, port)
        load = _Load(made)
        with precedence():
            await asyncio.gather(*(load.one(n) for n in range(number)))
        await asyncio.to_thread(probes.end, seen)
        seen.note("served", len(load.first_s))
        seen.note("refused", load.refusals)
        seen.check(not load.dropped, f"{len(load.dropped)} dropped, as {load.dropped[:1]}")
        ended = len(load.first_s) + sum(load.refusals.values())
        seen.check(ended == number, f"{ended} of {number} requests ended")
        await made.check_free(seen)


@row(
    23,
    "Descriptors run out",
    injected="the ingress's limit of open files at what it has and 8 more; 40 connections; then "
    "the "
    "old limit again",
    promised="running streams end with equal ids; the process lives; it serves again within 5 s",
)
async def descriptors(scale: Scale, seen: Seen) -> None:
    async with house(Plan()) as made:
        expected = await over_grpc(made.target, PROMPT, seed=2, max_tokens=400)
        pid = made.ingresses[0].pid
        for _ in range(scale.of(1, 10)):
            begun = asyncio.Event()

            async def told(num: int, begun: asyncio.Event = begun) -> None:
                begun.set()

            running = asyncio.ensure_future(
                over_grpc(made.target, PROMPT, told=told, seed=2, max_tokens=400)
            )
            await begun.wait()
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            limit = psutil.Process(pid).num_fds() + 8
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
            sockets = [_knock(made.url) for _ in range(40)]
            await asyncio.sleep(1.0)
            got = await running
            seen.check(got.content == expected.content, f"a running stream ended with {got.error}")
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            for each in sockets:
                each.close()
            began_s = time.monotonic()
            await made.ready()
            seen.most("served again after s", time.monotonic() - began_s)
            after = await over_grpc(made.target, PROMPT, seed=2, max_tokens=400)
            seen.check(after.content == expected.content, "the next answer differs")
            seen.check(made.ingresses[0].is_alive, "the ingress has ended")
        seen.check(seen.facts["served again after s"] <= 5.0, "it did not recover within 5 s")
        await made.check_free(seen)


def _knock(url: str) -> socket.socket:
    """A connection that asks for something."""
    made = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=5)
    made.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
    return made


@row(
    26,
    "Soak",
    injected="ten minutes of mixed calls, some of whose clients crash, with kills of workers",
    promised="slopes: memory of the ingress < 1 MiB/min, descriptors and threads flat; no block is "
    "held; no answer differs",
)
async def soak(scale: Scale, seen: Seen) -> None:
    rng, seconds = random.Random(scale.seed), scale.of(15, 600)
    async with house(Plan()) as made:
        expected = {
            n: (await over_grpc(made.target, PROMPT, seed=n, max_tokens=120)).content
            for n in range(8)
        }
        is_over = asyncio.Event()

        async def caller() -> None:
            while not is_over.is_set():
                n = rng.randrange(8)
                call = asyncio.ensure_future(over_grpc(made.target, PROMPT, seed=n, max_tokens=120))
                if rng.random() < 0.2:  # it crashes
                    await asyncio.sleep(rng.uniform(0.0, 0.4))
                    call.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await call
                    seen.count("calls left")
                    continue
                got = await call
                seen.count("answers compared")
                seen.check(got.content == expected[n], f"an answer differs: {got.error}")

        callers = [asyncio.ensure_future(caller()) for _ in range(4)]
        process = psutil.Process(made.ingresses[0].pid)
        points: list[tuple[float, float, int, int]] = []
        began_s = killed_s = time.monotonic()
        while time.monotonic() < began_s + seconds:
            await asyncio.sleep(1.0)
            rss = process.memory_info().rss / 2**20
            passed_s = time.monotonic() - began_s
            points.append((passed_s / 60, rss, process.num_fds(), process.num_threads()))
            if time.monotonic() > killed_s + scale.of(5, 20):
                victim = rng.choice(made.workers)
                await asyncio.to_thread(victim.kill)
                made.workers.remove(victim)
                await made.add_worker()
                seen.count("workers killed")
                killed_s = time.monotonic()
        is_over.set()
        await asyncio.gather(*callers)
        half = np.array(points[len(points) // 3 :])
        names = ("memory, MiB/min", "descriptors/min", "threads/min")
        slopes = {
            name: float(np.polyfit(half[:, 0], half[:, n + 1], 1)[0])
            for n, name in enumerate(names)
        }
        for name, slope in slopes.items():
            seen.note(f"slope of {name}", slope)
        if not scale.is_quick:  # a few seconds have no slope
            seen.check(slopes["memory, MiB/min"] < 1.0, "the memory of the ingress grows")
            seen.check(abs(slopes["descriptors/min"]) < 0.5, "descriptors are not flat")
            seen.check(abs(slopes["threads/min"]) < 0.2, "threads are not flat")
        await made.check_free(seen)
