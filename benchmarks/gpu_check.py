"""Is every Triton kernel right here, and how far is it from what the card allows?

    python benchmarks/gpu_check.py [--json PATH]

Prints one table: each kernel against its fp32 reference, then, on a CUDA card, its time on 7-8B
shapes over its roofline floor: the larger of bytes / measured bandwidth and FLOPs / measured matmul
rate. Without a card the first half runs in Triton's interpreter on the same small shapes, and it
says so. Exit code 0 only if every kernel is right. Needs neither Ray nor a model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, hence before the kernels

import triton  # noqa: E402

from penstock.kernels import attention_torch, attention_triton, rowwise, rowwise_triton  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
# The interpreter multiplies the raw bits of bf16 matrices, so there fp16 stands for both.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SCALE = 0.125


@dataclass(frozen=True)
class Finding:
    """One line of the correctness table. `error` is the largest deviation over 1 + |expected|."""

    kernel: str
    case: str
    dtype: str
    error: float
    tolerance: float
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure and self.error <= self.tolerance  # a NaN is not


@dataclass(frozen=True)
class Timing:
    """One line of the speed table, in microseconds."""

    kernel: str
    case: str
    time_us: float
    floor_us: float
    bound: str

    @property
    def over_floor(self) -> float:
        return self.time_us / self.floor_us


@dataclass(frozen=True)
class Cache:
    """One layer of a block-major arena with shuffled blocks; what nobody wrote is NaN."""

    k: Tensor
    v: Tensor
    tables: Tensor
    lens: Tensor


def make_cache(
    lens: Sequence[int],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    num_layers: int = 3,
    spare_blocks: int = 3,
) -> Cache:
    counts = [-(-n // block_size) for n in lens]
    num_blocks = sum(counts) + spare_blocks
    shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
    arena = torch.empty(shape, dtype=dtype, device=DEVICE)
    k, v = arena[:, num_layers // 2, 0], arena[:, num_layers // 2, 1]
    k.fill_(float("nan")), v.fill_(float("nan"))
    # From the top, so that a cache with many spare blocks is used at its far end.
    ids = (num_blocks - 1 - torch.randperm(sum(counts) + 3)[: sum(counts)]).to(torch.int32)
    tables = torch.randint(-(2**31), 2**31 - 1, (len(lens), max(counts) + 1), dtype=torch.int32)
    for b, mine in enumerate(ids.split(counts)):
        tables[b, : len(mine)] = mine
        at = torch.arange(lens[b])
        blocks, offsets = mine[at // block_size].long().to(DEVICE), (at % block_size).to(DEVICE)
        for cache in (k, v):
            rows = torch.randn(lens[b], num_kv_heads, head_dim, device=DEVICE)
            cache[blocks, :, offsets] = rows.to(dtype)
    lens_tensor = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    return Cache(k, v, tables.to(DEVICE), lens_tensor)


def starts_of(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lens], device=DEVICE).cumsum(0).to(torch.int32)


def run_decode(q: Tensor, cache: Cache, window: int | None, max_len: int) -> Tensor:
    return attention_triton.decode_attention(
        q, cache.k, cache.v, cache.tables, cache.lens, SCALE, window, max_len, torch.empty_like(q)
    )


def run_prefill(q: Tensor, cache: Cache, lens: Sequence[int], window: int | None) -> Tensor:
    return attention_triton.prefill_attention(
        q, cache.k, cache.v, cache.tables, starts_of(lens), cache.lens, SCALE, window, max(lens),
        torch.empty_like(q),
    )  # fmt: skip


# ---- correctness: each check gives (case, actual, expected) triples -----------------------------

Triples = Iterator[tuple[str, Tensor, Tensor]]
# query heads a kv head, kv heads, head_dim, block_size, window
ATTENTION_SHAPES = [
    (1, 2, 64, 16, None),
    (7, 2, 64, 16, None),
    (8, 1, 128, 32, 100),
    (2, 2, 80, 1, 16),
    (4, 2, 128, 16, None),
    (20, 1, 20, 128, 1),
    (3, 1, 256, 16, 300),
]


def check_decode(dtype: torch.dtype) -> Triples:
    lens = [1, 15, 16, 17, 63, 257, 500]
    for group, num_kv_heads, dim, block_size, window in ATTENTION_SHAPES:
        cache = make_cache(lens, num_kv_heads, dim, block_size, dtype)
        q = torch.randn(len(lens), group * num_kv_heads, dim, device=DEVICE).to(dtype)
        expected = attention_torch.attention_reference(
            q, cache.k, cache.v, cache.tables, starts_of([1] * len(lens)), cache.lens,
            scale=SCALE, window=window,
        )  # fmt: skip
        case = f"group {group} dim {dim} block {block_size} window {window}"
        yield case, run_decode(q, cache, window, max(lens)), expected


def check_prefill(dtype: torch.dtype) -> Triples:
    lens, chunks = [1, 16, 17, 63, 200], [1, 15, 17, 40, 33]
    for group, num_kv_heads, dim, block_size, window in ATTENTION_SHAPES:
        cache = make_cache(lens, num_kv_heads, dim, block_size, dtype)
        q = torch.randn(sum(chunks), group * num_kv_heads, dim, device=DEVICE).to(dtype)
        expected = attention_torch.attention_reference(
            q, cache.k, cache.v, cache.tables, starts_of(chunks), cache.lens,
            scale=SCALE, window=window,
        )  # fmt: skip
        case = f"group {group} dim {dim} block {block_size} window {window}"
        yield case, run_prefill(q, cache, chunks, window), expected


def check_far_blocks(dtype: torch.dtype) -> Triples:
    """Block offsets past 2^31 elements: a 32-bit product would wrap around."""
    if not CUDA or dtype == torch.float32 or torch.cuda.mem_get_info()[0] < 8 << 30:
        return
    num_layers, block_size, dim = 64, 16, 64
    blocks = (2**31 + 2**28) // (num_layers * 2 * block_size * dim)
    cache = make_cache([33, 20], 1, dim, block_size, dtype, num_layers, blocks)
    q = torch.randn(2, 4, dim, device=DEVICE).to(dtype)
    expected = attention_torch.attention_reference(
        q, cache.k, cache.v, cache.tables, starts_of([1, 1]), cache.lens, scale=SCALE
    )
    yield "decode", run_decode(q, cache, None, 33), expected
    yield "prefill", run_prefill(q, cache, [1, 1], None), expected


def check_write_kv(dtype: torch.dtype) -> Triples:
    for num_kv_heads, dim, block_size in ((3, 20, 4), (8, 128, 16), (1, 64, 1)):
        qkv = torch.randn(33, 3 * num_kv_heads, dim, device=DEVICE).to(dtype)
        k, v = qkv[:, num_kv_heads : 2 * num_kv_heads], qkv[:, 2 * num_kv_heads :]
        slots = torch.randperm(40 * block_size, device=DEVICE)[:33]
        slots[::5] = -1
        arena = torch.zeros(40, 3, 2, num_kv_heads, block_size, dim, device=DEVICE).to(dtype)
        expected = arena.clone()
        attention_triton.write_kv(k, v, arena[:, 1, 0], arena[:, 1, 1], slots)
        kept = slots >= 0
        blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
        expected[:, 1, 0][blocks, :, offsets] = k[kept]
        expected[:, 1, 1][blocks, :, offsets] = v[kept]
        yield f"heads {num_kv_heads} dim {dim} block {block_size}", arena, expected


def check_rms_norm(dtype: torch.dtype) -> Triples:
    for rows, dim in ((1, 1), (3, 63), (33, 500), (2, 4096)):
        x, residual = torch.randn(2, rows, dim, device=DEVICE).to(dtype)
        weight = torch.randn(dim, device=DEVICE).to(dtype)
        y = rowwise_triton.rms_norm(x, weight, 1e-5, None, torch.empty_like(x))
        assert isinstance(y, Tensor)
        yield f"{rows} x {dim}", y, rowwise.rms_norm_reference(x, weight, 1e-5)
        y, total = rowwise_triton.rms_norm(x, weight, 1e-5, residual, torch.empty_like(x))
        yield f"{rows} x {dim} sum", total, x + residual
        yield f"{rows} x {dim} after sum", y, rowwise.rms_norm_reference(total, weight, 1e-5)


def check_rope(dtype: torch.dtype) -> Triples:
    for heads, dim, rot in ((6, 64, 64), (32, 128, 128), (3, 80, 32), (1, 20, 10)):
        qkv = torch.randn(5, heads + 3, dim, device=DEVICE).to(dtype)
        angle = torch.randn(5, rot // 2, device=DEVICE)
        expected = qkv.clone()
        turned = rowwise.rope_reference(qkv[:, : heads + 2], angle.cos(), angle.sin())
        expected[:, : heads + 2] = turned
        rowwise_triton.rope_(qkv[:, :heads], qkv[:, heads : heads + 2], angle.cos(), angle.sin())
        yield f"heads {heads} dim {dim} rot {rot}", qkv, expected


def check_silu_mul(dtype: torch.dtype) -> Triples:
    for rows, dim in ((1, 1), (3, 63), (2, 1500)):
        gate_up = torch.randn(rows, 2 * dim, device=DEVICE).to(dtype)
        y = rowwise_triton.silu_mul(gate_up, torch.empty(rows, dim, dtype=dtype, device=DEVICE))
        yield f"{rows} x {dim}", y, rowwise.silu_mul_reference(gate_up)


CHECKS: dict[str, Callable[[torch.dtype], Triples]] = {
    "write_kv": check_write_kv,
    "decode_attention": check_decode,
    "prefill_attention": check_prefill,
    "past 2^31 elements": check_far_blocks,
    "rms_norm": check_rms_norm,
    "rope_": check_rope,
    "silu_mul": check_silu_mul,
}


def check_all() -> Iterator[Finding]:
    for kernel, check in CHECKS.items():
        for dtype in DTYPES:
            name, tolerance = str(dtype).removeprefix("torch."), TOLERANCE[dtype]
            try:
                for case, actual, expected in check(dtype):
                    error = ((actual - expected).abs() / (1 + expected.abs())).max().item()
                    yield Finding(kernel, case, name, error, tolerance)
            except Exception as failure:  # a kernel that does not compile is a finding, not the end
                reason = f"{type(failure).__name__}: {failure}".splitlines()[0][:120]
                yield Finding(kernel, "-", name, float("nan"), tolerance, reason)


# ---- speed, on a card ----------------------------------------------------------------------------


def microseconds(run: Callable[[], object]) -> float:
    """Median, with a cold L2 cache."""
    return 1e3 * float(triton.testing.do_bench(run, warmup=25, rep=100, return_mode="median"))


def measure_card() -> tuple[float, float]:
    """Bytes and bf16 FLOPs a microsecond that this card reaches: a 1 GiB copy, an 8192^3 matmul."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / microseconds(lambda: target.copy_(source))
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    return bandwidth, 2 * 8192**3 / microseconds(lambda: a @ a)


def time_all(bandwidth: float, rate: float) -> Iterator[Timing]:
    """Shapes of Llama-3-8B (32 heads, 8 kv heads of 128, hidden 4096) and Llama-2-7B (32 of 32)."""

    def timing(
        kernel: str, case: str, run: Callable[[], object], num_bytes: float, flops: float
    ) -> Timing:
        memory, compute = num_bytes / bandwidth, flops / rate
        bound = "memory" if memory >= compute else "compute"
        return Timing(kernel, case, microseconds(run), max(memory, compute), bound)

    dtype, dim = torch.bfloat16, 128
    for kv_heads, batch, context in ((8, 1, 4096), (8, 64, 2048), (8, 8, 32768), (32, 32, 2048)):
        cache = make_cache([context] * batch, kv_heads, dim, 16, dtype, num_layers=1)
        q = torch.randn(batch, 32, dim, device=DEVICE, dtype=dtype)
        yield timing(
            "decode_attention",
            f"batch {batch} context {context} kv heads {kv_heads}",
            lambda q=q, cache=cache, context=context: run_decode(q, cache, None, context),
            2 * batch * context * kv_heads * dim * 2,
            4 * batch * context * 32 * dim,
        )
    for batch, chunk, context in ((1, 4096, 4096), (8, 1024, 1024), (1, 512, 16384)):
        cache = make_cache([context] * batch, 8, dim, 16, dtype, num_layers=1)
        q = torch.randn(batch * chunk, 32, dim, device=DEVICE, dtype=dtype)
        pairs = batch * chunk * (context - chunk / 2)
        yield timing(
            "prefill_attention",
            f"batch {batch} chunk {chunk} context {context}",
            lambda q=q, cache=cache, chunks=[chunk] * batch: run_prefill(q, cache, chunks, None),
            2 * 2 * batch * context * 8 * dim + 2 * 2 * q.numel(),
            4 * pairs * 32 * dim,
        )
    for rows in (64, 8192):
        yield from time_rowwise(timing, rows, dtype)


def time_rowwise(timing: Callable[..., Timing], rows: int, dtype: torch.dtype) -> Iterator[Timing]:
    x, residual = torch.randn(2, rows, 4096, device=DEVICE).to(dtype)
    weight, out = torch.ones(4096, device=DEVICE, dtype=dtype), torch.empty_like(x)
    yield timing(
        "rms_norm + residual",
        f"{rows} x 4096",
        lambda: rowwise_triton.rms_norm(x, weight, 1e-5, residual, out),
        4 * 2 * x.numel(),
        0,
    )
    qkv = torch.randn(rows, 48, 128, device=DEVICE).to(dtype)
    angle = torch.randn(rows, 64, device=DEVICE)
    cos, sin = angle.cos(), angle.sin()
    yield timing(
        "rope_",
        f"{rows} tokens, 32 + 8 heads",
        lambda: rowwise_triton.rope_(qkv[:, :32], qkv[:, 32:40], cos, sin),
        2 * 2 * rows * 40 * 128 + 2 * 4 * cos.numel(),
        0,
    )
    gate_up = torch.randn(rows, 2 * 14336, device=DEVICE).to(dtype)
    inner = torch.empty(rows, 14336, device=DEVICE, dtype=dtype)
    yield timing(
        "silu_mul",
        f"{rows} x 14336",
        lambda: rowwise_triton.silu_mul(gate_up, inner),
        2 * (gate_up.numel() + inner.numel()),
        0,
    )
    cache = make_cache([rows], 8, 128, 16, dtype, num_layers=1)
    slots = torch.randperm(rows, device=DEVICE)
    yield timing(
        "write_kv",
        f"{rows} tokens, 8 heads",
        lambda: attention_triton.write_kv(qkv[:, 32:40], qkv[:, 40:], cache.k, cache.v, slots),
        2 * 2 * 2 * rows * 8 * 128,
        0,
    )


# ---- the table -----------------------------------------------------------------------------------


def print_findings(findings: Iterator[Finding]) -> list[Finding]:
    print(f"{'kernel':<20}{'case':<42}{'dtype':<10}{'error':>10}{'allowed':>10}  verdict")
    seen = []
    for f in findings:
        verdict = "ok" if f.ok else f"WRONG {f.failure}"
        line = f"{f.kernel:<20}{f.case:<42}{f.dtype:<10}{f.error:>10.1e}{f.tolerance:>10.1e}"
        print(f"{line}  {verdict}", flush=True)
        seen.append(f)
    return seen


def print_timings(timings: Iterator[Timing]) -> list[Timing]:
    print(f"\n{'kernel':<20}{'case':<42}{'us':>10}{'floor us':>10}{'x floor':>9}  bound by")
    seen = []
    for t in timings:
        line = f"{t.kernel:<20}{t.case:<42}{t.time_us:>10.1f}{t.floor_us:>10.1f}"
        print(f"{line}{t.over_floor:>9.2f}  {t.bound}", flush=True)
        seen.append(t)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here, too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    card = torch.cuda.get_device_name() if CUDA else None
    result: dict[str, object] = {
        "card": card,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    if card:
        print(f"{card}, {versions}: kernels are compiled\n")
    else:
        print(
            f"no CUDA card here ({versions}): Triton's interpreter runs the kernels on the CPU, "
            "and nothing is timed\n"
        )
    findings = print_findings(check_all())
    wrong = sum(not f.ok for f in findings)
    result["correctness"] = [
        asdict(f) | {"ok": f.ok, "error": None if f.failure else f.error} for f in findings
    ]
    if CUDA:
        bandwidth, rate = measure_card()
        print(f"\nmeasured: {bandwidth / 1e3:.0f} GB/s, {rate / 1e6:.0f} TFLOP/s bf16")
        timings = print_timings(time_all(bandwidth, rate))
        result |= {"gb_per_s": bandwidth / 1e3, "bf16_tflops": rate / 1e6}
        result["timings"] = [asdict(t) | {"over_floor": t.over_floor} for t in timings]
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{len(findings)} checks, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
