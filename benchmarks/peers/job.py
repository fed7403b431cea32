"""What a system is asked to do in a process of its own, and what it answers. No imports: the
processes of the other systems have neither torch nor Penstock.

A job comes over standard input as JSON, and the figures go to the file that is the only argument:

    {"model": PATH, "threads": 2, "settings": {...}, "windows": [[ids], ...]}        token scores
    {"model": PATH, "threads": 2, "settings": {...}, "workloads": {"W1": [JOB, ...], ...}}   speed

A speed job may have "room", the tokens that the KV cache is for, and "chunk", the prompt tokens of
a step (512).

JOB is {"prompt_ids": [...], "num_new": 128}. Scores: {"nll": [[...], ...]}, -log p of each token of
a window but its first. Speed: by workload {"first_s", "total_s", "num"}: seconds until the first
token and until the last, greedy, the end of sequence ignored, all requests at once; and by the name
"memory" {"before_mib", "peak_mib"}: what the process had in memory when the model was warm, and the
most that it had from then on.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

WARM_UP = [{"prompt_ids": [5] * 40, "num_new": 4}] * 2


def answer(
    scores: Callable[[dict[str, Any]], list[list[float]]],
    opened: Callable[[dict[str, Any]], Callable[[list[dict[str, Any]]], Iterable[int]]],
) -> None:
    """Answer the job of standard input. `scores`: of the windows of a job. `opened`: the model of a
    job, as a function that runs requests and yields the numbers of new tokens as they come."""
    job = json.load(sys.stdin)
    if "windows" in job:
        found: dict[str, Any] = {"nll": scores(job)}
    else:
        run, found = opened(job), {}
        list(run(WARM_UP[: max(map(len, job["workloads"].values()))]))
        before_mib = _resident_mib()
        # The peak that the kernel counts begins anew (proc(5)): that of loading is another's.
        Path("/proc/self/clear_refs").write_text("5")
        for name, requests in job["workloads"].items():
            found[name] = _timed(run(requests))
        found["memory"] = {"before_mib": before_mib, "peak_mib": _peak_mib()}
    Path(sys.argv[1]).write_text(json.dumps(found))


def _peak_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**10  # of kB
    raise RuntimeError("/proc/self/status has no VmHWM")


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _timed(counts: Iterable[int]) -> dict[str, float]:
    start_s, first_s, num = time.perf_counter(), 0.0, 0
    for count in counts:
        num += count
        if num and not first_s:
            first_s = time.perf_counter() - start_s
    return {"first_s": first_s, "total_s": time.perf_counter() - start_s, "num": num}
