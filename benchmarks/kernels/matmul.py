"""Each number format's CPU linear against the best torch operator of that format, and the memory.

Interleaved in one process: in each round every contender runs once, on a copy of the weight that is
out of the cache, so that a noisy machine is noisy for all; the lowest time of each counts. A ratio
above 1.00 means that Penstock is faster than the best torch operator of its format.

    python -m benchmarks.kernels.matmul --out OUT

What is compared: int8 with `quantized.linear_dynamic` (fbgemm: one scale for all rows, 7-bit
activations), `onednn.qlinear_pointwise` and `_int_mm` (both without the time that it takes to
quantise the rows); int4 with `_weight_int4pack_mm_for_cpu` (group 128); bf16 and fp32 with
`F.linear` and the prepacked oneDNN operator. torch has no CPU operator for nf4, W8A8 fp8, or the
formats of files (fp8g: FP8 in blocks of 128, mxfp4, int8g: GPTQ of 8 bits in groups of 128): their
ratio is to `F.linear` on a plain fp32 weight.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import record
from penstock.kernels import quant
from penstock.kernels.matmul import linear, pack_linear
from penstock.kernels.reference.matmul import onednn_packs
from penstock.kernels.types import PackedLinear
from penstock.workers.evaluation.machine import cpu_name

SHAPES = ("896x4864", "2048x8192", "4864x896", "896x32000")
FORMATS = ("fp32", "bf16", "int8", "int4", "nf4", "fp8", "fp8g", "mxfp4", "int8g")
PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}
OUT_OF_CACHE = 96e6  # bytes of copies of one weight


@dataclass(frozen=True)
class Contender:
    """One operator: `run(prepare(x), weight)` with each of `weights` in turn."""

    name: str
    weights: list
    run: Callable[[Any, Any], object]
    prepare: Callable[[Tensor], Any] = lambda x: x


@dataclass(frozen=True)
class Line:
    """One line of the table: microseconds."""

    shape: str
    rows: int
    format: str
    penstock: float
    best_torch: float
    torch_operator: str
    gigabytes_per_second: float

    @property
    def ratio(self) -> float:
        return self.best_torch / self.penstock


def copies(packed: object, num_bytes: int) -> list:
    return [copy.deepcopy(packed) for _ in range(number_of(num_bytes))]


def number_of(num_bytes: int) -> int:
    """Weights whose bytes exceed every cache."""
    return max(2, -(-int(OUT_OF_CACHE) // num_bytes))


def ours(weight: Tensor, format: str, activations: torch.dtype) -> Contender:
    plain = PLAIN.get(format)
    dtype = plain or activations
    if format in ("fp8g", "mxfp4", "int8g"):
        packed = pack_linear(of_a_file(weight, format))
    elif plain is None:  # then it is one of the others of FORMATS
        packed = pack_linear(quant.quantize_weight(weight, cast(quant.WeightFormat, format)))
    else:
        packed = pack_linear(weight.to(plain))
    outs: dict[int, Tensor] = {}

    def prepare(x: Tensor) -> Tensor:
        rows = x.to(dtype)
        outs[x.shape[0]] = rows.new_empty(x.shape[0], weight.shape[0])
        return rows

    def run(x: Tensor, packed: PackedLinear) -> Tensor:
        return linear(x, packed, out=outs[x.shape[0]])

    return Contender("penstock", copies(packed, packed.num_bytes), run, prepare)


def of_a_file(weight: Tensor, format: str) -> quant.QuantizedWeight:
    """Codes that only files have; which they are is no matter of time."""
    (num_rows, width), group = weight.shape, 32 if format == "mxfp4" else 128
    scales = torch.rand(num_rows, -(-width // group)) + 0.5
    codes = torch.randint(0, 120, (num_rows, width), dtype=torch.uint8)
    if format == "mxfp4":
        return quant.QuantizedWeight("mxfp4", codes[:, : width // 2].clone(), scales, width, group)
    if format == "fp8g":
        values = codes.view(torch.float8_e4m3fn)
        return quant.QuantizedWeight("fp8g", values, scales, width, group)
    return quant.QuantizedWeight("int8g", codes.view(torch.int8), scales, width, group)


def theirs(weight: Tensor, format: str) -> list[Contender]:
    """What torch offers for the format, or for the plain weight if nothing."""
    if format == "int8":
        return int8_operators(weight)
    if format == "int4":
        return [int4_operator(weight)]
    dtype = PLAIN.get(format, torch.float32)
    weight, size = weight.to(dtype), weight.numel() * dtype.itemsize
    found = [Contender("F.linear", copies(weight, size), F.linear, lambda x: x.to(dtype))]
    if format in PLAIN and onednn_packs(weight):
        pack = torch.ops.mkldnn._reorder_linear_weight
        run = torch.ops.mkldnn._linear_pointwise
        found.append(
            Contender(
                "oneDNN prepacked",
                [pack(weight, 16) for _ in range(number_of(size))],
                lambda x, w: run(x, w, None, "none", [], ""),
                lambda x: x.to(dtype),
            )
        )
    return found


def int8_operators(weight: Tensor) -> list[Contender]:
    torch.backends.quantized.engine = "fbgemm"
    codes, scales = quant.quantize_rows_int8(weight)
    scales = scales[:, 0]
    num_outputs, size = weight.shape[0], weight.numel()
    zeros = torch.zeros(num_outputs, dtype=torch.int32)
    affine = torch.quantize_per_channel(weight, scales.double(), zeros.long(), 0, torch.qint8)
    prepack, qlinear = torch.ops.onednn.qlinear_prepack, torch.ops.onednn.qlinear_pointwise

    def run_qlinear(x: Tensor, w: Tensor) -> Tensor:
        return qlinear(x, 1.0, 127, w, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")

    number = number_of(size)
    fbgemm = [torch.ops.quantized.linear_prepack(affine, None) for _ in range(number)]
    onednn = [prepack(codes, [16, weight.shape[1]]) for _ in range(number)]
    rows = quant.quantize_rows_int8
    return [
        Contender("linear_dynamic", fbgemm, torch.ops.quantized.linear_dynamic),
        Contender("qlinear", onednn, run_qlinear, lambda x: (rows(x)[0] + 127).to(torch.uint8)),
        Contender("_int_mm", copies(codes.T, size), torch._int_mm, lambda x: rows(x)[0]),
    ]


def int4_operator(weight: Tensor) -> Contender:
    num_outputs, depth = weight.shape
    codes = torch.randint(0, 16, (num_outputs, depth), dtype=torch.int32)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.rand(depth // 128, num_outputs, 2).bfloat16()
    return Contender(
        "_weight_int4pack_mm",
        copies(packed, weight.numel() // 2),
        lambda x, w: torch._weight_int4pack_mm_for_cpu(x, w, 128, scales),
        lambda x: x.bfloat16(),
    )


def race(contenders: list[Contender], x: Tensor, seconds: float) -> list[float]:
    """The lowest microseconds of each. Who is ten times slower than the first runs five times."""
    best = [float("inf")] * len(contenders)
    inputs = [contender.prepare(x) for contender in contenders]
    end, index = time.monotonic() + seconds, 0
    while time.monotonic() < end or index < 5:
        for place, contender in enumerate(contenders):
            if index >= 5 and best[place] > 10 * min(best):
                continue
            weight = contender.weights[index % len(contender.weights)]
            start = time.perf_counter()
            contender.run(inputs[place], weight)
            best[place] = min(best[place], 1e6 * (time.perf_counter() - start))
        index += 1
    return best


def measure(
    shape: str, format: str, rows: list[int], seconds: float, activations: torch.dtype
) -> list[Line]:
    depth, num_outputs = map(int, shape.split("x"))
    weight = torch.randn(num_outputs, depth) / depth**0.5
    mine, others = ours(weight, format, activations), theirs(weight, format)
    lines = []
    for num_rows in rows:
        times = race([mine, *others], torch.randn(num_rows, depth), seconds)
        fastest = min(range(len(others)), key=lambda place: times[1 + place])
        name = others[fastest].name + ("" if format in ("int8", "int4", *PLAIN) else " fp32")
        rate = mine.weights[0].num_bytes / times[0] / 1e3
        lines.append(Line(shape, num_rows, format, times[0], times[1 + fastest], name, rate))
    return lines


def read_bandwidth() -> float:
    """GB/s of a sum over 256 MB, the best of several."""
    data = torch.ones(64_000_000)
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        data.max()
        best = min(best, time.perf_counter() - start)
    return data.numel() * 4 / best / 1e9


def table(lines: list[Line], bandwidth: float, threads: int, activations: str) -> str:
    head = (
        f"{cpu_name()}, {threads} threads, torch {torch.__version__}; "
        f"read bandwidth {bandwidth:.1f} GB/s. Activations {activations}, of plain formats as the "
        "weights.\n\n"
        "| K x N | M | format | Penstock us | best torch us | torch operator | ratio | GB/s |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    return head + "".join(
        f"| {line.shape} | {line.rows} | {line.format} | {line.penstock:.0f} | "
        f"{line.best_torch:.0f} | {line.torch_operator} | {line.ratio:.2f} | "
        f"{line.gigabytes_per_second:.1f} |\n"
        for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="KxN")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64], metavar="M")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument(
        "--activations", default="fp32", choices=PLAIN, help="of Penstock's quantised formats"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="of each race")
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    bandwidth, lines = read_bandwidth(), []
    for shape in tqdm(args.shapes, disable=None):
        for format in args.formats:
            activations = PLAIN[args.activations]
            lines += measure(shape, format, args.rows, args.seconds, activations)
    text = table(lines, bandwidth, args.threads, args.activations)
    print(text)
    if args.out:
        args.out.with_suffix(".md").write_text(text)
        facts = {"cpu": cpu_name(), "threads": args.threads, "torch": torch.__version__}
        records = [asdict(line) | {"ratio": line.ratio} for line in lines]
        content = facts | {"read_gigabytes_per_second": bandwidth, "lines": records}
        record.write(args.out.with_suffix(".json"), __file__, content, threads=args.threads)


if __name__ == "__main__":
    main()
