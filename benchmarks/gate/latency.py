"""What the gate adds to a lone request: time to the first token, with and without, in turn.

    python -m benchmarks.gate.latency [--rounds 200] [--json FILE]

One worker (a real engine with its channel) and the gate have processes of their own, as in a
cluster; this one is the ingress, and asks for one token in turn: `none` has no gate, `pass` comes
in without asking, as there is room whatever happens, and `ask` is made to ask each time. Ray is not
in it: no request passes through Ray. On a busy machine it is noise: compare medians of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import record
from penstock.deployments.gate.server import GateServer
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.gate.wire import GateAddress
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch.credits import Credits
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.prediction.features import Features
from penstock.workers.channel.server import ChannelServer
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.thread import EngineThread
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from penstock.workers.stats import WorkerInfo

TEXT = "Write a story of 300 words about a mill and the river that drives it. " * 3
PATHS = ("none", "pass", "ask")
PAUSE_S = 0.1  # what one path leaves to do is done before the next is timed: the load is light


class NoCredits(Credits):
    """No credits, so that every request asks the gate."""

    def take(self, *_: Any) -> None:
        """None is taken."""


def serve_gate(addresses: Any) -> None:
    """The gate's process."""

    async def serve() -> None:
        setup = GateSetup(host="127.0.0.1")
        addresses.put(await GateServer(setup).where(setup))
        await asyncio.Event().wait()

    asyncio.run(serve())


def serve_worker(addresses: Any) -> None:
    """The worker's process."""
    torch.set_num_threads(1)
    config = EngineConfig(weights="fp32", device="cpu", num_blocks=600, threads=1)
    engine = Engine(config, load_model("builtin", weights="fp32", progress=False))
    channel = ChannelServer("127.0.0.1", "m", engine.max_model_len)
    thread = EngineThread(engine, channel.deliver, num_threads=1)
    channel.start(thread)
    thread.start()
    addresses.put(channel.info)
    thread._thread.join()


def request(number: int, path: str) -> AdmissionRequest:
    prompt = tuple(range(3 + number % 50, 35 + number % 50))
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
    features = Features("m", tenant=path, prompt_tokens=len(prompt), max_tokens=1)
    return AdmissionRequest(Request(f"{path}-{number}", prompt, params), features, text=TEXT)


async def first_token_ms(pool: WorkerPool, submitted: AdmissionRequest) -> float:
    began_s = time.perf_counter()
    stream = pool.generate(submitted)
    await anext(stream)
    took_s = time.perf_counter() - began_s
    await stream.aclose()
    return took_s * 1000


async def measure(info: WorkerInfo, address: GateAddress, rounds: int) -> dict[str, list[float]]:
    async def where() -> GateAddress:
        return address

    clients = {path: GateClient(path, where, answer_s=1.0) for path in PATHS[1:]}
    clients["ask"]._credits = NoCredits()
    running = [asyncio.ensure_future(each.run()) for each in clients.values()]
    pools = {path: WorkerPool(path, clients.get(path)) for path in PATHS}
    for pool in pools.values():
        pool.update([info])
    while not (
        all(pool.ready() for pool in pools.values())
        and all(each.is_connected for each in clients.values())
        and clients["pass"]._credits._given
    ):
        await asyncio.sleep(0.05)
    times: dict[str, list[float]] = {path: [] for path in PATHS}
    for number in range(rounds + 10):
        for path in (PATHS, PATHS[::-1])[number % 2]:
            took_ms = await first_token_ms(pools[path], request(number, path))
            if number >= 10:
                times[path].append(took_ms)
            await asyncio.sleep(PAUSE_S)
    assert clients["pass"].num_asked <= rounds // 20, "there was no room: this is no light load"
    assert clients["ask"].num_on_credit == clients["ask"].num_fallback == 0
    for each in running:
        each.cancel()
    await asyncio.gather(
        *running, *(pool.close() for pool in pools.values()), return_exceptions=True
    )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    others = []
    addresses = []
    for serve in (serve_gate, serve_worker):
        answers = spawn.Queue()
        others.append(spawn.Process(target=serve, args=(answers,), daemon=True))
        others[-1].start()
        addresses.append(answers.get(timeout=100))
    address, info = addresses
    times = asyncio.run(measure(info, address, args.rounds))
    for each in others:
        each.terminate()
    report(times, args)


def report(times: dict[str, list[float]], args: argparse.Namespace) -> None:
    rows = {}
    for path, values in times.items():
        deciles = statistics.quantiles(values, n=20)
        pairs = [mine - none for mine, none in zip(values, times["none"], strict=True)]
        rows[path] = {
            "p50_ms": statistics.median(values),
            "p95_ms": deciles[18],
            "added_p50_ms": statistics.median(values) - statistics.median(times["none"]),
            "added_median_of_pairs_ms": statistics.median(pairs),
        }
    print(f"{args.rounds} rounds, {platform.processor()}, load {os.getloadavg()[0]:.1f}")
    print("| path | TTFT p50 | p95 | added, p50 | added, median of pairs |\n|---|---|---|---|---|")
    for path, row in rows.items():
        print(f"| {path} | " + " | ".join(f"{value:.2f} ms" for value in row.values()) + " |")
    if args.json:
        about = {"rounds": args.rounds, "load": os.getloadavg()[0], "cores": os.cpu_count()}
        record.write(args.json, __file__, {"about": about, "paths": rows})


if __name__ == "__main__":
    main()
