"""What a system is asked to do in a process of its own, and what it answers. No imports: the
processes of the other systems have neither torch nor Penstock.

A job comes over standard input as JSON, and the figures go to the file that is the only argument:

    {"model": PATH, "threads": 2, "settings": {...}, "windows": [[ids], ...]}        token scores
    {"model": PATH, "threads": 2, "settings": {...}, "workloads": {"W1": [JOB, ...], ...}}   speed

JOB is {"prompt_ids": [...], "num_new": 128}. Scores: {"nll": [[...], ...]}, -log p of each token of
a window but its first. Speed: by workload {"first_s", "total_s", "num"}: seconds until the first
token and until the last, greedy, the end of sequence ignored, all requests at once.
"""

from __future__ import annotations

import json
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
        list(run(WARM_UP))
        for name, requests in job["workloads"].items():
            found[name] = _timed(run(requests))
    Path(sys.argv[1]).write_text(json.dumps(found))


def _timed(counts: Iterable[int]) -> dict[str, float]:
    start_s, first_s, num = time.perf_counter(), 0.0, 0
    for count in counts:
        num += count
        if num and not first_s:
            first_s = time.perf_counter() - start_s
    return {"first_s": first_s, "total_s": time.perf_counter() - start_s, "num": num}
