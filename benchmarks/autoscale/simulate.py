"""Autoscaling policies against each other: waits and worker-hours, with workers that start late.

    python -m benchmarks.autoscale.simulate                # what docs/benchmarks/results.md shows
    python -m benchmarks.autoscale.simulate --load step --start 180 --seeds 1
    python -m benchmarks.autoscale.simulate --frontier     # each policy's main setting swept
    python -m benchmarks.autoscale.simulate --reasons --load step --start 180 --seeds 1

All policies get the same requests and the same start-up times. Waits are from a request's arrival
until a worker takes it, without any limit on the queue; the first 15 minutes are not counted.
Worker-hours count from the order of a worker to the end of its last request after its removal.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.autoscale.cluster import Policy, Run
from benchmarks.autoscale.loads import DATA, LOADS, SLOTS, Arrivals, arrivals_of
from benchmarks.autoscale.policies import (
    MOST,
    Oracle,
    Penstock,
    ServeDefault,
    TargetUtilization,
)
from benchmarks.common import record
from benchmarks.gate.sim.report import spread
from penstock.deployments.autoscale.types import PolicyConfig

CONFIG = PolicyConfig(min_workers=1, max_workers=MOST)
TUNED = 0.7  # of a worker's slots, as target_ongoing_requests
Maker = Callable[[Arrivals, float, PolicyConfig], Policy]
POLICIES: dict[str, Maker] = {
    "penstock": lambda arrivals, start_s, config: Penstock(start_s, config),
    "serve": lambda arrivals, start_s, config: ServeDefault(TUNED * SLOTS),
    "serve, target 2": lambda arrivals, start_s, config: ServeDefault(2.0),
    "utilization": lambda arrivals, start_s, config: TargetUtilization(),
    "oracle": lambda arrivals, start_s, config: Oracle(arrivals, start_s),
}


def _quantile(share: float) -> Maker:
    return lambda arrivals, start_s, config: Penstock(start_s, replace(config, quantile=share))


def _serve(share: float) -> Maker:
    return lambda arrivals, start_s, config: ServeDefault(share * SLOTS)


def _utilization(share: float) -> Maker:
    return lambda arrivals, start_s, config: TargetUtilization(share)


FRONTIER: dict[str, Maker] = {
    **{f"penstock, quantile {q:g}": _quantile(q) for q in (0.5, 0.7, 0.8, 0.9, 0.97)},
    # Against the default's literal target of 2: as few waits, for more hours.
    "penstock, quantile 0.97, 0.75 of a worker": lambda arrivals, start_s, config: Penstock(
        start_s, replace(config, quantile=0.97, usable=0.75)
    ),
    **{f"serve, target {q:g} of the slots": _serve(q) for q in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)},
    **{f"utilization, target {q:g}": _utilization(q) for q in (0.4, 0.5, 0.6, 0.7, 0.8)},
}


def run_one(
    arrivals: Arrivals,
    policy: Policy,
    start_s: float,
    seed: int,
    settled_s: float = 900.0,
    tick_s: float = 2.0,
) -> dict[str, float]:
    """Figures of one policy on one seed's requests."""
    first = arrivals.work[arrivals.at < 600.0].sum() / 600.0
    initial = max(1, math.ceil(first / 0.7))
    run = Run(arrivals, policy, start_s, initial, seed, tick_s, settled_s).run()
    waits = run.waits[arrivals.at >= settled_s]
    hours = (arrivals.seconds - settled_s) / 3600.0
    return {
        "wait_mean": float(waits.mean()),
        "wait_p50": float(np.quantile(waits, 0.5)),
        "wait_p99": float(np.quantile(waits, 0.99)),
        "late_pct": 100.0 * float(np.mean(waits > 5.0)),
        "worker_hours": run.worker_s / 3600.0,
        "mean_workers": run.worker_s / 3600.0 / hours,
        "moves_per_hour": run.num_moves / hours,
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All loads, start-up times, policies and seeds of the arguments: each run, mean and sd."""
    names = list(FRONTIER) if args.frontier else args.policy
    cells = [
        (load, start_s, policy, seed)
        for load in args.load
        for start_s in args.start
        for policy in names
        for seed in range(args.seeds)
    ]
    runs: dict[tuple[str, float, str], list[dict[str, float]]] = {}
    with (
        ProcessPoolExecutor(args.jobs) as pool,
        tqdm(total=len(cells), unit="run", mininterval=1.0) as bar,
    ):
        tell = args.reasons and not args.frontier
        pending = [pool.submit(_cell, *each, args.data, tell) for each in cells]
        for (load, start_s, policy, _), done in zip(cells, pending):
            figures, reasons = done.result()
            print(*reasons, sep="\n", end="\n" if reasons else "")
            runs.setdefault((load, start_s, policy), []).append(figures)
            bar.update()
    found: dict[str, Any] = {}
    for (load, start_s, policy), each in runs.items():
        rows = found.setdefault(load, {}).setdefault(f"{start_s:g}", {})
        rows[policy] = spread(each) | {"runs": each}
    return found


def _cell(
    name: str, start_s: float, policy: str, seed: int, folder: Path, tell: bool
) -> tuple[dict[str, float], list[str]]:
    """Figures of one run, and what the policy decided and why, if `tell`."""
    load = LOADS[name]
    arrivals = arrivals_of(load, seed, folder)
    made = (POLICIES | FRONTIER)[policy](arrivals, start_s, CONFIG)
    figures = run_one(arrivals, made, start_s, seed, load.settled_s, load.tick_s)
    log = made.log if tell and isinstance(made, Penstock) else []
    return figures, [f"{at:7.0f} {kind:5} {why}" for at, kind, why in log]


COLUMNS = (
    ("wait_p50", "wait p50, s", "{:.1f}"),
    ("wait_p99", "p99, s", "{:.1f}"),
    ("wait_mean", "mean, s", "{:.2f}"),
    ("late_pct", "over 5 s, %", "{:.2f}"),
    ("worker_hours", "worker-hours", "{:.2f}"),
    ("moves_per_hour", "moves/h", "{:.1f}"),
)


def table(found: dict[str, Any]) -> str:
    """Loads, start-up times and policies in rows."""
    lines = ["| load | start, s | policy | " + " | ".join(name for _, name, _ in COLUMNS) + " |"]
    lines.append("|" + "---|" * (len(COLUMNS) + 3))
    for load, starts in found.items():
        for start, policies in starts.items():
            for policy, each in policies.items():
                cells = [form.format(each[key]["mean"]) for key, _, form in COLUMNS]
                lines.append(f"| {load} | {start} | {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    loads = "; ".join(f"{name}: {each.what}" for name, each in LOADS.items())
    parser.add_argument(
        "--load", nargs="+", default=list(LOADS), choices=LOADS, metavar="L", help=loads
    )
    parser.add_argument(
        "--policy", nargs="+", default=list(POLICIES), choices=POLICIES, metavar="P",
        help=", ".join(repr(each) for each in POLICIES),
    )  # fmt: skip
    parser.add_argument(
        "--start", nargs="+", type=float, default=[30.0, 180.0, 600.0], metavar="S",
        help="mean start-up times of a worker, seconds",
    )  # fmt: skip
    parser.add_argument(
        "--frontier", action="store_true", help="instead of POLICY, each one with several settings"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one run each")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of Azure's traces")
    parser.add_argument("--reasons", action="store_true", help="print the policy's decisions")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of()
    args = parser.parse_args(argv)
    for name in ("seeds", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if min(args.start) <= 0:
        parser.error("--start must be above 0")
    found = compare(args)
    text = table(found)
    print("\n" + text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".md").write_text(text + "\n")
        record.write(args.out.with_suffix(".json"), __file__, {"loads": found})


if __name__ == "__main__":
    main()
