"""KV formats under memory pressure: the same bytes and requests, in a pool that is too small.

    python -m benchmarks.memory.kv_formats [--out OUT]

A random model that computes in fp32, with 8 kv heads of 64 and two layers, so that no block is
rounded up. Every format gets a pool of the same bytes; `16 bit` is fp32 KV in twice the bytes: it
has the blocks that 16-bit KV would have, and costs no conversion on a CPU without bf16
instructions. Activations lie apart. Requests all come at once; rounds of all formats are
interleaved, and the best of each counts.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import record
from penstock.workers.config import EngineConfig, KvFormat, KvGroup
from penstock.workers.engine.engine import Engine
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import build_random
from penstock.workers.request import Request, SamplingParams
from penstock.workers.rope_config import RopeConfig

POOL_BYTES = 4 * 2**20
NUM_REQUESTS, PROMPT, ANSWER = 40, 48, 48
# kv, kv_group, pools of POOL_BYTES
FORMATS: dict[str, tuple[KvFormat, KvGroup, int]] = {
    "fp32": ("auto", "auto", 1),
    "16 bit": ("auto", "auto", 2),
    "int8 g8": ("int8", "8", 1),
    "int8 g32": ("int8", "32", 1),
    "int8 g64": ("int8", "64", 1),
    "fp8 g32": ("fp8", "32", 1),
}


def model() -> Decoder:
    config = ModelConfig(
        architecture="LlamaForCausalLM", model_type="llama", vocab_size=512, hidden_size=256,
        num_layers=2, num_heads=8, num_kv_heads=8, head_dim=64, intermediate_size=688,
        rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=512,
        ropes=(RopeConfig(10000.0, 64),), sliding_window=(None,) * 2, moe_layers=(False,) * 2,
        dtype="fp32",
    )  # fmt: skip
    return build_random(config, weights="fp32")


def run(decoder: Decoder, kind: str) -> dict[str, float]:
    kv, group, pools = FORMATS[kind]
    config = EngineConfig(num_blocks=1, kv=kv, kv_group=group, activation_memory="separate",
                          max_num_seqs=64, max_num_batched_tokens=256,
                          prefix_cache=False)  # fmt: skip
    probe = Engine(config, decoder)
    num_blocks = pools * POOL_BYTES // probe.arena.layout.block_bytes
    engine = Engine(replace(config, num_blocks=num_blocks), decoder)
    draw, running = random.Random(0), []
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    for i in range(NUM_REQUESTS):
        prompt = tuple(draw.randrange(1, 512) for _ in range(PROMPT))
        engine.add(Request(str(i), prompt, params))
    began = time.perf_counter()
    while engine.has_work():
        engine.step()
        if engine.scheduler.waiting:  # while there is a queue, the pool is what limits
            running.append(len(engine.scheduler.running))
    seconds, stats = time.perf_counter() - began, engine.stats()
    assert stats.num_generated_tokens == NUM_REQUESTS * ANSWER
    return {
        "block_bytes": stats.num_block_bytes,
        "blocks": stats.num_blocks,
        "peak": max(running),
        "mean": statistics.mean(running),
        "preemptions": stats.num_preemptions,
        "steps": stats.num_steps,
        "rate": stats.num_generated_tokens / seconds,
    }


def rows_of(best: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The runs with their factors against 16 bit, whose pool is computed with half its bytes."""
    base = best["16 bit"]
    rows = []
    for kind, row in best.items():
        size = row["block_bytes"] / (2 if kind == "16 bit" else 1)
        rows.append(
            {
                "format": kind,
                "block_bytes": size,
                "num_blocks": row["blocks"],
                "computed_factor": round(base["block_bytes"] / 2 / size, 2),
                "most_running": row["peak"],
                "mean_running": round(row["mean"], 1),
                "running_factor": round(row["mean"] / base["mean"], 2),
                "preemptions": row["preemptions"],
                "steps": row["steps"],
                "tokens_per_s": round(row["rate"]),
                "speed_factor": round(row["rate"] / base["rate"], 2),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| KV | bytes a block | blocks | computed factor | most running | mean running | factor | "
        "preemptions | steps | tokens/s | factor |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['format']} | {row['block_bytes']:.0f} | {row['num_blocks']} | "
            f"{row['computed_factor']:.2f} | {row['most_running']} | {row['mean_running']:.1f} | "
            f"{row['running_factor']:.2f} | {row['preemptions']} | {row['steps']} | "
            f"{row['tokens_per_s']} | {row['speed_factor']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    decoder = model()
    best: dict[str, dict[str, float]] = {}
    for _ in range(args.rounds):
        for kind in FORMATS:
            row = run(decoder, kind)
            if kind not in best or row["rate"] > best[kind]["rate"]:
                best[kind] = row
    head = (
        f"{NUM_REQUESTS} requests at once, {PROMPT} prompt + {ANSWER} answer tokens, a pool of "
        f"{POOL_BYTES / 2**20:.0f} MiB; one thread, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}; best of {args.rounds} interleaved rounds."
    )
    rows = rows_of(best)
    text = f"{head}\n\n{table(rows)}\n"
    print(text)
    if args.out is not None:
        args.out.with_suffix(".md").write_text(text)
        facts = {
            "requests": NUM_REQUESTS,
            "prompt_tokens": PROMPT,
            "answer_tokens": ANSWER,
            "pool_mib": POOL_BYTES / 2**20,
            "rounds": args.rounds,
            "load_average": os.getloadavg()[0],
        }
        path = args.out.with_suffix(".json")
        record.write(path, __file__, facts | {"rows": rows}, threads=1)


if __name__ == "__main__":
    main()
