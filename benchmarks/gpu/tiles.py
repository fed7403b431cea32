"""Which tiles of a linear are fastest on this GPU? The figures behind `matmul_tiles.py`.

    python -m benchmarks.gpu.tiles [--format NAME ...] [--compile-only] [--json PATH]

For shapes of 8B models, numbers of rows and formats: every candidate's time in a CUDA graph, the
fastest and the one that `choose_tiles` takes. Needs a GPU.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import record
from benchmarks.gpu.cases import DEVICE, HALF
from benchmarks.gpu.check import graph_microseconds, measure_card
from benchmarks.gpu.linear import WITH_PLAIN, GpuFormat, random_packed
from penstock.kernels.triton import matmul as matmul_triton
from penstock.kernels.triton.matmul_tiles import Tiles

SHAPES = [(4096, 4096), (28672, 4096), (4096, 14336)]  # outputs x inputs
ROWS = (1, 16, 64, 256, 2048)


def candidates(taken: Tiles, num_rows: int) -> Iterator[Tiles]:
    """Around the tiles that are taken; the pieces of a sum stay as they are."""
    few = num_rows <= 16
    rows = [r for r in (16, 32, 64, 128) if num_rows <= 4 * r and (few or r <= num_rows)]
    rows = [16] if few else rows[-2:] or [128]
    outputs, warps, stages = ((32, 64, 128), (4,), (3, 5)) if few else ((64, 128), (4, 8), (3, 4))
    aparts = (True, False) if few else (taken.apart,)
    for r, n, w, s, apart in itertools.product(rows, outputs, warps, stages, aparts):
        yield replace(taken, rows=r, outputs=n, num_warps=w, num_stages=s, apart=apart)


def sweep(format: GpuFormat, compile_only: bool) -> Iterator[dict[str, Any]]:
    for num_outputs, num_inputs in SHAPES:
        weight = random_packed(format, num_outputs, num_inputs, HALF)
        for num_rows in ROWS:
            x = torch.randn(num_rows, num_inputs, device=DEVICE).to(HALF)
            values, scales = matmul_triton.activations(x, weight)
            out = torch.empty(num_rows, num_outputs, dtype=HALF, device=DEVICE)
            taken = matmul_triton.tiles_for(weight, num_rows, values)
            for tiles in dict.fromkeys([taken, *candidates(taken, num_rows)]):
                run = partial(
                    matmul_triton.launch,
                    values,
                    scales,
                    weight,
                    out,
                    tiles,
                    matmul_triton.Routing(),
                )
                found: dict[str, Any] = {
                    "format": format, "outputs": num_outputs, "inputs": num_inputs,
                    "rows": num_rows, "tiles": asdict(tiles), "taken": tiles == taken,
                    "num_bytes": weight.num_bytes + 2 * (x.numel() + out.numel()),
                }  # fmt: skip
                try:
                    run()
                    torch.cuda.synchronize()
                    found["us"] = None if compile_only else graph_microseconds(run)
                except Exception as error:  # too much shared memory, or too many registers
                    found["error"] = str(error).splitlines()[0][:100]
                yield found


def show(rows: list[dict[str, Any]], bandwidth: float) -> None:
    """Of one format, shape and number of rows: the fastest, and what is taken."""
    timed = [row for row in rows if row.get("us") is not None]
    if not timed:
        print("nothing ran:", rows[0])
        return
    best = min(timed, key=lambda row: float(row["us"]))
    taken = next((row["us"] for row in timed if row["taken"]), float("nan"))
    head = f"{best['format']:<11}{best['rows']:>5} x {best['inputs']} x {best['outputs']:<6}"
    t = best["tiles"]
    tiles = (t["rows"], t["outputs"], t["num_warps"], t["num_stages"], t["apart"])
    floor = best["num_bytes"] / bandwidth
    print(f"{head}{taken:>9.1f}{best['us']:>9.1f}{floor:>9.1f}  {tiles}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", nargs="+", choices=WITH_PLAIN, default=list(WITH_PLAIN))
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache, no times")
    parser.add_argument("--json", type=Path, metavar="PATH")
    given = parser.parse_args()
    if DEVICE != "cuda":
        parser.error("no CUDA card here")
    bandwidth = 1.0 if given.compile_only else measure_card().bandwidth  # bytes a microsecond
    if not given.compile_only:
        print("format      rows x inputs x outputs  taken us  best us bytes us  (rows, outputs, "
              "warps, stages, pieces apart)")  # fmt: skip
    found: list[dict[str, Any]] = []
    for format in given.format:
        rows: list[dict[str, Any]] = []
        for row in sweep(format, given.compile_only):
            if rows and (row["rows"], row["outputs"], row["inputs"]) != (
                rows[0]["rows"], rows[0]["outputs"], rows[0]["inputs"],
            ):  # fmt: skip
                if not given.compile_only:
                    show(rows, bandwidth)
                rows = []
            rows.append(row)
            found.append(row)
        if not given.compile_only:
            show(rows, bandwidth)
    if given.json:
        names = "rows, outputs, inputs, pieces, apart, warps, stages"
        timings = [
            {name: row[name] for name in ("format", "outputs", "inputs", "rows", "us")}
            | {"tiles": list(row["tiles"].values())}
            for row in found
            if row.get("us") is not None
        ]
        results = {"tiles": names, "gb_per_s": bandwidth / 1e3, "timings": timings}
        record.write(given.json, __file__, results)


if __name__ == "__main__":
    main()
