"""How honest is Retry-After? Refused clients of a simulated load come back after it.

The quoted time is compared with the moment from which the gate would admit the request: the
benchmark asks the gate every half second, which changes nothing. Returning clients are part of
the load, up to `most_returns` times each, and then leave for good.

    python -m benchmarks.gate.retry_after                  # what docs/benchmarks/results.md shows
    python -m benchmarks.gate.retry_after --load overload --seeds 1
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common import record
from benchmarks.gate.sim.events import Simulation
from benchmarks.gate.sim.loads import DATA, GPUS, LOADS, Load, jobs_of
from benchmarks.gate.sim.policies import Gated
from benchmarks.gate.sim.worker import Job, SimWorker
from penstock.deployments.gate.types import GateSettings

PROBE_S = 0.5
PATIENCE_S = 300.0  # for this long the gate is checked: would it admit a refused request
MOST_RETURNS = 5


@dataclass(slots=True, eq=False)
class Refused:
    """One refusal, and what became of it."""

    at: float
    retry_after_s: float  # Retry-After
    was_again: bool  # it had come back before
    is_in: bool | None = None  # at its return; None: it did not come back
    could_s: float | None = None  # from its refusal until the gate would admit it


@dataclass
class Returning(Simulation):
    """A run in which those come back that were refused; `policy` is a Gated."""

    most_returns: int = MOST_RETURNS
    refusals: list[Refused] = field(default_factory=list)
    _returns: Counter[str] = field(default_factory=Counter)

    def _refused(self, job: Job) -> None:
        assert isinstance(self.policy, Gated)
        retry_after_s = self.policy.retry_after_s
        if retry_after_s is None or self._returns[job.job_id] >= self.most_returns:
            self._end(job, "refused")
            return
        refused = Refused(self.now, retry_after_s, self._returns[job.job_id] > 0)
        self.refusals.append(refused)
        self._returns[job.job_id] += 1
        self._at(self.now + retry_after_s, self._return, job, refused)
        self._at(self.now + PROBE_S, self._probe, job, refused)

    def _return(self, job: Job, refused: Refused) -> None:
        num = len(self.refusals)
        self._arrive(job)
        refused.is_in = len(self.refusals) == num and job.outcome != "refused"
        if refused.is_in and refused.could_s is None:
            refused.could_s = self.now - refused.at

    def _probe(self, job: Job, refused: Refused) -> None:
        assert isinstance(self.policy, Gated)
        if refused.could_s is not None or self.now - refused.at > PATIENCE_S:
            return
        if not job.outcome and job.job_id in self.policy.gate.queue:
            return  # it returned after a later refusal and was admitted
        if self.policy.would_wait(job, self.now) <= self.policy.settings.longest_wait_s:
            refused.could_s = self.now - refused.at
        else:
            self._at(self.now + PROBE_S, self._probe, job, refused)


def run_one(load: Load, seed: int, folder: Path, on_end: Any) -> tuple[Returning, Gated]:
    jobs = jobs_of(load, seed, folder)
    workers = [SimWorker(0, GPUS[load.gpu])]
    settings = GateSettings(longest_wait_s=load.longest_wait_s or float("inf"))
    gated = Gated(workers, settings=settings, seed=seed)
    run = Returning(gated, workers, jobs, on_end, marks=(jobs[-1].arrived,))
    run.run()
    return run, gated


def figures(runs: Sequence[Returning]) -> dict[str, float | None]:
    """Of all runs together; the first fifth of each is not counted.

    None for a figure of refusals where there was none to take it from.
    """
    counted = [
        each
        for run in runs
        for each in run.refusals
        if each.at >= run.jobs[len(run.jobs) // 5].arrived
    ]
    back = [each for each in counted if each.is_in is not None]
    quoted = np.array([each.retry_after_s for each in back if each.could_s is not None])
    could = np.array([each.could_s for each in back if each.could_s is not None])
    ends = Counter(job.outcome for run in runs for job in run.jobs)
    return {
        "refusals": float(len(counted)),
        "admitted_at_return_pct": _percent(np.array([bool(each.is_in) for each in back])),
        "never_admitted_pct": 100 * ends["refused"] / ends.total(),
        "quoted_p50_s": _median(quoted),
        "admissible_after_p50_s": _median(could),
        "off_by_p50_s": _median(np.abs(quoted - could)),
        "quoted_too_little_pct": _percent(quoted < could - PROBE_S),
    }


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if values.size else None


def _percent(flags: np.ndarray) -> float | None:
    return 100 * float(np.mean(flags)) if flags.size else None


COLUMNS = (
    ("refusals", "refusals", "{:.0f}"),
    ("quoted_p50_s", "quoted, p50 s", "{:.1f}"),
    ("admissible_after_p50_s", "admissible after, p50 s", "{:.1f}"),
    ("off_by_p50_s", "off by, p50 s", "{:.1f}"),
    ("quoted_too_little_pct", "quoted too little, %", "{:.0f}"),
    ("admitted_at_return_pct", "admitted at the return, %", "{:.0f}"),
    ("never_admitted_pct", "never admitted, %", "{:.0f}"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", nargs="+", default=["overload", "noisy"], choices=LOADS)
    parser.add_argument("--pace", nargs="+", type=float, default=[1.0], help="times the own rate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the trace files")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    args = parser.parse_args()
    lines = [
        "| load | " + " | ".join(name for _, name, _ in COLUMNS) + " |",
        "|" + "---|" * (len(COLUMNS) + 1),
    ]
    by_load: dict[str, dict[str, float | None]] = {}
    total = len(args.load) * len(args.pace) * args.seeds * args.requests
    with tqdm(total=total, unit="request", mininterval=1.0) as bar:
        for name in args.load:
            for pace in args.pace:
                load = LOADS[name]
                load = replace(load, num_requests=args.requests, rate=load.rate * pace)
                runs = [run_one(load, i, args.data, bar.update)[0] for i in range(args.seeds)]
                key = f"{name}, {load.rate:.2f}/s"
                by_load[key] = figures(runs)
                found = ((by_load[key][column], form) for column, _, form in COLUMNS)
                cells = " | ".join("" if x is None else form.format(x) for x, form in found)
                lines.append(f"| {key} | {cells} |")
    text = "\n".join(lines) + "\n"
    print("\n" + text)
    if args.out is not None:
        args.out.with_suffix(".md").write_text(text)
        rows = [{"load": load, **row} for load, row in by_load.items()]
        record.write(args.out.with_suffix(".json"), __file__, {"rows": rows})


if __name__ == "__main__":
    main()
