"""What a request costs the gate's process in all: microseconds of CPU, learning included.

The service of the gate, driven by messages on a simulated cluster (sim/served.py): below what the
workers can serve, and above it. CPU is of the whole process, `time.process_time`, by part. A table
of the parts, and their sum: what one core of the gate can do for a second of its time.

    python -m benchmarks.gate.request_cost
    python -m benchmarks.gate.request_cost --runs 3 --out /tmp/cost.json
    python -m benchmarks.gate.request_cost --case overload --profile
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common import record
from benchmarks.gate.sim.events import Simulation
from benchmarks.gate.sim.loads import DATA, GPUS, LOADS, jobs_of
from benchmarks.gate.sim.served import PARTS, Served
from benchmarks.gate.sim.worker import SimWorker

REPORT_S = 0.1  # at most so often


@dataclass(frozen=True)
class Case:
    """A load and how much of it comes."""

    what: str
    load: str
    pace: float  # times the load's rate
    workers: int = 1
    longest_wait_s: float | None = None


CASES = {
    "light": Case("short answers, half of what fits", "words", 1.0),
    "light, 4": Case("the same, four workers", "words", 1.0, workers=4),
    "full": Case("short answers, twice what fits", "words", 4.0, longest_wait_s=8.0),
    "full, 4": Case("the same, four workers", "words", 4.0, workers=4, longest_wait_s=8.0),
    "long": Case("long answers, at saturation", "reasoning", 1.0),
    "overload": Case("long answers, half as much again", "overload", 1.0, longest_wait_s=8.0),
}


def cost_of(case: Case, requests: int, seed: int, bar: tqdm) -> dict[str, Any]:
    """One run: CPU microseconds a request by part, and what became of the requests."""
    load = replace(LOADS[case.load], num_requests=requests // case.workers)
    jobs = jobs_of(load, seed, DATA, workers=case.workers, scale=case.pace)
    workers = [SimWorker(i, GPUS[load.gpu]) for i in range(case.workers)]
    policy = Served(workers, longest_wait_s=case.longest_wait_s)
    run = Simulation(policy, workers, jobs, bar.update, report_s=REPORT_S).run()
    parts = {name: 1e6 * policy.meter.parts[name] / len(jobs) for name in PARTS}
    done = [each for each in jobs if each.outcome == "done"]
    return {
        "us": sum(parts.values()),
        "parts_us": parts,
        "requests": len(jobs),
        "seconds": run.now,
        "refused": sum(each.outcome == "refused" for each in jobs),
        "preemptions": sum(each.num_preemptions for each in jobs),
        "answer_tokens": float(np.mean([each.generated for each in done])),
        "most_waiting": run.most_waiting,
    }


def median_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure, over the runs."""
    parts = {name: float(np.median([each["parts_us"][name] for each in runs])) for name in PARTS}
    plain = {
        key: float(np.median([each[key] for each in runs])) for key in runs[0] if key != "parts_us"
    }
    return plain | {"parts_us": parts}


def text_of(found: dict[str, dict[str, Any]]) -> str:
    head = ("case", "us a request", *PARTS, "answer tokens", "refused", "most waiting")
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, row in found.items():
        cells = [f"{row['us']:.0f}", *(f"{row['parts_us'][part]:.0f}" for part in PARTS)]
        cells += [f"{row['answer_tokens']:.0f}", f"{row['refused']:.0f}"]
        lines.append(f"| {name} | " + " | ".join([*cells, f"{row['most_waiting']:.0f}"]) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    cases = "; ".join(f"{name}: {each.what}" for name, each in CASES.items())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help=cases)
    parser.add_argument("--requests", type=int, default=1000, help="of each case")
    parser.add_argument("--runs", type=int, default=1, help="of each case, in turn; medians count")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    args = parser.parse_args(argv)
    if args.requests < 10 or args.runs < 1:
        parser.error("--requests must be at least 10, and --runs at least 1")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.case}
    profile = cProfile.Profile()
    with tqdm(total=len(args.case) * args.requests * args.runs, unit="request") as bar:
        for _ in range(args.runs):
            for name in args.case:
                bar.set_postfix_str(name)
                if args.profile:
                    profile.enable()
                runs[name].append(cost_of(CASES[name], args.requests, args.seed, bar))
                profile.disable()
    found = {name: median_of(each) for name, each in runs.items()}
    print("\n" + text_of(found))
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    if args.out is not None:
        record.write(args.out, __file__, {"cases": found})


if __name__ == "__main__":
    main()
