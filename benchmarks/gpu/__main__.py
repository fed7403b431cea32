"""All that a machine with a GPU should show, in the fewest minutes.

    python -m benchmarks.gpu --out DIR [--stage STAGE] [--minutes 5] [--only NAME ...]

First every kernel is checked and the timed calls are compiled, several processes side by side,
since compiling takes most of the time; then all calls are timed alone, one after the other. DIR
gets a log of each process, `check.json` with all findings and times, and `checks.json` and
`times.json` as `benchmarks/results/gpu` has them. A process that takes too long is ended, and its
findings are in its log alone. Exit code 0 only if every kernel is right, and no process broke.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import record
from benchmarks.gpu.check import PARTS

MINUTES = 5.0
OF_CHECKS = 0.6  # of the time, where both stages run
STAGES = ("check", "time")
Job = tuple[str, list[str]]  # its name, and arguments of check.py


def run_jobs(jobs: Sequence[Job], folder: Path, until_s: float, at_once: int) -> dict[str, Any]:
    """Exit codes by name; None: it was ended at `until_s`."""

    def code_of(job: Job) -> int | None:
        name, arguments = job
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return None
        command = [sys.executable, "-m", "benchmarks.gpu.check", *arguments]
        with (folder / f"{name}.log").open("wb") as log:
            try:
                return subprocess.run(
                    [*command, "--json", str(folder / f"{name}.json")],
                    stdout=log, stderr=log, timeout=left_s, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return None

    with ThreadPoolExecutor(at_once) as threads:
        codes = dict(zip([name for name, _ in jobs], threads.map(code_of, jobs), strict=True))
    for name, code in codes.items():
        if code != 0:
            print(f"{name}: " + ("ended, out of time" if code is None else f"exit code {code}"))
    return codes


def check_jobs(parts: Sequence[str]) -> list[Job]:
    """A process for each kernel's checks, and for the timed calls of each part; the long first."""
    jobs = []
    for part in sorted(parts, key=lambda part: (part != "order", part != "linear")):
        for kernel in PARTS[part].CHECKS:
            name = "check-" + "".join(c if c.isalnum() else "-" for c in f"{part}-{kernel}")
            jobs.append((name, ["--stage", "check", "--only", part, "--kernel", kernel]))
        jobs.append((f"compile-{part}", ["--stage", "compile", "--only", part]))
    return jobs


def merged(folder: Path) -> dict[str, Any]:
    """The findings and times of all parts that came to their end, now and in an earlier stage."""
    path = folder / "check.json"
    whole: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for part in sorted(folder.glob("*-*.json")) + sorted(folder.glob("time.json")):
        found = json.loads(part.read_text())
        for name in ("correctness", "timings"):
            whole[name] = whole.get(name, []) + found.pop(name, [])
        whole |= found
        part.unlink()
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return whole


def by_kernel(findings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each kernel and type: its cases, the wrong ones, the worst error and what is allowed."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for each in findings:
        key = {"kernel": each["kernel"], "dtype": each["dtype"]}
        empty = key | {"cases": 0, "wrong": 0, "worst": 0.0, "allowed": each["tolerance"]}
        group = groups.setdefault((each["kernel"], each["dtype"]), empty)
        group["cases"] += 1
        group["wrong"] += not each["ok"]
        group["worst"] = max(group["worst"], each["error"] or 0.0)
    return list(groups.values())


def write_results(whole: dict[str, Any], folder: Path) -> None:
    about = {name: whole[name] for name in whole if name not in ("correctness", "timings")}
    if whole["correctness"]:
        kernels = {"kernels": by_kernel(whole["correctness"])}
        record.write(folder / "checks.json", __file__, about | kernels)
    if whole["timings"]:
        record.write(folder / "times.json", __file__, about | {"timings": whole["timings"]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--stage", choices=STAGES, help="this one alone; none: both")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit of all")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    start_s, seconds = time.monotonic(), 60 * given.minutes
    codes: dict[str, int | None] = {}
    if given.stage != "time":
        share = OF_CHECKS if given.stage is None else 1.0
        until_s, at_once = start_s + share * seconds, max(1, (os.cpu_count() or 1) - 2)
        codes |= run_jobs(check_jobs(given.only), given.out, until_s, at_once)
    if given.stage != "check":
        only = [word for part in given.only for word in ("--only", part)]
        job = ("time", ["--stage", "time", *only])
        codes |= run_jobs([job], given.out, start_s + seconds, 1)
    whole = merged(given.out)
    write_results(whole, given.out)
    wrong = [finding for finding in whole["correctness"] if not finding["ok"]]
    for finding in wrong:
        print("WRONG", *finding.values())
    print(f"{len(whole['correctness'])} checks, {len(wrong)} wrong; {len(whole['timings'])} times")
    return 1 if wrong or any(code != 0 for code in codes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
