"""What the gate expects of a full worker, before and after one was full: `full_rate` by step costs.

A real engine on this CPU answers requests, a few at a time at first, then as many as it can. After
each phase: units a second that a full worker would do, by what steps cost so far and by slots over
the time of a step (what there was before), over those that it then did in the last phase.

    python -m benchmarks.gate.full_rate MODEL
    python -m benchmarks.gate.full_rate MODEL --weights int8 --phases 1 2 4 --seqs 32
"""

from __future__ import annotations

import argparse
import itertools
import random
import time

from penstock.deployments.gate.forecast.full_rate import (
    PROMPT_UNIT,
    MeanRequest,
    StepCosts,
    full_rate,
)
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.load import load_engine
from penstock.workers.request import Request, SamplingParams

NUMBERS = itertools.count()


def keep_busy(engine: Engine, at_once: int, seconds: float, chosen: random.Random) -> float:
    """Run `at_once` requests at a time for so long. Returns units of work a second."""
    units, running, began_s = 0.0, set[str](), time.perf_counter()
    while (took_s := time.perf_counter() - began_s) < seconds:
        while len(running) < at_once:
            name = str(next(NUMBERS))
            prompt = tuple(chosen.randrange(1000) for _ in range(chosen.randrange(50, 350)))
            limit = chosen.randrange(20, 180)
            params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
            engine.add(Request(name, prompt, params))
            running.add(name)
            units += PROMPT_UNIT * len(prompt)
        for delta in engine.step():
            units += len(delta.token_ids)
            if delta.finish_reason is not None:
                running.discard(delta.request_id)
    for name in running:
        engine.abort(name)
    while engine.has_work():
        engine.step()
    return units / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or built-in model")
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seqs", type=int, default=32, help="most requests at once")
    parser.add_argument("--blocks", type=int, default=2000, help="KV blocks of 16 tokens")
    parser.add_argument("--phases", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model, weights=args.weights, device="cpu", threads=args.threads,
        max_num_seqs=args.seqs, num_blocks=args.blocks, prefix_cache=False,
    )  # fmt: skip
    engine, chosen = load_engine(config), random.Random(1)
    usual = MeanRequest()
    usual.add(200, 100)
    keep_busy(engine, 1, 1.0, chosen)  # the first steps compile and allocate
    rows, before = [], engine.stats()
    for at_once in (*args.phases, args.seqs):
        done = keep_busy(engine, at_once, args.seconds, chosen)
        after = engine.stats()
        seconds = sum(after.step_seconds.values()) - sum(before.step_seconds.values())
        step_s = seconds / (after.num_steps - before.num_steps)
        costs = StepCosts.of(tuple(after.step_model.values()))
        assert costs is not None
        rows.append(
            (
                at_once,
                done,
                full_rate(costs, usual, step_s, capacity=16 * args.blocks, slots=args.seqs),
                args.seqs / step_s,
            )
        )
        before = after
    full = rows[-1][1]
    print("at once   units/s   by step costs   over full   slots / step   over full")
    for at_once, done, by_costs, by_slots in rows:
        print(
            f"{at_once:7}{done:10.0f}{by_costs:16.0f}{by_costs / full:12.2f}"
            f"{by_slots:15.0f}{by_slots / full:12.2f}"
        )


if __name__ == "__main__":
    main()
