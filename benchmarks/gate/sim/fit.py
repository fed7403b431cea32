"""Step times of a real engine on this machine, fitted: what a simulated worker needs to be ours.

Batches of many shapes run through our Engine (the built-in model, on this CPU); each step's rows,
KV and prefill tokens are recorded beside its time: of CPU, for what else the machine does is not
the engine's. Least squares of relative errors, so that short
steps count as much as long ones; errors are given on steps that the fit has not seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gate.sim.worker import StepModel
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from penstock.workers.scheduling.plan import Plan


@dataclass
class Fitted:
    """Coefficients, and how far modelled steps are from real ones."""

    coefficients: dict[str, float]
    num_steps: int
    error_p50: float  # of |modelled / real - 1|, on steps not fitted
    error_p99: float
    total_error: float  # of the sum of their times

    @property
    def model(self) -> StepModel:
        return StepModel(**self.coefficients)

    def text(self) -> str:
        c = self.coefficients
        return (
            f"step = {1e3 * c['base']:.2f} ms + {1e6 * c['row']:.0f} us x rows + "
            f"{1e6 * c['kv']:.3f} us x KV tokens + {1e6 * c['prefill']:.0f} us x prefill tokens; "
            f"{self.num_steps} steps, error p50 {100 * self.error_p50:.1f} %, p99 "
            f"{100 * self.error_p99:.1f} %, of the sum {100 * self.total_error:+.1f} %"
        )


class Recorder:
    """Steps of an engine as rows of (1, rows, KV tokens, prefill tokens, seconds)."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.thread_time) -> None:
        self.engine, self.clock = engine, clock
        self.rows: list[tuple[float, float, float, float, float]] = []
        self._plan: Plan | None = None
        schedule = engine.scheduler.schedule

        def watched() -> Plan:
            self._plan = schedule()
            return self._plan

        engine.scheduler.schedule = watched  # type: ignore[method-assign]

    def step(self) -> list[Any]:
        """A step of the engine, recorded."""
        began_s = self.clock()
        deltas = self.engine.step()
        spent_s = self.clock() - began_s
        plan = self._plan
        if plan is not None and plan.chunks:
            kv = sum(each.start + 1 for each in plan.decode)
            prefill = sum(each.length for each in plan.prefill)
            self.rows.append((1.0, len(plan.decode), kv, prefill, spent_s))
        self._plan = None
        return deltas


def fit(rows: Any) -> Fitted:
    """From recorded steps, [steps, 5]: every second one is fitted, the others are foretold."""
    rows = np.asarray(rows, np.float64)
    seen, unseen = rows[::2], rows[1::2]
    solved = _non_negative(seen[:, :4] / seen[:, 4:], np.ones(len(seen)))
    predicted = unseen[:, :4] @ solved
    errors = np.abs(predicted / unseen[:, 4] - 1.0)
    return Fitted(
        coefficients=asdict(StepModel(*solved.tolist())),
        num_steps=len(rows),
        error_p50=float(np.quantile(errors, 0.5)),
        error_p99=float(np.quantile(errors, 0.99)),
        total_error=float(predicted.sum() / unseen[:, 4].sum() - 1.0),
    )


def _non_negative(a: Any, b: Any) -> Any:
    """Least squares with no coefficient below 0: terms that would be are dropped."""
    active = list(range(a.shape[1]))
    while True:
        part = np.linalg.lstsq(a[:, active], b, rcond=None)[0]
        if (part >= 0).all():
            solved = np.zeros(a.shape[1])
            solved[active] = part
            return solved
        active.remove(active[int(np.argmin(part))])


def requests_of(rng: random.Random, batch: int, name: str) -> list[Request]:
    made = []
    for i in range(batch):
        prompt = tuple(rng.randrange(3, 8000) for _ in range(rng.randint(8, 400)))
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=rng.randint(8, 120))
        made.append(Request(f"{name}-{i}", prompt, params))
    return made


def fit_engine(batches: tuple[int, ...] = (1, 4, 16, 8, 2, 12), **settings: Any) -> Fitted:
    """Run batches of these sizes through the built-in model, and fit their steps."""
    torch.set_num_threads(1)
    model = load_model("builtin", progress=False)
    defaults: dict[str, Any] = {
        "activation_memory": "separate",
        "prefix_cache": False,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "num_blocks": 1024,
    }
    recorder = Recorder(Engine(EngineConfig(**defaults | settings), model))
    rng = random.Random(0)
    for turn, batch in enumerate((4, *batches)):
        if turn == 1:
            recorder.rows.clear()  # the first one warms up
        for request in requests_of(rng, batch, str(turn)):
            recorder.engine.add(request)
        while recorder.engine.has_work():
            recorder.step()
    return fit(recorder.rows)
