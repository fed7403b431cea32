"""Loads of the autoscaling simulation: when requests arrive, and how much work each one is.

Work is in worker-seconds, by the step times of a 13B fp16 model on an A100 40G (the shape that
benchmarks/gate assumes): a prefill token 130 us, a decode step 20 ms shared by 12 requests, and
0.53 us for each token of KV that it reads. The policy sees expected work only: the prompt is known
and the answer is assumed to have the mean length of the last 500 that ended, as by a predictor that
learnt nothing else.

Real arrivals: Azure's chat and code traces of 2023, one hour each. A run goes through the hour
three times from a minute that the seed draws. Drawn loads: Poisson arrivals at a rate that
changes over the run, lengths log-normal with the chat trace's mean and spread.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
TRACE = "AzureLLMInferenceTrace_{}_2023.csv"
PREFILL_S, STEP_S, READ_S = 130e-6, 20e-3, 0.53e-6
SLOTS = 12  # requests that a worker runs at once
PASSES = 3  # through a trace
MEAN_WORK_S, SPREAD = 0.64, 0.6  # of drawn requests: mean, standard deviation of the logarithm
LEARNT, RUNNING = 500, 50  # answers of a mean; newest answers that still run, left out
HOUR = 3600.0


class MissingTraceError(SystemExit):
    """The file of a trace is missing; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Load:
    """A named load. `rate` (workers at a time in seconds) of drawn ones; `trace` of real ones."""

    what: str
    seconds: float
    rate: Callable[[float], float] | None = None
    trace: str = ""
    slower: float = 1.0  # factor on the times of the 13B model
    tick_s: float = 2.0  # between two decisions
    settled_s: float = 900.0  # requests before this time are not counted, nor worker-hours


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in the order of their arrival; all arrays [requests]."""

    at: Floats  # seconds
    work: Floats  # worker-seconds
    expected: Floats  # the work that the gate predicts
    seconds: float  # length of the run


def arrivals_of(load: Load, seed: int, folder: Path = DATA) -> Arrivals:
    """The requests of one run; the same seed, the same requests."""
    rng = np.random.default_rng(seed)
    if load.trace:
        return _replayed(load, rng, folder)
    assert load.rate is not None
    steps = np.arange(0.0, load.seconds, 1.0)
    counts = rng.poisson(np.array([load.rate(at) for at in steps]) / MEAN_WORK_S)
    at = np.sort(np.repeat(steps, counts) + rng.random(int(counts.sum())))
    mean = math.log(MEAN_WORK_S) - SPREAD**2 / 2
    work = np.exp(rng.normal(mean, SPREAD, len(at)))
    expected = np.sqrt(work * MEAN_WORK_S)  # half of the spread is known beforehand
    return Arrivals(at, work, expected * (MEAN_WORK_S / expected.mean()), load.seconds)


def _replayed(load: Load, rng: np.random.Generator, folder: Path) -> Arrivals:
    at, prompts, answers = read_trace(folder, load.trace)
    work = load.slower * work_s(prompts, answers)
    length = load.seconds / PASSES
    shifted = (at - 60.0 * rng.integers(int(length // 60))) % length
    order = np.argsort(shifted, kind="stable")
    times = np.concatenate([shifted[order] + length * k for k in range(PASSES)])
    lengths = np.tile(answers[order], PASSES)
    expected = load.slower * work_s(np.tile(prompts[order], PASSES), _learnt(lengths))
    return Arrivals(times, np.tile(work[order], PASSES), expected, load.seconds)


def _learnt(lengths: Floats) -> Floats:
    """The mean of the LEARNT answers before each, the last RUNNING of them left out."""
    total = np.concatenate([[0.0], np.cumsum(lengths)])
    end = np.maximum(np.arange(len(lengths)) - RUNNING, 0)
    begin = np.maximum(end - LEARNT, 0)
    means = (total[end] - total[begin]) / np.maximum(end - begin, 1)
    return np.where(end > begin, means, lengths[:LEARNT].mean())


def work_s(prompts: Floats, answers: Floats) -> Floats:
    """Worker-seconds of requests, [requests]."""
    steps = STEP_S / SLOTS + READ_S * (prompts + answers / 2)
    return PREFILL_S * prompts + answers * steps


@cache
def read_trace(folder: Path, name: str) -> tuple[Floats, Floats, Floats]:
    """Seconds from the first request, prompt tokens, answer tokens; each [requests]."""
    path = folder / TRACE.format(name)
    if not path.exists():
        raise MissingTraceError(
            f"{path} is missing: name the folder of Azure's traces with --data, or take loads "
            "that need none (--load step ramp day bursts constant)"
        )
    with path.open(newline="") as file:
        rows = [
            (_seconds(r["TIMESTAMP"]), float(r["ContextTokens"]), float(r["GeneratedTokens"]))
            for r in csv.DictReader(file)
        ]
    at, prompts, answers = np.array(rows).T
    order = np.argsort(at, kind="stable")
    return at[order] - at.min(), prompts[order], answers[order]


def _seconds(stamp: str) -> float:
    hours, minutes, seconds = stamp.split(" ")[1].split(":")
    return 3600.0 * int(hours) + 60.0 * int(minutes) + float(seconds)


def _day(at: float) -> float:
    return 3.4 - 3.0 * math.cos(2.0 * math.pi * at / (24.0 * HOUR))


def _bursts(at: float) -> float:
    return 7.0 if at % 1800.0 >= 1740.0 else 2.0


LOADS = {
    "chat": Load("Azure's chat service", PASSES * 3502.0, trace="conv"),
    "code": Load(
        "Azure's code service (gaps with a CV of 13), model four times as slow",
        PASSES * 3436.0,
        trace="code",
        slower=4.0,
    ),
    "constant": Load("3.2 workers throughout", 3 * HOUR, lambda at: 3.2),
    "step": Load(
        "1 worker, for an hour 5, then 1",
        3 * HOUR,
        lambda at: 5.0 if HOUR <= at < 2 * HOUR else 1.0,
    ),
    "ramp": Load(
        "1 worker, from 0:30 to 1:30 up to 6, from 2:00 to 3:00 down to 1",
        3.5 * HOUR,
        lambda at: float(np.interp(at, [0.5 * HOUR, 1.5 * HOUR, 2 * HOUR, 3 * HOUR], [1, 6, 6, 1])),
    ),
    "day": Load("a day, from 0.4 workers at night to 6.4", 24 * HOUR, _day, tick_s=10.0),
    "bursts": Load(
        "2 workers, each half an hour 7 for a minute; counted from the third burst on",
        4 * HOUR,
        _bursts,
        settled_s=1.2 * HOUR,
    ),
}
