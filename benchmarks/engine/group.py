"""Time of a decode step and of a prompt: one process, two ranks, and two pipeline stages.

Four engines take turns; medians over three rounds, prompts of 100 tokens, greedy.

    python -m benchmarks.engine.group --model FILE
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Literal

import torch

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.load import load_engine
from penstock.workers.request import Request, SamplingParams

# Name, ranks, stages, threads of all of them
KINDS = (
    ("1 process, 1 thread", 1, 1, 1),
    ("1 process, 2 threads", 1, 1, 2),
    ("2 ranks", 2, 1, 2),
    ("2 stages", 1, 2, 2),
)
Weights = Literal["bf16", "int8"]
FORMATS: tuple[Weights, ...] = ("bf16", "int8")
ROUNDS, PROMPT, NEW, LONG = 3, 100, 48, 512


def step_ms(engine: Engine, batch: int) -> float:
    """Median of the steps in which all of `batch` requests decode."""
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    for i in range(batch):
        engine.add(Request(f"r{i}", tuple(range(5 + i, 5 + i + PROMPT)), params))
    times = []
    while engine.has_work():
        began_s = time.perf_counter()
        num_new = sum(len(delta.token_ids) for delta in engine.step())
        if num_new == batch:
            times.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(times[2:])


def prompt_ms(engine: Engine) -> float:
    """Until the first token after a prompt of LONG tokens, in steps of as many."""
    ids = tuple(5 + i % 200 for i in range(LONG))
    engine.add(Request("p", ids, SamplingParams(max_tokens=1, temperature=0)))
    began_s = time.perf_counter()
    while engine.has_work():
        engine.step()
    return 1e3 * (time.perf_counter() - began_s)


def engine_of(model: str, weights: Weights, ranks: int, stages: int, threads: int) -> Engine:
    return load_engine(
        EngineConfig(
            model=model, weights=weights, tensor_parallel_size=ranks, device="cpu",
            pipeline_parallel_size=stages, threads=threads, num_blocks=256, max_num_seqs=8,
            max_num_batched_tokens=LONG, prefix_cache=False,
        )
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder, GGUF file or built-in model")
    args = parser.parse_args()
    measures = {
        "1 request, ms a step": lambda engine: step_ms(engine, 1),
        "8 requests, ms a step": lambda engine: step_ms(engine, 8),
        f"a prompt of {LONG} tokens, ms": prompt_ms,
    }
    for weights in FORMATS:
        engines = {kind[0]: engine_of(args.model, weights, *kind[1:]) for kind in KINDS}
        for what, measure in measures.items():
            times: dict[str, list[float]] = {}
            for _ in range(ROUNDS):
                for name, ranks, stages, threads in KINDS:
                    torch.set_num_threads(threads // (ranks * stages))
                    times.setdefault(name, []).append(measure(engines[name]))
            text = ", ".join(f"{name} {statistics.median(ms):.1f}" for name, ms in times.items())
            print(f"{weights}, {what}: {text}", flush=True)
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
