"""Is every Triton kernel right here, and how far is it from what the card allows?

    python -m benchmarks.gpu.check [--tiny] [--only NAME] [--stage STAGE] [--json PATH]

Prints one table: each kernel against its fp32 reference, then, on a CUDA card, its time on 7-8B
shapes over its roofline floor: the larger of bytes / measured bandwidth and FLOPs / measured matmul
rate. Without a card the first half runs in Triton's interpreter on the same small shapes, and it
says so; with `--tiny` the calls of the second half run there as well, once and on small shapes, to
show that they work. Exit code 0 only if every kernel is right. Needs neither Ray nor a model.
`--stage compile` makes the timed calls once, so that `--stage time` finds them in Triton's cache:
`python -m benchmarks.gpu` does so side by side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.gpu.cases import CUDA, DEVICE, DTYPES, LEAST_TOLERANCE, TOLERANCE, Unit, Work

import triton  # isort: skip  # after gpu_cases, which decides whether it interprets

from benchmarks.gpu import arena as gpu_arena  # isort: skip
from benchmarks.gpu import attention as gpu_attention  # isort: skip
from benchmarks.gpu import delta as gpu_delta  # isort: skip
from benchmarks.gpu import kv as gpu_kv  # isort: skip
from benchmarks.gpu import linear as gpu_linear  # isort: skip
from benchmarks.gpu import moe as gpu_moe  # isort: skip
from benchmarks.gpu import neurons as gpu_neurons  # isort: skip
from benchmarks.gpu import order as gpu_order  # isort: skip
from benchmarks.gpu import rowwise as gpu_rowwise  # isort: skip
from benchmarks.gpu import sampling as gpu_sampling  # isort: skip

PARTS = {
    "attention": gpu_attention,
    "kv": gpu_kv,
    "rowwise": gpu_rowwise,
    "delta": gpu_delta,
    "linear": gpu_linear,
    "moe": gpu_moe,
    "neurons": gpu_neurons,
    "sampling": gpu_sampling,
    "arena": gpu_arena,
    "order": gpu_order,
}


L2_BYTES = 256 << 20  # more than any card's L2 cache
STAGES = ("check", "compile", "time")
CALLS, REPLAYS = 10, 15  # calls of a graph, and its replays


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
    """One line of the speed table, in microseconds: called from Python, and in a CUDA graph (as
    called, where it cannot be captured)."""

    kernel: str
    case: str
    called_us: float
    time_us: float
    floor_us: float
    bound: str

    @property
    def over_floor(self) -> float:
        return self.time_us / self.floor_us


@dataclass(frozen=True)
class Card:
    """What this card reaches: bytes a microsecond, and FLOPs a microsecond by unit."""

    bandwidth: float
    rates: dict[Unit, float]


def check_all(parts: Sequence[str], kernels: Sequence[str] | None = None) -> Iterator[Finding]:
    for part in parts:
        for kernel, check in PARTS[part].CHECKS.items():
            if kernels is not None and kernel not in kernels:
                continue
            for dtype in DTYPES:
                name = str(dtype).removeprefix("torch.")
                tolerance = max(TOLERANCE[dtype], LEAST_TOLERANCE.get(kernel, 0.0))
                try:
                    for case, actual, expected in check(dtype):
                        deviation = (actual - expected).abs() / (1 + expected.abs())
                        yield Finding(kernel, case, name, deviation.max().item(), tolerance)
                except Exception as failure:  # what does not compile is a finding, not the end
                    reason = f"{type(failure).__name__}: {failure}".splitlines()[0][:120]
                    yield Finding(kernel, "-", name, float("nan"), tolerance, reason)


# ---- speed, on a card ----------------------------------------------------------------------------


def microseconds(run: Callable[[], object]) -> float:
    """Median of calls from Python, with a cold L2 cache: a short kernel waits for its launch."""
    return 1e3 * float(triton.testing.do_bench(run, warmup=25, rep=100, return_mode="median"))


def graph_microseconds(run: Callable[[], object]) -> float:
    """Median of calls in a CUDA graph, as decode steps run; what empties the L2 cache before each
    of them is subtracted. Raises RuntimeError where `run` cannot be captured."""
    rest = torch.empty(L2_BYTES, dtype=torch.uint8, device=DEVICE)

    def both() -> None:
        rest.zero_()
        run()

    return _replay_us(both) - _replay_us(rest.zero_)


def _replay_us(run: Callable[[], object]) -> float:
    for _ in range(2):  # compiled, and handles made
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    times = []
    for _ in range(REPLAYS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(1e3 * marks[0].elapsed_time(marks[1]) / CALLS)
    return statistics.median(times)


def measure_card() -> Card:
    """A 1 GiB copy, and 8192^3 matmuls of PyTorch. Without FP8 units, those of 16 bit stand in."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / microseconds(lambda: target.copy_(source))
    flops = 2 * 8192**3
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    codes = torch.ones(8192, 8192, device=DEVICE, dtype=torch.int8)
    rates: dict[Unit, float] = {
        "bf16": flops / microseconds(lambda: a @ a),
        "int8": flops / microseconds(lambda: torch._int_mm(codes, codes.T)),
    }
    rates["fp8"] = rates["bf16"]
    if torch.cuda.get_device_capability() >= (8, 9):
        small, one = codes.to(torch.float8_e4m3fn), torch.ones((), device=DEVICE)
        run = lambda: torch._scaled_mm(small, small.T, one, one, out_dtype=torch.bfloat16)  # noqa: E731
        rates["fp8"] = flops / microseconds(run)
    return Card(bandwidth, rates)


def time_all(parts: Sequence[str], card: Card) -> Iterator[Timing]:
    for work in all_works(parts, tiny=False):
        memory, compute = work.num_bytes / card.bandwidth, work.flops / card.rates[work.unit]
        bound = "memory" if memory >= compute else work.unit
        called_us = time_us = microseconds(work.run)
        if work.in_graph:
            time_us = graph_microseconds(work.run)
        yield Timing(work.kernel, work.case, called_us, time_us, max(memory, compute), bound)


def all_works(parts: Sequence[str], tiny: bool) -> Iterator[Work]:
    for part in parts:
        yield from PARTS[part].works(tiny)


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
    columns = f"{'called us':>10}{'us':>9}{'floor us':>10}{'x floor':>9}"
    print(f"\n{'kernel':<20}{'case':<42}{columns}  bound by")
    seen = []
    for t in timings:
        times = f"{t.called_us:>10.1f}{t.time_us:>9.1f}{t.floor_us:>10.1f}"
        line = f"{t.kernel:<20}{t.case:<42}{times}"
        print(f"{line}{t.over_floor:>9.2f}  {t.bound}", flush=True)
        seen.append(t)
    return seen


def run_once(parts: Sequence[str], tiny: bool) -> None:
    print(f"\nthe timed calls, once each{' on small shapes' if tiny else ''}")
    for work in all_works(parts, tiny):
        work.run()
        print(f"{work.kernel:<20}{work.case:<42}  ran", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here, too")
    parser.add_argument("--only", choices=PARTS, action="append", help="of these parts alone")
    parser.add_argument("--kernel", action="append", help="with --stage check: of these alone")
    parser.add_argument("--tiny", action="store_true", help="run the timed calls small, once")
    parser.add_argument("--stage", choices=STAGES, help="this alone; none: check, then time")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    parts = arguments.only or list(PARTS)
    card = torch.cuda.get_device_name() if CUDA else None
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    if card:
        print(f"{card}, {versions}: kernels are compiled\n")
    else:
        print(
            f"no CUDA card here ({versions}): Triton's interpreter runs the kernels on the CPU, "
            "and nothing is timed\n"
        )
    result: dict[str, object] = {
        "card": card,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    findings: list[Finding] = []
    if arguments.stage in (None, "check"):
        findings = print_findings(check_all(parts, arguments.kernel))
        result["correctness"] = [
            asdict(f) | {"ok": f.ok, "error": None if f.failure else f.error} for f in findings
        ]
    wrong = sum(not f.ok for f in findings)
    if arguments.tiny or (CUDA and arguments.stage == "compile"):
        run_once(parts, arguments.tiny)
    elif CUDA and arguments.stage != "check":
        measured = measure_card()
        rates = ", ".join(f"{rate / 1e6:.0f} TFLOP/s {u}" for u, rate in measured.rates.items())
        print(f"\nmeasured: {measured.bandwidth / 1e3:.0f} GB/s, {rates}")
        result |= {"gb_per_s": measured.bandwidth / 1e3}
        result |= {f"{u}_tflops": rate / 1e6 for u, rate in measured.rates.items()}
        timings = print_timings(time_all(parts, measured))
        result["timings"] = [asdict(t) | {"over_floor": t.over_floor} for t in timings]
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{len(findings)} checks, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
