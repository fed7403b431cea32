"""A GGUF file with its codes kept, and decoded to bf16: prefill and decode, in turns.

    python -m benchmarks.engine.gguf_speed --json out.json

One process holds both engines, and each round measures one after the other, so that the machine's
pace of the minute falls on both; the figures are medians over the rounds, the ratio that of each
round. Prefill: one prompt of 512 tokens. Decode: 64 tokens of one request, and of 16 at once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import record
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from penstock.workers.weights.hub import resolve_model

FORMATS = ("auto", "bf16")
PROMPT, NEW, BATCH = 512, 64, 16


def tokens_per_second(engine: Engine, prompts: Sequence[Sequence[int]], num_new: int) -> float:
    """Of prefill where one token is asked for; else of decode, from the step on in which every
    request has its first token."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    start_s = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"r{i}", tuple(prompt), params))
    started, after = set[str](), 0
    while engine.has_work():
        deltas = engine.step()
        if len(started) == len(prompts):
            after += sum(len(delta.token_ids) for delta in deltas)
            continue
        started |= {delta.request_id for delta in deltas if delta.token_ids}
        if len(started) == len(prompts) and num_new > 1:
            start_s = time.perf_counter()
    total = after if num_new > 1 else sum(map(len, prompts))
    return total / (time.perf_counter() - start_s)


def measure(engine: Engine, vocab: int, seed: int) -> dict[str, float]:
    """One round of one engine, tokens per second."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab) for _ in range(PROMPT)] for _ in range(BATCH)]
    short = [prompt[:16] for prompt in prompts]
    return {
        "prefill": tokens_per_second(engine, prompts[:1], 1),
        "decode": tokens_per_second(engine, short[:1], NEW),
        "decode of 16": tokens_per_second(engine, short, NEW),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    file = resolve_model(args.model)
    config = EngineConfig(num_blocks=160, max_num_batched_tokens=512, prefix_cache=False)
    engines, sizes, vocab = {}, {}, 0
    for format in FORMATS:
        decoder = load_model(file, weights=format, progress=False)
        engines[format], vocab = Engine(config, decoder), decoder.config.vocab_size
        sizes[format] = round(decoder.weights.num_bytes / 2**20, 1)
        measure(engines[format], vocab, 0)  # warm-up
    rounds: list[dict[str, dict[str, float]]] = []
    for seed in range(args.rounds):
        order = FORMATS if seed % 2 else FORMATS[::-1]
        rounds.append({each: measure(engines[each], vocab, seed) for each in order})
    rows: list[dict[str, Any]] = []
    for name in rounds[0]["auto"]:
        ratios = [each["auto"][name] / each["bf16"][name] for each in rounds]
        medians = {
            format: round(statistics.median(each[format][name] for each in rounds), 1)
            for format in FORMATS
        }
        rows.append(
            {
                "work": name,
                "kept_tokens_per_s": medians["auto"],
                "bf16_tokens_per_s": medians["bf16"],
                "ratio": round(statistics.median(ratios), 3),
                "ratio_least": round(min(ratios), 3),
                "ratio_greatest": round(max(ratios), 3),
            }
        )
        print(rows[-1], flush=True)
    results = {"file": file.name, "rounds": args.rounds, "rows": rows,
               "weights_mib": {"kept": sizes["auto"], "bf16": sizes["bf16"]}}  # fmt: skip
    print(results["weights_mib"])
    if args.json:
        record.write(args.json, __file__, results, threads=args.threads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
