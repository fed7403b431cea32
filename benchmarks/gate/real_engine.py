"""Admission on the real engine: the same requests through `optimistic` and `predicted`.

Our Engine with the built-in model on this CPU and a small pool, in one process, driven by the
simulator's events in place of its modelled worker; the production gate and predictor decide. Time
is the CPU time that each step really took (`--wall`: the clock's), the gate's own is not in it:
it lives in another process. Beside each run the simulation of the same requests, with coefficients
fitted on other steps of the same engine: how far is the simulator to be believed?

Prompts and lengths are PPL's, cut to what the pool can take; the predictor has learnt from other
requests of that file (`--warm`) and goes on learning.

    python -m benchmarks.gate.real_engine
    python -m benchmarks.gate.real_engine --requests 60 --rate 3 --out /tmp/real
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.common import record
from benchmarks.gate.sim.engine_worker import EngineWorker
from benchmarks.gate.sim.events import Simulation
from benchmarks.gate.sim.fit import Fitted, fit_engine
from benchmarks.gate.sim.loads import DATA, Load, Slo, Source, jobs_of
from benchmarks.gate.sim.policies import Gated, Policy
from benchmarks.gate.sim.report import figures
from benchmarks.gate.sim.worker import Job, SimWorker, WorkerShape
from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model

POLICIES = ("optimistic", "predicted")
MAX_TOKENS = 512  # what clients ask for
LONGEST_PROMPT = 256
KEYS = (
    ("preempted_100", "preempted /100", "{:.1f}"),
    ("recomputed", "tokens again", "{:.0f}"),
    ("ttft_p50", "TTFT p50, s", "{:.2f}"),
    ("ttft_p99", "p99", "{:.2f}"),
    ("tpot_p50_ms", "TPOT p50, ms", "{:.1f}"),
    ("tpot_p99_ms", "p99", "{:.1f}"),
    ("gap_p99", "gap p99, s", "{:.2f}"),
    ("tokens_s", "tokens/s", "{:.0f}"),
    ("goodput", "good/s", "{:.2f}"),
    ("step_ms", "step, ms", "{:.2f}"),
)


def requests_of(args: argparse.Namespace) -> tuple[list[Job], list[Job]]:
    """The requests of the run, and others that the predictor has seen before."""
    source = Source("ppl", max_tokens=MAX_TOKENS)
    load = Load("", (source,), args.rate, "", num_requests=args.requests + args.warm)
    jobs = jobs_of(load, args.seed, args.data)
    for job in jobs:
        job.prompt = min(job.prompt, LONGEST_PROMPT)
        job.features = replace(job.features, prompt_tokens=job.prompt)
    warm, rest = jobs[: args.warm], jobs[args.warm :]
    start = warm[-1].arrived if warm else 0.0
    for job in rest:
        job.arrived -= start
    return rest, warm


def policy_of(name: str, workers: list[Any], warm: list[Job]) -> Policy:
    if name == "optimistic":
        return Policy(workers)
    gated = Gated(workers)
    gated.predictor = LengthPredictor()
    for job in warm:
        gated.predictor.observe(job.features, job.length, job.ended)
    return gated


def run(name: str, worker: Any, args: argparse.Namespace, bar: tqdm) -> dict[str, float]:
    jobs, warm = requests_of(args)
    window = (0.0, jobs[-1].arrived)
    policy = policy_of(name, [worker], warm)
    done = Simulation(policy, [worker], jobs, bar.update, report_s=args.report_s, marks=window)
    done.run()
    tokens = done.tokens_at[1] - done.tokens_at[0]
    slo = Slo(args.ttft, args.tpot_ms / 1e3, args.gap)
    measured = figures(jobs, tokens, worker.num_prefilled, window, slo)
    return measured | {
        "recomputed": float(sum(each.num_recomputed for each in jobs)),
        "preemptions": float(sum(each.num_preemptions for each in jobs)),
        "declined": float(done.num_declined),
        "step_ms": 1e3 * worker.busy_s / worker.num_steps,
        "num_steps": float(worker.num_steps),
        "seconds": done.now,
        "policy_ms": 1e3 * done.policy_s / len(jobs),
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    engine_settings: dict[str, Any] = {
        "activation_memory": "separate",
        "prefix_cache": False,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "num_blocks": args.blocks,
    }
    print("fitting step times on other batches of the same engine ...", flush=True)
    fitted: Fitted = fit_engine(num_blocks=1024)
    print(fitted.text(), flush=True)
    shape = WorkerShape(fitted.model, args.blocks, slots=16, budget=256, watermark=0.0)
    model = load_model("builtin", progress=False)
    clock = time.perf_counter if args.wall else time.thread_time
    measured: dict[str, Any] = {"fitted": asdict(fitted), "real": {}, "simulated": {}}
    with tqdm(total=2 * len(POLICIES) * args.requests, unit="request", mininterval=1.0) as bar:
        for name in POLICIES:
            bar.set_postfix_str(name)
            engine = Engine(EngineConfig(**engine_settings), model)
            measured["real"][name] = run(name, EngineWorker(0, shape, engine, clock), args, bar)
            engine.check()
            engine.close()
            measured["simulated"][name] = run(name, SimWorker(0, shape), args, bar)
    return measured


def report(measured: dict[str, Any], args: argparse.Namespace) -> str:
    fitted = Fitted(**measured["fitted"])
    time_of = "wall clock" if args.wall else "CPU time of the engine's thread"
    lines = [
        f"{datetime.now(UTC).isoformat(timespec='seconds')}, {platform.machine()}, builtin model, "
        f"one thread, time is {time_of}; {args.requests} requests of PPL's, {args.rate:g} a second "
        f"(Poisson), {args.blocks} blocks of 16, {args.warm} seen before; good: TTFT "
        f"{args.ttft:g} s, TPOT {args.tpot_ms:g} ms, gaps {args.gap:g} s",
        fitted.text(),
        "",
        "| policy | " + " | ".join(name for _, name, _ in KEYS) + " |",
        "|" + "---|" * (len(KEYS) + 1),
    ]
    for name in POLICIES:
        for kind in ("real", "simulated"):
            row = measured[kind][name]
            cells = " | ".join(form.format(row[key]) for key, _, form in KEYS)
            lines.append(f"| {name}, {kind} | {cells} |")
    lines.append("")
    for name in POLICIES:
        real, simulated = measured["real"][name], measured["simulated"][name]
        off = {
            key: 100 * (simulated[key] / real[key] - 1) if real[key] else float("nan")
            for key in ("step_ms", "goodput", "tokens_s")
        }
        lines.append(
            f"- {name}: simulated over real: step time {off['step_ms']:+.1f} %, goodput "
            f"{off['goodput']:+.1f} %, throughput {off['tokens_s']:+.1f} %"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--blocks", type=int, default=160, help="of 16 tokens: the pool")
    parser.add_argument("--warm", type=int, default=300, help="requests learnt from beforehand")
    parser.add_argument("--report-s", type=float, default=0.25, help="between a worker's reports")
    parser.add_argument("--ttft", type=float, default=2.0, help="seconds, of a good answer")
    parser.add_argument("--tpot-ms", type=float, default=15.0, help="mean, of a good answer")
    parser.add_argument("--gap", type=float, default=0.5, help="seconds, longest, of a good answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wall", action="store_true", help="wall clock instead of CPU time")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the trace files")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    args = parser.parse_args()
    for name in ("requests", "rate", "blocks", "report_s"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if args.blocks < (LONGEST_PROMPT + MAX_TOKENS) // 16 + 1:
        parser.error(f"--blocks must hold {LONGEST_PROMPT} + {MAX_TOKENS} tokens: at least 49")
    measured = compare(args)
    text = report(measured, args)
    print("\n" + text)
    if args.out is not None:
        about: dict[str, Any] = {"args": {name: str(value) for name, value in vars(args).items()}}
        about["load_average"] = str(os.getloadavg()[0])
        args.out.with_suffix(".md").write_text(text)
        content = about | measured | {"numpy": np.__version__}
        record.write(args.out.with_suffix(".json"), __file__, content, threads=1)


if __name__ == "__main__":
    main()
