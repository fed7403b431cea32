"""Checks for check.py that a row has the same bits in any batch: decoded or in a prompt, in chunks
of any length, in a linear or experts of any number of rows.

Exact: expected and actual are 0 and the number of elements that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps

import torch
from torch import Tensor

from benchmarks.gpu.attention import SCALE, Cache, make_cache
from benchmarks.gpu.cases import CUDA, DEVICE, Checks, Triples, Work, starts_of
from benchmarks.gpu.exact_dot import dot_by_elements
from benchmarks.gpu.kv import FP8, INT8, NAMES, quantise, roll_cache, with_scratch
from benchmarks.gpu.linear import WITH_PLAIN, GpuFormat, random_packed
from benchmarks.gpu.moe import packed
from benchmarks.gpu.sampling import FILTERS
from penstock.kernels import quant
from penstock.kernels.quant import Int8Rows
from penstock.kernels.triton import attention as attention_triton
from penstock.kernels.triton import kv_write as kv_triton
from penstock.kernels.triton import matmul as matmul_triton
from penstock.kernels.triton import moe as moe_triton
from penstock.kernels.triton import rowwise as rowwise_triton
from penstock.kernels.triton import rowwise_quant as rowwise_quant_triton
from penstock.kernels.triton import sampling as sampling_triton
from penstock.kernels.types import DecodeBatch, PrefillBatch, Rolling, SamplingRows

LENGTH = 1100 if CUDA else 330
EDGES = (0, 1, 16, 63, 64, 65, 127, 128, 200, 255, 256, 257, 319, 512, 769, LENGTH - 1)
POSITIONS = [position for position in EDGES if position < LENGTH]
FEW, MANY = [(0, 7), (60, 65), (63, 64), (255, 256), (250, 266)], [(120, 150), (190, LENGTH)]
Shape = tuple[int, int, int, int, int | None, torch.dtype | None, int]
# query heads a kv head, kv heads, head_dim, block_size, window, cache, values a scale
SHAPES: list[Shape] = [
    (1, 2, 64, 16, None, None, 0),
    (3, 1, 24, 5, None, INT8, 8),
    (2, 1, 128, 32, 100, None, 0),
    (2, 1, 80, 16, 300, INT8, 80),
    (2, 1, 64, 7, None, FP8, 64),
    (3, 1, 40, 1, 33, FP8, 8),
] + CUDA * [
    (8, 2, 128, 16, None, INT8, 8),
    (20, 1, 20, 128, 1, None, 0),
    (3, 1, 256, 16, 300, None, 0),
    (80, 1, 64, 16, None, None, 0),
]  # fmt: skip
NUM_ROLLED = 70 if CUDA else 5  # queries with sinks
INTERPRETED = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
INPUTS = 1100  # from 4 pieces of a sum to 2


def differences(case: str, actual: Tensor, expected: Tensor) -> Triples:
    """A NaN differs from all."""
    count = (actual != expected).sum().float()
    yield case, count.cpu(), torch.zeros(())


def shapes_of(dtype: torch.dtype) -> list[Shape]:
    """All on a GPU; the interpreter takes seconds for each, so there every third."""
    return SHAPES if CUDA else SHAPES[INTERPRETED[dtype] :: 3]


def by_elements(check: Callable[[torch.dtype], Triples]) -> Callable[[torch.dtype], Triples]:
    @wraps(check)
    def run(dtype: torch.dtype) -> Triples:
        with dot_by_elements():
            yield from check(dtype)

    return run


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def chunks_of(
    q: Tensor, cache: Cache, chunks: Sequence[tuple[int, int]], window: int | None,
    rolling: Rolling | None = None,
) -> Tensor:  # fmt: skip
    """Rows of `q`, all of one sequence, as chunks of one step."""
    counts = [last - first for first, last in chunks]
    tables = cache.tables.expand(len(chunks), -1).contiguous()
    ends = ints([last for _, last in chunks])
    batch = PrefillBatch(tables, starts_of(counts), ends, max(counts))
    return attention_triton.prefill_attention(
        q, cache.kv, batch, SCALE, window, torch.empty_like(q), rolling
    )


def decoded(
    q: Tensor, cache: Cache, positions: Sequence[int], window: int | None,
    rolling: Rolling | None = None,
) -> Tensor:  # fmt: skip
    """The same as decode rows."""
    tables = cache.tables.expand(len(positions), -1).contiguous()
    batch = DecodeBatch(tables, ints(positions) + 1, max(positions) + 1)
    return attention_triton.decode_attention(
        q, cache.kv, batch, SCALE, window, torch.empty_like(q), rolling
    )


@by_elements
def check_attention(dtype: torch.dtype) -> Triples:
    for group, kv_heads, dim, block_size, window, stored, values in shapes_of(dtype):
        cache = make_cache([LENGTH], kv_heads, dim, block_size, dtype)
        if stored is not None:
            cache = quantise(cache, stored, values)
        q = torch.randn(LENGTH, group * kv_heads, dim, device=DEVICE).to(dtype)
        whole = chunks_of(q, cache, [(0, LENGTH)], window)
        case = f"group {group} dim {dim} window {window}"
        case += f" {NAMES[stored]} by {values}" if stored is not None else ""
        yield from differences(f"{case}: decoded", decoded(q[POSITIONS], cache, POSITIONS, window),
                               whole[POSITIONS])  # fmt: skip
        for kind, chunks in (("few", FEW), ("many", MANY)):
            rows = torch.cat([torch.arange(first, last) for first, last in chunks]).to(DEVICE)
            y = chunks_of(q[rows], cache, chunks, window)
            yield from differences(f"{case}: {kind} rows", y, whole[rows])


@by_elements
def check_rolled(dtype: torch.dtype) -> Triples:
    """Sinks and a window, whole, with the last block in scratch, and quantised."""
    count = NUM_ROLLED
    positions = list(range(LENGTH - count, LENGTH))
    for kind, window in (("plain", None), ("scratch", 40), ("int8", None)):
        q = torch.randn(count, 3, 64, device=DEVICE).to(dtype)
        cache, rolling = roll_cache([LENGTH], 1, 64, dtype, q, [count], window=LENGTH - 150)
        if kind == "scratch":
            kept = replace(cache, lens=cache.lens - 16 * rolling.bases)
            cache = replace(with_scratch(kept), lens=cache.lens)
        if kind == "int8":
            cache = quantise(cache, INT8, 8)
        together = chunks_of(q, cache, [(LENGTH - count, LENGTH)], window, rolling)
        alone = replace(
            rolling,
            sink_blocks=rolling.sink_blocks.expand(count).contiguous(),
            bases=rolling.bases.expand(count).contiguous(),
        )
        yield from differences(
            f"{kind}, window {window}", decoded(q, cache, positions, window, alone), together
        )


def check_linear(format: GpuFormat, dtype: torch.dtype) -> Triples:
    """Rows of a large batch alone and among few; each piece by its own program, and all by one."""
    if not CUDA and format != "int4" and dtype != torch.float16:
        return
    with dot_by_elements():
        weight = random_packed(format, 50, INPUTS, dtype)
        x = torch.randn(70, INPUTS, device=DEVICE).to(dtype)
        ways: list[bool | None] = [False, True] if format == "fp8" and not CUDA else [None]
        for fp8_units in ways:
            whole = matmul_triton.linear(x, weight, fp8_units=fp8_units)
            for first, last, apart in ((0, 70, True), (5, 6, True), (6, 7, False), (50, 70, True)):
                rows = x[first:last]
                tiles = matmul_triton.tiles_for(weight, last - first, rows)
                tiles = replace(tiles, apart=apart)
                y = matmul_triton.linear(rows, weight, tiles=tiles, fp8_units=fp8_units)
                case = f"{format} {last - first} rows, pieces {'apart' if apart else 'together'}"
                yield from differences(case, y, whole[first:last])


def check_experts(format: GpuFormat, dtype: torch.dtype) -> Triples:
    """Tokens of a batch alone and among few."""
    if not CUDA and format != ("plain" if dtype == torch.float16 else "nf4"):
        return
    hidden, inner, num_experts, num_tokens = 520, 60, 3, 24
    with dot_by_elements():
        pairs = [
            [packed(random_packed(format, *shape, dtype)) for shape in
             ((2 * inner, hidden), (hidden, inner))] for _ in range(num_experts)
        ]  # fmt: skip
        table = moe_triton.expert_table([(gate_up, down) for gate_up, down in pairs])
        x = torch.randn(num_tokens, hidden, device=DEVICE).to(dtype)
        ids = torch.rand(num_tokens, num_experts, device=DEVICE).topk(2).indices
        gains = torch.rand(num_tokens, 2, device=DEVICE)
        outs = []
        for first, last in ((0, num_tokens), (7, 8), (20, 24)):
            some = slice(first, last)
            grouped = x.new_empty(2 * (last - first), hidden)
            memory = x.new_empty(2 * (last - first), 2 * inner)
            arguments = (x[some], ids[some], gains[some], table, grouped, memory)
            outs.append(moe_triton.moe_mlp(*arguments, torch.empty_like(x[some])))
        yield from differences(f"{format} 1 token", outs[1], outs[0][7:8])
        yield from differences(f"{format} 4 tokens", outs[2], outs[0][20:24])


def check_rowwise(dtype: torch.dtype) -> Triples:
    """Norms, gates, codes and what is written to the cache, of 9 rows and of each alone."""
    for dim in (63, 500, 4096) if CUDA else (63, 500):
        x, residual = torch.randn(2, 9, dim, device=DEVICE).to(dtype)
        weight = torch.randn(dim, device=DEVICE).to(dtype)
        made = [_rowwise(x[rows], residual[rows], weight) for rows in _parts(9)]
        for name in made[0]:
            alone = torch.cat([one[name] for one in made[1:]])
            yield from differences(f"{name} of {dim}", made[0][name], alone)
    qkv, angle = torch.randn(9, 6, 64, device=DEVICE).to(dtype), torch.randn(9, 32, device=DEVICE)
    caches = []
    for parts in (_parts(9)[:1], _parts(9)[1:]):
        cache = quantise(make_cache([1], 2, 64, 16, dtype, spare_blocks=9), INT8, 8)
        cache.kv.k.zero_(), cache.kv.v.zero_()
        for rows in parts:
            q, k, v = qkv[rows].clone().split(2, 1)
            slots = torch.arange(9, device=DEVICE)[rows] * 7
            kv_triton.rope_write_kv(q, k, v, angle[rows].cos(), angle[rows].sin(), cache.kv, slots)
        caches.append(torch.cat([cache.kv.k, cache.kv.v]))
    yield from differences("codes of keys and values", *caches)


def _parts(num_rows: int) -> list[slice]:
    """All rows, and then each."""
    return [slice(None), *(slice(i, i + 1) for i in range(num_rows))]


def _rowwise(x: Tensor, residual: Tensor, weight: Tensor) -> dict[str, Tensor]:
    y, total = rowwise_triton.rms_norm(x, weight, 1e-5, residual, torch.empty_like(x))
    codes = torch.empty(x.shape, dtype=torch.int8, device=DEVICE)
    scales = torch.empty(len(x), quant.num_groups(x.shape[1], quant.INT8_GROUP), device=DEVICE)
    rows = Int8Rows(codes, scales, quant.INT8_GROUP, x.dtype)
    rowwise_quant_triton.rms_norm_int8(x, weight, 1e-5, residual, rows, torch.empty_like(x))
    gate_up = torch.cat((x, residual), 1)
    gated = rowwise_triton.act_mul(gate_up, torch.empty_like(x))
    return {"norm": y, "sum": total, "codes": codes, "scales": rows.scales, "gate": gated}


def check_sampling(dtype: torch.dtype) -> Triples:
    """Rows with all kinds of filters together, and each alone."""
    if dtype != torch.float32:
        return
    for vocab in (503, 4099):
        columns = [torch.tensor(c, dtype=torch.float64) for c in zip(*FILTERS.values())]
        columns.append(torch.rand(len(FILTERS), dtype=torch.float64))
        logits = torch.randn(len(FILTERS), vocab, device=DEVICE) * 3
        ids = [
            sampling_triton.sample(logits[rows], SamplingRows(*(c[rows] for c in columns)))
            for rows in _parts(len(FILTERS))
        ]
        yield from differences(f"ids of {vocab}", ids[0], torch.cat(ids[1:]))


CHECKS: Checks = {
    "order: attention": check_attention,
    "order: rolled KV": check_rolled,
    **{f"order: linear {format}": partial(check_linear, format) for format in WITH_PLAIN},
    **{f"order: experts {format}": partial(check_experts, format) for format in WITH_PLAIN},
    "order: rows": check_rowwise,
    "order: sampling": check_sampling,
}


def works(tiny: bool) -> Iterator[Work]:
    """Nothing is timed here."""
    return iter(())
