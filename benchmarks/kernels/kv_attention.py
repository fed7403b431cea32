"""Attention over int8 and fp8 KV against KV as the model computes, on this CPU: ratios in one run.

    python -m benchmarks.kernels.kv_attention [--contexts 512,4096] [--heads 14,2] [--head-dim 64]

Decode: one query a sequence, as many sequences as make the cache larger than the processor's own
caches. Prefill: a chunk of 256 at the end of the context. Write: 512 tokens with RoPE, in one pass
and in two. The best of interleaved rounds each.
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
from penstock.kernels.types import DecodeBatch, KvScales, PagedKv, PrefillBatch

BLOCK_SIZE, CHUNK, ROUNDS, KEYS = 16, 256, 9, 131072
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
    kv: PagedKv
    tables: Tensor
    lens: Tensor


def build(kind: str, context: int, batch: int, heads: tuple[int, int], dim: int) -> Case:
    dtype, group = FORMATS[kind]
    num_heads, num_kv_heads = heads
    per_sequence = -(-context // BLOCK_SIZE)
    shape = (batch * per_sequence, num_kv_heads, BLOCK_SIZE, dim)
    model_dtype = torch.float32 if group else dtype
    scales = None
    if group:
        cache = tuple(torch.randint(0, 120, shape, dtype=torch.uint8).view(dtype) for _ in "kv")
        each = [torch.full((*shape[:3], dim // group), 0.01, dtype=torch.float16) for _ in "kv"]
        scales = KvScales(each[0], each[1])
    else:
        cache = tuple(torch.randn(shape).to(dtype) for _ in "kv")
    tables = torch.randperm(shape[0]).to(torch.int32).view(batch, per_sequence)
    lens = torch.full((batch,), context, dtype=torch.int32)
    q = torch.randn(max(batch, CHUNK), num_heads, dim).to(model_dtype)
    return Case(q, PagedKv(cache[0], cache[1], scales), tables, lens)


def best(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    seconds = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def decode(case: Case) -> Tensor:
    batch = len(case.lens)
    return attention.decode_attention(
        case.q[:batch],
        case.kv,
        DecodeBatch(case.tables, case.lens, int(case.lens[0])),
        scale=SCALE,
    )


def prefill(case: Case) -> Tensor:
    starts = torch.tensor([0, CHUNK], dtype=torch.int32)
    chunk = PrefillBatch(case.tables[:1], starts, case.lens[:1], CHUNK)
    return attention.prefill_attention(case.q[:CHUNK], case.kv, chunk, scale=SCALE)


def write(case: Case, num_tokens: int, one_pass: bool) -> Callable[[], object]:
    num_kv_heads, dim = case.kv.k.shape[1], case.kv.k.shape[3]
    num_heads = case.q.shape[1]
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, dim).to(case.q.dtype)
    q, k, v = qkv.split_with_sizes([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = torch.ones(num_tokens, dim // 2), torch.zeros(num_tokens, dim // 2)
    slots = torch.arange(num_tokens)

    def once() -> None:
        if one_pass:
            attention.rope_write_kv(q, k, v, cos, sin, case.kv, slots)
        else:
            rope_(q, k, cos, sin)
            attention.write_kv(k, v, case.kv, slots)

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", default="512,4096,16384")
    parser.add_argument("--heads", default="14,2", help="query heads, kv heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    num_heads, num_kv_heads = map(int, args.heads.split(","))
    heads = num_heads, num_kv_heads
    formats = [k for k, (_, group) in FORMATS.items() if not group or args.head_dim % group == 0]
    print(f"{torch.get_num_threads()} threads, {args.heads} heads of {args.head_dim}; ms, and x of")
    print(f"{'':24}" + "".join(f"{kind:>18}" for kind in formats))
    rows: list[dict[str, Any]] = []
    contexts = list(map(int, args.contexts.split(",")))
    for context in contexts:
        batch = max(1, KEYS // context)
        cases = {kind: build(kind, context, batch, heads, args.head_dim) for kind in formats}
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
        shape = {"query_heads": num_heads, "kv_heads": num_kv_heads, "head_dim": args.head_dim}
        content = shape | {"block_size": BLOCK_SIZE, "rounds": ROUNDS, "rows": rows}
        record.write(args.json, __file__, content, threads=args.threads)


def report(name: str, runs: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """Run and print one line -> the row of the result file, in milliseconds."""
    seconds = best(runs)
    cells = [f"{s * 1e3:9.3f} {seconds['fp32'] / s:5.2f}x " for s in seconds.values()]
    print(f"{name:24}" + "  ".join(cells), flush=True)
    return {"work": name, "ms": {kind: 1e3 * s for kind, s in seconds.items()}}


if __name__ == "__main__":
    main()
