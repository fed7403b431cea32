"""How honest is Retry-After? Refused clients of a simulated load come back when they were told to.

What each was told is set against the moment from which the gate would have had it: half a second
apart it is asked whether it would let the request in by now, which changes nothing. Those who come
back are part of the load, up to `most_returns` times each, and then leave for good.

    python -m benchmarks.gate.retry_after                  # what docs/benchmarks/results.md shows
    python -m benchmarks.gate.retry_after --load overload --seeds 1
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.gate.sim.events import Simulation
from benchmarks.gate.sim.loads import DATA, GPUS, LOADS, Load, jobs_of
from benchmarks.gate.sim.policies import Gated
from benchmarks.gate.sim.worker import Job, SimWorker
from penstock.deployments.gate.types import GateSettings

PROBE_S = 0.5
PATIENCE_S = 300.0  # so long it is asked whether a refused one would be let in
MOST_RETURNS = 5


@dataclass(slots=True, eq=False)
class Refused:
    """One refusal, and what became of it."""

    at: float
    retry_after_s: float  # Retry-After
    was_again: bool  # it had come back before
    is_in: bool | None = None  # at its return; None: it did not come back
    could_s: float | None = None  # from its refusal until it would have been let in


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
            return  # a later refusal's return was let in
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


def figures(runs: Sequence[Returning]) -> dict[str, float]:
    """Of all runs together; the first fifth of each is not counted."""
    counted = [
        each
        for run in runs
        for each in run.refusals
        if each.at >= run.jobs[len(run.jobs) // 5].arrived
    ]
    back = [each for each in counted if each.is_in is not None]
    told = np.array([each.retry_after_s for each in back if each.could_s is not None])
    could = np.array([each.could_s for each in back if each.could_s is not None])
    ends = Counter(job.outcome for run in runs for job in run.jobs)
    return {
        "refusals": float(len(counted)),
        "in_pct": 100 * float(np.mean([bool(each.is_in) for each in back])),
        "lost_pct": 100 * ends["refused"] / ends.total(),
        "told_p50_s": float(np.median(told)),
        "could_p50_s": float(np.median(could)),
        "off_p50_s": float(np.median(np.abs(told - could))),
        "early_pct": 100 * float(np.mean(told < could - PROBE_S)),
    }


COLUMNS = (
    ("refusals", "refusals", "{:.0f}"),
    ("told_p50_s", "told, p50 s", "{:.1f}"),
    ("could_p50_s", "would be let in after, p50 s", "{:.1f}"),
    ("off_p50_s", "off by, p50 s", "{:.1f}"),
    ("early_pct", "told too little, %", "{:.0f}"),
    ("in_pct", "let in at the return, %", "{:.0f}"),
    ("lost_pct", "requests never let in, %", "{:.0f}"),
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
    told: dict[str, dict[str, float]] = {}
    total = len(args.load) * len(args.pace) * args.seeds * args.requests
    with tqdm(total=total, unit="request", mininterval=1.0) as bar:
        for name in args.load:
            for pace in args.pace:
                load = LOADS[name]
                load = replace(load, num_requests=args.requests, rate=load.rate * pace)
                runs = [run_one(load, i, args.data, bar.update)[0] for i in range(args.seeds)]
                key = f"{name}, {load.rate:.2f}/s"
                told[key] = figures(runs)
                cells = " | ".join(form.format(told[key][column]) for column, _, form in COLUMNS)
                lines.append(f"| {key} | {cells} |")
    text = "\n".join(lines) + "\n"
    print("\n" + text)
    if args.out is not None:
        args.out.with_suffix(".md").write_text(text)
        args.out.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
