"""Time of a decode step: one process with one thread and with two, and a group of two processes.

Three engines take turns; medians over three rounds, prompts of 100 tokens, greedy.

    python -m benchmarks.engine.group --model FILE
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.load import load_engine
from penstock.workers.request import Request, SamplingParams

# Name, processes, threads of all of them
KINDS = (("1 process, 1 thread", 1, 1), ("1 process, 2 threads", 1, 2), ("2 processes", 2, 2))
ROUNDS, PROMPT, NEW = 3, 100, 48


def step_ms(engine: Engine, batch: int) -> float:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder, GGUF file or built-in model")
    args = parser.parse_args()
    for weights in ("bf16", "int8"):
        engines = {
            name: load_engine(
                EngineConfig(
                    model=args.model, weights=weights, tensor_parallel_size=ranks, device="cpu",
                    threads=threads, num_blocks=256, max_num_seqs=8, max_num_batched_tokens=256,
                    prefix_cache=False,
                )
            )
            for name, ranks, threads in KINDS
        }  # fmt: skip
        for batch in (1, 8):
            times: dict[str, list[float]] = {}
            for _ in range(ROUNDS):
                for name, ranks, threads in KINDS:
                    torch.set_num_threads(threads // ranks)
                    times.setdefault(name, []).append(step_ms(engines[name], batch))
            text = ", ".join(f"{name} {statistics.median(ms):.1f}" for name, ms in times.items())
            print(f"{weights}, {batch} requests, ms a step: {text}")
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
