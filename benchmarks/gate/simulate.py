"""Rules of admission against each other, on a simulated cluster and minutes of traffic in seconds.

The gate and the length predictor are the production classes with a simulated clock. A worker is a
model of step times (`--fit` measures them on a real engine), with blocks, chunked prefill and
preemption by recompute. The predictor starts each run from nothing and learns from answers that
are over, and from how far the others are. Seeds change arrivals and lengths; every policy meets
the same requests.

    python -m benchmarks.gate.simulate    # what docs/benchmarks/results.md shows
    python -m benchmarks.gate.simulate --load reasoning --policy optimistic predicted --pace 0.9
    python -m benchmarks.gate.simulate --load mixed --workers 4 --out /tmp/mixed
    python -m benchmarks.gate.simulate --load prefixes --workers 4 --policy least-kv predicted
    python -m benchmarks.gate.simulate --fit  # coefficients of this machine
    python -m benchmarks.gate.simulate --scale                          # what the gate itself costs

Read the table so. Preempted /100: times that an answer lost its memory and was computed again, per
100 answers. Good/s: answers a second whose first token, mean pace and longest gap all kept the
load's SLO. A policy that lets everyone in has short waits and long gaps; one that reserves has the
reverse. Throughput says little: near saturation all but reserve-max have about the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common import record
from benchmarks.gate.scale import NUMBERS, Costs, run_scale
from benchmarks.gate.sim.events import Simulation
from benchmarks.gate.sim.fit import fit_engine
from benchmarks.gate.sim.loads import DATA, GPUS, LOADS, Load, jobs_of
from benchmarks.gate.sim.policies import Gated, PastFuture, Policy, ReserveMax
from benchmarks.gate.sim.report import claims, draw, figures, spread, table
from benchmarks.gate.sim.routing import LeastKv, PowerOfTwo, RoundRobin
from benchmarks.gate.sim.worker import SimWorker, StepModel, WorkerShape
from penstock.deployments.gate.types import GateSettings

CAP = 8  # requests that may wait at a worker ("optimistic, cap")
Maker = Callable[[list[SimWorker], GateSettings, int], Policy]
POLICIES: dict[str, Maker] = {
    "reserve-max": lambda workers, settings, seed: ReserveMax(workers),
    "optimistic": lambda workers, settings, seed: Policy(workers),
    "optimistic, cap": lambda workers, settings, seed: Policy(workers, cap=CAP),
    "round-robin": lambda workers, settings, seed: RoundRobin(workers, cap=CAP),
    "least-kv": lambda workers, settings, seed: LeastKv(workers, cap=CAP),
    "power-of-two": lambda workers, settings, seed: PowerOfTwo(workers, cap=CAP, seed=seed),
    "past-future": lambda workers, settings, seed: PastFuture(workers, seed=seed),
    "past-future, warm": lambda workers, settings, seed: PastFuture(workers, seed=seed),
    "predicted": lambda workers, settings, seed: Gated(workers, settings=settings, seed=seed),
    "predicted, no affinity": lambda workers, settings, seed: Gated(
        workers, settings=settings, seed=seed, affinity=False
    ),
    "predicted, youngest": lambda workers, settings, seed: Gated(
        workers, settings=settings, seed=seed, victim="youngest"
    ),
    "predicted, cautious": lambda workers, settings, seed: Gated(
        workers, settings=replace(settings, pressed_level=settings.level), seed=seed
    ),
    "oracle": lambda workers, settings, seed: Gated(
        workers, settings=settings, seed=seed, oracle=True
    ),
}
SHOWN = ("reasoning", "overload", "generous")
# Asked for by name: routers are for several workers, and victims for the engine.
BY_NAME = (
    *("round-robin", "least-kv", "power-of-two"),
    *("predicted, no affinity", "predicted, youngest", "predicted, cautious"),
)


def run_one(
    load: Load,
    shape: WorkerShape,
    policy: str,
    seed: int,
    *,
    folder: Path = DATA,
    workers: int = 1,
    pace: float = 1.0,
    on_end: Callable[[], Any] = lambda: None,
) -> dict[str, float]:
    """Figures of one policy with one seed."""
    jobs = jobs_of(load, seed, folder, workers=workers, scale=pace)
    here = [SimWorker(i, shape) for i in range(workers)]
    wait_s = math.inf if load.longest_wait_s is None else load.longest_wait_s
    rule = POLICIES[policy](here, GateSettings(longest_wait_s=wait_s), seed)
    if policy == "past-future, warm":
        assert isinstance(rule, PastFuture)
        before = replace(load, num_requests=PastFuture.WINDOW)
        rule.fill(each.length for each in jobs_of(before, seed + 1000, folder))
    window = (jobs[int(load.settled * len(jobs))].arrived, jobs[-1].arrived)
    run = Simulation(rule, here, jobs, on_end, marks=window).run()
    tokens = run.tokens_at[1] - run.tokens_at[0]
    prefilled = sum(each.num_prefilled for each in here)
    hit = sum(each.num_hit for each in here)
    return figures(jobs, tokens, prefilled, window, load.slo) | {
        "policy_ms": 1e3 * run.policy_s / len(jobs),
        "declined_100": 100 * run.num_declined / len(jobs),
        "prefix_hit_pct": 100 * hit / max(hit + prefilled, 1),
        "most_waiting": float(run.most_waiting),
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All loads, policies and seeds that were chosen."""
    loads = {name: LOADS[name] for name in args.load}
    if args.requests:
        loads = {name: replace(each, num_requests=args.requests) for name, each in loads.items()}
    if args.longest_wait:
        loads = {n: replace(each, longest_wait_s=args.longest_wait) for n, each in loads.items()}
    each_run = sum(each.num_requests for each in loads.values()) * args.workers
    by_load: dict[str, Any] = {}
    with tqdm(
        total=each_run * len(args.policy) * args.seeds, unit="request", mininterval=1.0
    ) as bar:
        for name, load in loads.items():
            shape = shape_of(load, args)
            for policy in args.policy:
                bar.set_postfix_str(f"{name}: {policy}")
                runs = [
                    run_one(
                        load,
                        shape,
                        policy,
                        seed,
                        folder=args.data,
                        workers=args.workers,
                        pace=args.pace,
                        on_end=bar.update,
                    )
                    for seed in range(args.seeds)
                ]
                by_load.setdefault(name, {})[policy] = spread(runs) | {"runs": runs}
                keep(args.out, by_load, args)
    return by_load


def shape_of(load: Load, args: argparse.Namespace) -> WorkerShape:
    shape = GPUS[args.gpu or load.gpu]
    if args.coefficients:
        fitted = json.loads(args.coefficients.read_text())["coefficients"]
        shape = replace(shape, steps=StepModel(**fitted))
    return shape if args.blocks is None else replace(shape, num_blocks=args.blocks)


def report(by_load: dict[str, Any], args: argparse.Namespace) -> str:
    lines = [
        f"Simulated: {args.workers} worker(s), {args.seeds} seeds (means, in brackets standard "
        f"deviations), pace x {args.pace:g}; {platform.machine()}, numpy {np.__version__}",
    ]
    for name, policies in by_load.items():
        load = LOADS[name]
        slo = load.slo
        offered = next(iter(policies.values()))["offered_s"]["mean"]
        lines += [
            "",
            f"{name}: {load.what}; {offered:.2f} requests/s on {args.gpu or load.gpu}; good: TTFT "
            f"{slo.ttft:g} s, TPOT {1e3 * slo.tpot:g} ms, gaps {slo.gap:g} s",
            "",
            table(policies, by_tenant=len(load.sources[0].tenants) > 1 or len(load.sources) > 1),
        ]
    found = claims(by_load)
    return "\n".join([*lines, *(["", *[f"- {each}" for each in found]] if found else [])])


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    loads = "; ".join(f"{name}: {each.what}" for name, each in LOADS.items())
    parser.add_argument(
        "--load", nargs="+", default=list(SHOWN), choices=LOADS, metavar="L", help=loads
    )
    parser.add_argument(
        "--policy", nargs="+", choices=POLICIES, metavar="P",
        default=[each for each in POLICIES if each not in BY_NAME],
        help=", ".join(repr(each) for each in POLICIES),
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, help="for each worker (default: the load's own)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--longest-wait",
        type=float,
        help="seconds; the gate refuses requests that would wait longer",
    )
    parser.add_argument("--pace", type=float, default=1.0, help="times the load's own rate")
    parser.add_argument("--gpu", choices=GPUS, help="another machine than the load's own")
    parser.add_argument("--blocks", type=int, help="another pool, in blocks of 16 tokens")
    parser.add_argument("--coefficients", type=Path, help="step times, a file that --fit wrote")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the trace files")
    parser.add_argument("--out", type=Path, help="write OUT.md, OUT.json and OUT.png")
    parser.add_argument("--fit", action="store_true", help="measure step times of a real engine")
    parser.add_argument("--scale", action="store_true", help="the gate's own cost as it grows")
    parser.add_argument(
        "--scale-requests", type=int, default=20_000, help="of each size of --scale"
    )
    parser.add_argument(
        "--scale-workers", type=int, nargs="+", default=NUMBERS, help="the sizes of --scale"
    )
    return parser


def keep(out: Path | None, by_load: dict[str, Any], args: argparse.Namespace) -> None:
    """Write what is there: after each policy, so that a long run that is stopped has left that."""
    if out is not None:
        plain = {key: str(value) for key, value in vars(args).items()}
        write(out, report(by_load, args), {"loads": by_load, "args": plain})
        draw(out.with_suffix(".png"), by_load)


def write(out: Path, text: str, found: dict[str, Any]) -> None:
    head = {"load_average": os.getloadavg()[0], "machine": platform.machine()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(text + "\n")
    record.write(out.with_suffix(".json"), __file__, head | found)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of()
    args = parser.parse_args(argv)
    for name in ("seeds", "workers", "pace"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} must be above 0")
    if args.requests is not None and args.requests < 10:
        parser.error("--requests must be at least 10")
    if args.fit or args.scale:
        found = fit_engine() if args.fit else run_scale(args.scale_requests, args.scale_workers)
        facts = {"rows": found.rows()} if isinstance(found, Costs) else asdict(found)
        print("\n" + found.text())
        if args.out is not None:
            write(args.out, found.text(), facts)
    else:
        print("\n" + report(compare(args), args))


if __name__ == "__main__":
    main()
