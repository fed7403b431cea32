"""Runs engines with expert caches in turns, a token each, so that a slow moment affects all.

For speed.py: makes the engines, steps them, reads their counters, and prints a table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tqdm import tqdm

from benchmarks.experts.common import MODEL
from penstock.workers.config import EngineConfig, MoeMode
from penstock.workers.engine.engine import Engine
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams

PROMPT = 64  # tokens before the first that is timed
LOOKUPS = ("num_hits", "num_partial", "num_misses")
DEMAND = "demand"  # the name of runners that keep nothing from token to token


@dataclass(frozen=True)
class Turns:
    """How many tokens each runner takes: `warm` ones first, which do not count."""

    warm: int
    new: int
    model: str = MODEL

    @property
    def num_steps(self) -> int:
        return self.warm + self.new - 1


@dataclass
class Runner:
    """One engine in the middle of an answer."""

    name: str
    weights: str
    percent: int
    engine: Engine
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        name: str,
        weights: str,
        percent: int,
        settings: ExpertSettings | None,
        prompt: Sequence[int],
        turns: Turns,
    ) -> Runner:
        engine = make_engine(weights, settings, name.endswith("always"), turns.model)
        params = SamplingParams(max_tokens=turns.new + turns.warm, temperature=0, ignore_eos=True)
        engine.add(Request("one", tuple(prompt[:PROMPT]), params))
        engine.step()  # the prompt
        return cls(name, weights, percent, engine)

    def step(self) -> None:
        if self.name == DEMAND:
            empty(self.engine)
        began_s = time.perf_counter()
        self.engine.step()
        self.seconds.append(time.perf_counter() - began_s)


def empty(engine: Engine) -> None:
    """Have nothing in the slots."""
    assert engine.model.routed is not None
    table = engine.model.routed.cache.table
    for slot in table:
        if slot.key is not None and slot.is_idle:
            table.give_back(slot)


def make_engine(
    weights: str, settings: ExpertSettings | None, always: bool = False, model_name: str = MODEL
) -> Engine:
    """`always`: prefetch whatever the counters say."""
    model = load_model(model_name, weights=weights, progress=False, experts=settings)
    if always and model.routed is not None:
        model.routed.meter.clock = lambda: 0.0
    mode = cast(MoeMode, "exact" if settings is None else settings.mode)
    config = EngineConfig(
        max_num_seqs=1, num_blocks=64, prefix_cache=False, moe_mode=mode, expert_cache_gb=1.0,
        activation_memory="separate",
    )  # fmt: skip
    return Engine(config, model)


def take_turns(runners: list[Runner], turns: Turns, bytes_per_s: float) -> list[dict[str, Any]]:
    """Time all of them; one row each."""
    before: dict[int, Any] = {}
    steps = range(turns.num_steps)
    for step in tqdm(steps, desc=f"{bytes_per_s / 1e9:g} GB/s", mininterval=20):
        if step == turns.warm:
            before = {id(each): each.engine.stats().experts for each in runners}
        for each in runners:
            each.step()
    return [_row_of(each, before[id(each)], turns.warm, bytes_per_s) for each in runners]


def _row_of(runner: Runner, then: Any, warm: int, bytes_per_s: float) -> dict[str, Any]:
    times = runner.seconds[warm:]
    row: dict[str, Any] = {
        "mode": runner.name,
        "weights": runner.weights,
        "percent": runner.percent,
        "token_ms": 1e3 * statistics.median(times),
        "mean_ms": 1e3 * statistics.fmean(times),
    }
    now, model = runner.engine.stats().experts, runner.engine.model
    if now is None or model.routed is None:
        return row
    facts = model.routed.cache.manifest
    per_expert = facts.num_rows * facts.row_bytes
    per_token = len(facts.layers) * model.config.num_experts_per_token * per_expert
    wanted = sum(getattr(now, n) - getattr(then, n) for n in LOOKUPS)
    rows = now.num_neurons_wanted - then.num_neurons_wanted
    return row | {
        "slots": now.num_slots + round(now.pool_bytes / now.slot_bytes),
        "slots_mb": (now.num_slots * now.slot_bytes + now.pool_bytes) / 1e6,
        "expert_mb": per_expert / 1e6,
        "floor_ms": 1e3 * per_token / bytes_per_s,  # of a token that loads all that it needs
        "hit_rate": (now.num_hits - then.num_hits) / wanted,
        "partial_rate": (now.num_partial - then.num_partial) / wanted,
        "row_hit_rate": (now.num_neurons_there - then.num_neurons_there) / max(1, rows),
        "demand_mb": (now.demand_bytes - then.demand_bytes) / 1e6 / len(times),
        "prefetch_mb": (now.prefetch_bytes - then.prefetch_bytes) / 1e6 / len(times),
        "stall_ms": 1e3 * (now.stall_s - then.stall_s) / len(times),
        "link_busy": (now.link_busy_s - then.link_busy_s) / sum(times),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{'cache':>6} {'slots':>5} {'MB':>6} {'weights':>7} {'mode':24} {'ms/token':>9} "
        f"{'floor':>7} {'hits %':>7} {'part %':>7} {'rows %':>7} {'stall ms':>9} {'MB asked':>9} "
        f"{'MB ahead':>9} {'link %':>7}",
    ]
    for row in rows:
        text = f"{row['percent']:>5}% {row.get('slots', '-'):>5} "
        text += f"{row['slots_mb']:>6.1f}" if "slots" in row else f"{'-':>6}"
        text += f" {row['weights']:>7} {row['mode']:24} {row['token_ms']:>9.2f}"
        if "slots" in row:
            text += (
                f" {row['floor_ms']:>7.1f} {100 * row['hit_rate']:>7.1f} "
                f"{100 * row['partial_rate']:>7.1f} {100 * row['row_hit_rate']:>7.1f} "
                f"{row['stall_ms']:>9.2f} {row['demand_mb']:>9.2f} {row['prefetch_mb']:>9.2f} "
                f"{100 * row['link_busy']:>7.1f}"
            )
        lines.append(text)
    return [*lines, ""]
