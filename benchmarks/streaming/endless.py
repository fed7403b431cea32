"""One answer of 20,000 tokens from a model with a context of 2,048, on a real server under load.

Starts `penstock serve` on free ports and requests over gRPC an answer with context_policy
sink_window and no max_tokens: it continues to --max-endless-tokens. At regular lengths of the
answer, a burst of ordinary requests arrives, so that every stretch of the answer has the same
neighbours. Shown over the length of the answer: KV blocks of live requests, memory of the worker
and of the ingress, time and the worker's CPU time per token. Checked: from the first roll on, while
the answer runs alone, the number of blocks varies by at most one roll; each neighbour finishes with
the ids that it gets when it runs alone; and the answer's ids are those of an engine without other
requests (--no-check-answer skips this check, which takes as long again).

    python -m benchmarks.streaming.endless --out OUT
    python -m benchmarks.streaming.endless --tokens 3000

Writes OUT.json, OUT.txt (what is printed) and OUT.png (needs matplotlib: the extra `bench`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from tqdm import tqdm

from benchmarks.common import record
from benchmarks.common.server_process import cpu_s, served
from benchmarks.streaming.endless_report import flatness, plot, report
from penstock.deployments.client import AsyncClient, ClientError
from penstock.workers.config import EngineConfig
from penstock.workers.context_policy import ContextSettings, SinkWindow
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams

PROMPT = "It was a dark and stormy night"
PROMPT_TOKENS = 9  # the mark that texts begin with is one
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 1, "ignore_eos": True}
SAMPLE_S = 0.5  # as often as a worker announces itself
STRETCHES = 20  # of the answer, in the table


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the server while the answer runs."""

    num_tokens: int  # of the answer so far
    num_running: int
    num_live_blocks: int
    num_cached_blocks: int
    worker_rss_mib: float
    worker_pss_mib: float
    ingress_rss_mib: float
    worker_cpu_s: float


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An ordinary request, and its answer while the endless answer runs."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    token_ids: tuple[int, ...] = ()
    error: str = ""


class ProcessSampler:
    """Samples the server's status and the memory of its processes until it is cancelled."""

    def __init__(self, http: httpx.AsyncClient, pids: Sequence[int], arrivals: list[float]):
        self.samples: list[Sample] = []
        self._http = http
        self._ingress, self._worker = pids
        self._arrivals = arrivals

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            worker = (await self._http.get("/v1/penstock/status")).json()["workers"][0]
            # In a thread: it waits for the process's memory map, and tokens come meanwhile.
            memory = await asyncio.to_thread(memory_mib, self._worker)
            of_ingress = await asyncio.to_thread(memory_mib, self._ingress)
            self.samples.append(
                Sample(
                    len(self._arrivals),
                    worker["num_running"],
                    worker["num_live_blocks"],
                    worker["num_cached_blocks"],
                    memory["Rss"],
                    memory["Pss"],
                    of_ingress["Rss"],
                    cpu_s(self._worker),
                )
            )


def memory_mib(pid: int) -> dict[str, float]:
    """Rss and Pss of a process."""
    found = psutil.Process(pid).memory_full_info()
    return {"Rss": found.rss / 2**20, "Pss": found.pss / 2**20}


def make_neighbours(num: int, seed: int) -> list[Neighbour]:
    """Greedy and sampled in turn. All bursts have the same lengths; no two prompts are alike."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(num):
        ids = rng.integers(3, 8000, size=(64, 160, 32)[i % 3])
        sampling: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True, "temperature": 0.0}
        if i % 2:
            sampling |= {"temperature": 0.9, "seed": i}
        found.append(Neighbour(tuple(int(n) for n in ids), sampling))
    return found


async def ask(client: AsyncClient, neighbour: Neighbour) -> Neighbour:
    try:
        answer = await client.complete(list(neighbour.prompt), **neighbour.sampling)
    except ClientError as error:
        return Neighbour(neighbour.prompt, neighbour.sampling, error=str(error))
    return Neighbour(neighbour.prompt, neighbour.sampling, answer.token_ids)


async def measure(args: argparse.Namespace, urls: dict[str, str], pids: list[int]) -> Any:
    target = urls["gRPC"].removeprefix("grpc://")
    num_bursts = args.tokens // args.every
    todo = make_neighbours(num_bursts * args.neighbours, seed=0)
    bursts: list[asyncio.Task[Neighbour]] = []
    arrivals: list[float] = []
    ids: list[int] = []
    texts: list[str] = []
    http = httpx.AsyncClient(base_url=urls["HTTP, SSE"], timeout=60)
    async with http, AsyncClient(target) as client, AsyncClient(target) as other:
        prompt = await client.tokenize(PROMPT)
        assert len(prompt) == PROMPT_TOKENS, prompt
        refusal = await refused(client, prompt, args.tokens)
        watch = ProcessSampler(http, pids, arrivals)
        watching = asyncio.create_task(watch.run())
        began_s = time.perf_counter()
        with tqdm(total=args.tokens, unit="token") as bar:
            stream = client.generate(prompt, **SAMPLING, context_policy="sink_window")
            async for piece in stream:
                now_s = time.perf_counter() - began_s
                for token_id in piece.token_ids:
                    ids.append(token_id)
                    arrivals.append(now_s)
                    if len(ids) % args.every == args.every // 2 and todo:
                        batch, todo = todo[: args.neighbours], todo[args.neighbours :]
                        bursts += [asyncio.create_task(ask(other, each)) for each in batch]
                texts.append(piece.text)
                bar.update(len(piece.token_ids))
                last = piece
        watching.cancel()
        beside = list(await asyncio.gather(*bursts))
        alone = [await ask(other, each) for each in tqdm(beside, unit="neighbour alone")]
    text = "".join(texts)
    assert last.usage is not None and last.finish_reason is not None
    return {
        "prompt_tokens": len(prompt),
        "refusal": refusal,
        "finish_reason": last.finish_reason.name,
        "completion_tokens": last.usage.completion_tokens,
        "evicted_tokens": last.usage.evicted_tokens,
        "token_ids": ids,
        "prompt": prompt,
        "begins": text[:160],
        "ends": text[-160:],
        "arrivals_s": arrivals,
        "samples": [asdict(sample) for sample in watch.samples],
        "neighbours": {
            "num": len(beside),
            "finished": sum(not each.error for each in beside),
            "errors": sorted({each.error for each in beside if each.error}),
            "same_ids": sum(a.token_ids == b.token_ids != () for a, b in zip(beside, alone)),
        },
    }


async def refused(client: AsyncClient, prompt: list[int], num_tokens: int) -> str:
    """What the server says to the same request with the full context."""
    try:
        await client.complete(prompt, max_tokens=num_tokens, context_policy="full")
    except ClientError as error:
        return error.message
    return "not refused"


def answer_alone(prompt: list[int], args: argparse.Namespace) -> list[int]:
    """The same request in a bare engine of this process, without a server or neighbours."""
    model = load_model("builtin", progress=False)
    engine = Engine(EngineConfig(num_blocks=args.num_blocks, threads=args.threads), model)
    sampling = {**SAMPLING, "context_policy": "sink_window", "max_tokens": args.tokens}
    engine.add(Request("alone", tuple(prompt), SamplingParams(**sampling)))
    ids: list[int] = []
    with tqdm(total=args.tokens, unit="token alone") as bar:
        while engine.has_work():
            for delta in engine.step():
                ids += delta.token_ids
                bar.update(len(delta.token_ids))
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=20_000, help="of the endless answer")
    parser.add_argument("--neighbours", type=int, default=3, help="ordinary requests of a burst")
    parser.add_argument("--every", type=int, default=500, help="tokens of the answer from burst "
                        "to burst")  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="compute threads of the worker")
    parser.add_argument("--num-blocks", type=int, default=256, help="KV blocks of the worker")
    parser.add_argument("--no-check-answer", action="store_true")
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.txt and OUT.png")
    args = parser.parse_args()
    cap = args.tokens + PROMPT_TOKENS  # the cap counts both
    flags = [
        *("--threads", str(args.threads), "--num-blocks", str(args.num_blocks)),
        *("--max-endless-tokens", str(cap), "--no-prefix-cache"),
    ]
    load = os.getloadavg()[0]
    with served("builtin", flags) as (urls, pids):
        found = asyncio.run(measure(args, urls, pids))
    settings = ContextSettings.of(EngineConfig(), max_model_len=2048)
    policy = settings.context(SamplingParams(context_policy="sink_window"))
    assert isinstance(policy, SinkWindow)
    found["policy"] = asdict(policy)
    found["flatness"] = flatness(found, policy)
    found["load_averages"] = [load, os.getloadavg()[0]]
    found["same_answer"] = None
    if not args.no_check_answer:
        found["same_answer"] = answer_alone(found["prompt"], args) == found["token_ids"]
    found["about"] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "args": {name: str(value) for name, value in vars(args).items()},
    }
    text = report(found, STRETCHES)
    print("\n" + text)
    if args.out:
        args.out.with_suffix(".txt").write_text(text)
        del found["token_ids"]
        found["arrivals_s"] = [round(each, 3) for each in found["arrivals_s"][:: args.every // 10]]
        record.write(args.out.with_suffix(".json"), __file__, found, threads=args.threads)
        plot(found, args.out.with_suffix(".png"))
    ok = found["neighbours"]["same_ids"] == found["neighbours"]["num"]
    low, high = found["flatness"]["blocks_alone"]
    flat = high - low <= found["flatness"]["blocks_of_a_roll"]
    if not (ok and flat and found["same_answer"] in (None, True)):
        raise SystemExit("endless: not as it should be, see above")


if __name__ == "__main__":
    main()
