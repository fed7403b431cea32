"""KV blocks gained by lending the tail of the pool to activations, against separate activations.

The first table is arithmetic: five published shapes in bf16 on three devices, with the byte counts
that the engine itself uses. The second is measured: the built-in model in the same memory in both
modes, 1,000 steps of prompts and answers that come and go; blocks, preemptions, and the peak of the
process's memory after 200 steps and after all.

    python -m benchmarks.memory.arena [--tokens 8192] [--skip-measured]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from typing import Literal

import torch

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.sizing import GPU_KV_FRACTION
from penstock.workers.memory.arena import BlockLayout
from penstock.workers.memory.workspace import activation_plan, logits_plan
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from penstock.workers.rope_config import RopeConfig

BF16 = torch.bfloat16
BLOCK_SIZE = 16
MAX_NUM_SEQS = 64
# GB of memory as the vendors state it
DEVICES = {"H200": 141e9, "A100": 80e9, "L4": 24e9}
NUM_STEPS = 1000
MEASURED_GB = 0.04


def shape(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, *,
    head_dim: int = 128, tied: bool = False, experts: int = 0, top_k: int = 0,
) -> ModelConfig:  # fmt: skip
    """A published model by its numbers; with experts, `inner` is one expert's."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
        ropes=(RopeConfig(theta=1e4, rotary_dim=head_dim),),
        sliding_window=(None,) * layers,
        num_experts=experts,
        num_experts_per_token=top_k,
        moe_intermediate_size=inner if experts else 0,
        moe_layers=(experts > 0,) * layers,
    )


MODELS = {
    "Llama-2-7B": shape(4096, 32, 32, 32, 11008, 32000),
    "Llama-3.1-8B": shape(4096, 32, 32, 8, 14336, 128256),
    "Qwen2.5-7B": shape(3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-0.5B": shape(896, 24, 14, 2, 4864, 151936, head_dim=64, tied=True),
    "OLMoE-1B-7B": shape(2048, 16, 16, 16, 1024, 50304, experts=64, top_k=8),
}


def weight_bytes(config: ModelConfig) -> int:
    """Of the matrices in bf16; norms and biases are too small to show."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    attention = hidden * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    mlp = 3 * hidden * config.intermediate_size * max(1, config.num_experts)
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return 2 * (config.num_layers * (attention + mlp + hidden * config.num_experts) + embeddings)


def num_blocks(config: ModelConfig, budget: float, reserve_tokens: int) -> int:
    """Blocks next to a reserve for steps of `reserve_tokens`, as the engine counts them."""
    layout = BlockLayout(config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim, BF16)
    reserve = activation_plan(config, BF16).bytes_for(reserve_tokens)
    reserve += logits_plan(config, BF16).bytes_for(MAX_NUM_SEQS)
    return int((budget - reserve) // layout.block_bytes)


def print_shapes(num_tokens: int) -> None:
    print(f"Arithmetic. bf16 weights and KV, blocks of {BLOCK_SIZE} tokens, {MAX_NUM_SEQS} "
          f"sequences, steps of up to {num_tokens} tokens,\n{GPU_KV_FRACTION:.0%} of what the "
          "weights leave.\n")  # fmt: skip
    print("| model | KiB a token | " + " | ".join(f"{d}, blocks" for d in DEVICES) + " |")
    print("|---|---|" + "---|" * len(DEVICES))
    for name, config in MODELS.items():
        per_token = activation_plan(config, BF16).bytes_for(num_tokens) / num_tokens / 2**10
        cells = []
        for memory in DEVICES.values():
            budget = (memory - weight_bytes(config)) * GPU_KV_FRACTION
            separate = num_blocks(config, budget, num_tokens)
            tail = num_blocks(config, budget, MAX_NUM_SEQS)
            cells.append(f"{separate:,} + {tail - separate:,} ({tail / separate - 1:.1%})")
        print(f"| {name} | {per_token:.1f} | {' | '.join(cells)} |")


def measure(mode: Literal["tail", "separate"]) -> dict[str, float]:
    """1,000 steps of the built-in model; which requests come is the same in both modes."""
    torch.set_num_threads(1)
    config = EngineConfig(
        kv_cache_gb=MEASURED_GB, activation_memory=mode, max_num_seqs=48, prefix_cache=False
    )
    engine = Engine(config, load_model("builtin", weights="fp32", progress=False))
    engine.arena.storage.fill_(0)  # every page is there from the start
    rng, num_added, peaks = random.Random(0), 0, []
    started = time.monotonic()
    while engine.stats().num_steps < NUM_STEPS:
        while len(engine._sequences) < 56:
            prompt = tuple(rng.randrange(3, 8000) for _ in range(rng.randint(16, 300)))
            params = SamplingParams(max_tokens=rng.randint(16, 150), temperature=0.0)
            engine.add(Request(f"r{num_added}", prompt, params))
            num_added += 1
        engine.step()
        if engine.stats().num_steps in (NUM_STEPS // 5, NUM_STEPS):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
    stats = engine.stats()
    return {
        "arena_mib": engine.arena.num_bytes / 2**20,
        "blocks": stats.num_blocks,
        "preemptions": stats.num_preemptions,
        "shortened": stats.num_shortened_steps,
        "generated": stats.num_generated_tokens,
        "computed": stats.num_prompt_tokens,
        "early_mib": peaks[0],
        "late_mib": peaks[-1],
        "seconds": time.monotonic() - started,
    }


def print_measured() -> None:
    """Each mode in a process of its own: the peak of a process never falls."""
    print(f"\nMeasured: `builtin`, fp32, {MEASURED_GB} GiB, {NUM_STEPS} steps, CPU, one thread.\n")
    print("| activations | arena, MiB | blocks | preemptions | shortened steps | answer tokens "
          "| prompt tokens computed | peak after 200 steps, MiB | after 1,000 |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for mode in ("separate", "tail"):
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory.arena", "--measure", mode],
            capture_output=True,
            check=True,
        )
        m = json.loads(child.stdout.splitlines()[-1])
        print(
            f"| {mode} | {m['arena_mib']:.1f} | {m['blocks']:,} | {m['preemptions']} "
            f"| {m['shortened']} | {m['generated']:,} | {m['computed']:,} | {m['early_mib']:.1f} "
            f"| {m['late_mib']:.1f} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192, help="largest step, in tokens")
    parser.add_argument("--skip-measured", action="store_true", help="the arithmetic only")
    parser.add_argument("--measure", choices=("tail", "separate"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
    else:
        print_shapes(args.tokens)
        if not args.skip_measured:
            print_measured()
