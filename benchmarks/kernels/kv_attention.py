"""Attention over int8 and fp8 KV against KV as the model computes, on this CPU: ratios in one run.

    python -m benchmarks.kernels.kv_attention [--contexts 512,4096] [--heads 14,2] [--head-dim 64]

The cache is an arena of many layers, as the engine has it; queries are in bf16, but for KV in fp32.
Decode: one query a sequence, in all layers in turn, whose KV is larger than the processor's caches.
Prefill: a chunk of 256 at the end of the context, in one layer. Write: 1 and 512 tokens with RoPE,
in one pass and in two. The best of interleaved rounds each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import record
from penstock.kernels import attention
from penstock.kernels.rowwise import rope_
from penstock.kernels.types import DecodeBatch, PagedKv, PrefillBatch
from penstock.workers.memory.arena import Arena, BlockLayout

BLOCK_SIZE, CHUNK, ROUNDS, KEYS = 16, 256, 9, 16384
SCALE = 0.125
FORMATS: dict[str, tuple[torch.dtype, int | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "int8 g8": (torch.int8, 8),
    "int8 g32": (torch.int8, 32),
    "int8 g64": (torch.int8, 64),
    "fp8 g32": (torch.float8_e4m3fn, 32),
}


@dataclass
class Case:
    """A cache full of random numbers in one format, and the queries for it."""

    q: Tensor
    layers: list[PagedKv]
    tables: Tensor
    lens: Tensor


def build(
    kind: str, num_layers: int, context: int, batch: int, heads: tuple[int, int], dim: int
) -> Case:
    dtype, group = FORMATS[kind]
    num_heads, num_kv_heads = heads
    per_sequence = -(-context // BLOCK_SIZE)
    layout = BlockLayout(num_layers, num_kv_heads, BLOCK_SIZE, dim, dtype, group)
    num_blocks = batch * per_sequence
    layers = Arena(layout, num_blocks, torch.device("cpu")).kv_layers()
    for kv in layers:
        if kv.scales is None:
            kv.k.normal_()
            kv.v.normal_()
            continue
        for codes, scales in ((kv.k, kv.scales.k), (kv.v, kv.scales.v)):
            codes.view(torch.uint8).random_(0, 120)
            scales.fill_(0.01)
    tables = torch.randperm(num_blocks).to(torch.int32).view(batch, per_sequence)
    lens = torch.full((batch,), context, dtype=torch.int32)
    q = torch.randn(max(batch, CHUNK), num_heads, dim)
    return Case(q if dtype == torch.float32 else q.bfloat16(), layers, tables, lens)


def best(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    seconds = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def decode(case: Case) -> None:
    batch = len(case.lens)
    each = DecodeBatch(case.tables, case.lens, int(case.lens[0]))
    for kv in case.layers:
        attention.decode_attention(case.q[:batch], kv, each, scale=SCALE)


def prefill(case: Case) -> None:
    starts = torch.tensor([0, CHUNK], dtype=torch.int32)
    chunk = PrefillBatch(case.tables[:1], starts, case.lens[:1], CHUNK)
    attention.prefill_attention(case.q[:CHUNK], case.layers[0], chunk, scale=SCALE)


def write(case: Case, num_tokens: int, one_pass: bool) -> Callable[[], object]:
    kv = case.layers[0]
    num_kv_heads, dim = kv.k.shape[1], kv.k.shape[3]
    num_heads = case.q.shape[1]
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, dim).to(case.q.dtype)
    q, k, v = qkv.split_with_sizes([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = torch.ones(num_tokens, dim // 2), torch.zeros(num_tokens, dim // 2)
    slots = torch.arange(num_tokens)

    def once() -> None:
        if one_pass:
            attention.rope_write_kv(q, k, v, cos, sin, kv, slots)
        else:
            rope_(q, k, cos, sin)
            attention.write_kv(k, v, kv, slots)

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", default="512,4096,16384")
    parser.add_argument("--heads", default="14,2", help="query heads, kv heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    num_heads, num_kv_heads = map(int, args.heads.split(","))
    heads = num_heads, num_kv_heads
    formats = [k for k, (_, group) in FORMATS.items() if not group or args.head_dim % group == 0]
    print(f"{args.threads} threads, {args.layers} layers, {args.heads} heads of {args.head_dim}")
    print(f"{'ms, and x of fp32':24}" + "".join(f"{kind:>18}" for kind in formats))
    rows: list[dict[str, Any]] = []
    contexts = list(map(int, args.contexts.split(",")))
    for context in contexts:
        batch = max(1, KEYS // context)
        cases = {
            kind: build(kind, args.layers, context, batch, heads, args.head_dim) for kind in formats
        }
        runs: dict[str, Callable[[], object]]
        runs = {kind: partial(decode, case) for kind, case in cases.items()}
        rows.append(report(f"decode {batch} x {context}", runs))
        if context == contexts[0]:
            runs = {kind: partial(prefill, case) for kind, case in cases.items()}
            rows.append(report(f"prefill {CHUNK} of {context}", runs))
    for num_tokens in (1, 512):
        for one_pass in (False, True):
            runs = {k: write(c, num_tokens, one_pass) for k, c in cases.items()}
            rows.append(report(f"rope, write {num_tokens}{', one pass' * one_pass}", runs))
    if args.json:
        content = {"query_heads": num_heads, "kv_heads": num_kv_heads, "head_dim": args.head_dim}
        content |= {"layers": args.layers, "block_size": BLOCK_SIZE, "rounds": ROUNDS, "rows": rows}
        record.write(args.json, __file__, content, threads=args.threads)


def report(name: str, runs: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """Run and print one line -> the row of the result file, in milliseconds."""
    seconds = best(runs)
    cells = [f"{s * 1e3:9.3f} {seconds['fp32'] / s:5.2f}x " for s in seconds.values()]
    print(f"{name:24}" + "  ".join(cells), flush=True)
    return {"work": name, "ms": {kind: 1e3 * s for kind, s in seconds.items()}}


if __name__ == "__main__":
    main()
