"""What int4 weights take of the time of int8 weights, by the number of rows.

    python -m benchmarks.kernels.int4_by_rows --seconds 120 --json out.json

Linear layers of random weights, more than the cache holds, one after the other; rows in bf16 that
are quantised already where the weight takes int8 rows, as a layer gets them from the norm before
it. All kinds take turns for as long as there is time; the fastest walk of each counts. Beside int4
as it is rounded at load: codes of files (symmetric, with integer zero points, with real ones), and
activations left plain.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import record
from penstock.kernels.matmul import linear, pack_linear
from penstock.kernels.quant import (
    Int8Rows,
    QuantizedWeight,
    for_plain_rows,
    quantize_rows_int8,
    quantize_weight,
)
from penstock.kernels.types import PackedLinear

BASE = "int8"


def weights(num_outputs: int, num_inputs: int) -> dict[str, QuantizedWeight]:
    weight = torch.randn(num_outputs, num_inputs) / num_inputs**0.5
    found = {BASE: quantize_weight(weight, "int8")}
    found |= {f"int4, groups of {g}": quantize_weight(weight, "int4", g) for g in (16, 32, 64, 128)}
    found["file, 128, symmetric"] = quantize_weight(weight, "int4", 128, symmetric=True)
    stored = quantize_weight(weight, "int4", 32, symmetric=True)
    zeros = torch.randint(0, 16, stored.scales.shape, dtype=torch.uint8)
    found["file, 32, zero points"] = replace(stored, zeros=zeros)
    found["file, 32, minimums"] = replace(stored, zeros=torch.rand(stored.scales.shape) * 15)
    found["int4, 16, plain activations"] = for_plain_rows(found["int4, groups of 16"])
    return found


def seconds_of(
    packed: dict[str, list[PackedLinear]], num_rows: list[int], num_inputs: int, seconds: float
) -> dict[tuple[str, int], float]:
    """Of one call of each kind and number of rows, in the fastest walk through its weights."""
    groups = {each[0].group for each in packed.values() if each[0].takes_int8}
    plain = {rows: torch.randn(rows, num_inputs).bfloat16() for rows in num_rows}
    coded = {
        (rows, group): Int8Rows(*quantize_rows_int8(x, group), group, x.dtype)
        for (rows, x), group in itertools.product(plain.items(), groups)
    }
    outputs = packed[BASE][0].out_features
    outs = {rows: torch.empty(rows, outputs, dtype=torch.bfloat16) for rows in num_rows}
    best = dict.fromkeys(itertools.product(packed, num_rows), float("inf"))
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        for kind, rows in best:
            first = packed[kind][0]
            x = coded[rows, first.group] if first.takes_int8 else plain[rows]
            start_s = time.perf_counter()
            for weight in packed[kind]:
                linear(x, weight, outs[rows])
            each_s = (time.perf_counter() - start_s) / len(packed[kind])
            best[kind, rows] = min(best[kind, rows], each_s)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["896x4864", "4864x896"], help="K x N")
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[1, 4, 8, 12, 16, 24, 32, 64, 256, 1024]
    )
    parser.add_argument("--seconds", type=float, default=60, help="for each shape (default: 60)")
    parser.add_argument("--copies", type=int, default=24, help="weights of a walk (default: 24)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes = []
    for shape in args.shapes:
        num_inputs, num_outputs = map(int, shape.split("x"))
        made = weights(num_outputs, num_inputs)
        packed = {
            kind: [pack_linear(weight) for _ in range(args.copies)] for kind, weight in made.items()
        }
        best = seconds_of(packed, args.rows, num_inputs, args.seconds)
        found: dict[str, dict[str, Any]] = {
            kind: {
                "bits_per_weight": round(8 * each.num_bytes / (num_inputs * num_outputs), 3),
                "microseconds": {rows: round(best[kind, rows] * 1e6, 1) for rows in args.rows},
                "ratio": {
                    rows: round(best[kind, rows] / best[BASE, rows], 3) for rows in args.rows
                },
            }
            for kind, (each, *_) in packed.items()
        }
        shapes.append({"shape": shape, "kinds": found})
        print(f"{shape}: of int8's time, with {' '.join(map(str, args.rows))} rows")
        for kind, each in found.items():
            print(f"{kind:28}", *(f"{ratio:6.3f}" for ratio in each["ratio"].values()))
    if args.json:
        record.write(args.json, __file__, {"shapes": shapes}, threads=args.threads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
