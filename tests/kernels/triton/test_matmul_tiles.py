"""Tiles of a GPU's matmuls, and the number of rows from which a format is bound by FLOPs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.kernels.triton.matmul_tiles import (
    RIDGE_16,
    WEIGHT_BYTES,
    Kind,
    Tiles,
    choose_tiles,
    ridge_rows,
)

KINDS: tuple[Kind, ...] = ("plain", "fp8", "int4", "int8_groups", "int4_steps")
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "gpu" / "h200-tiles.json"


def test_ridges_are_those_of_the_published_cards() -> None:
    """16 bits and int8 at 153 rows on an A100 and 206 on an H200, bare int4 at 38 and 51."""
    for major, ridge, ridge_int4 in ((8, 153, 38.25), (9, 206, 51.5)):
        assert ridge_rows("plain", RIDGE_16[major]) == ridge
        assert ridge_rows("int8", RIDGE_16[major]) == ridge
        bare = 0.5 / WEIGHT_BYTES["int4"]  # without its scales
        assert ridge_rows("int4", RIDGE_16[major]) * bare == pytest.approx(ridge_int4)


@pytest.mark.parametrize("num_rows", [0, 1, 16, 17, 64, 257, 8192])
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 30), (4096, 4096), (4096, 14336)])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_fit(num_rows: int, outputs: int, inputs: int, kind: Kind) -> None:
    tiles = choose_tiles(num_rows, outputs, 128, inputs, kind=kind)
    assert tiles.rows in (16, 32, 64, 128) and tiles.rows >= min(128, num_rows)
    assert 1 <= tiles.pieces <= max(1, inputs // 128 // 4)
    programs = -(-num_rows // tiles.rows) * -(-outputs // tiles.outputs)
    programs *= tiles.pieces if tiles.apart else 1
    least = 128 if num_rows <= 64 else 66  # of 132 multiprocessors
    assert programs >= least or inputs < 4096 or num_rows == 0
    assert tiles.pieces == choose_tiles(1, outputs, 128, inputs).pieces, "the order of a sum"


def test_the_tiles_are_among_the_fastest_measured() -> None:
    """Of the weights and numbers of rows of `python -m benchmarks.gpu.tiles`, on an H200."""
    times: dict[tuple[str, int, int, int], dict[Tiles, float]] = {}
    for row in json.loads(RESULTS.read_text())["results"]["timings"]:
        case = row["format"], row["rows"], row["outputs"], row["inputs"]
        times.setdefault(case, {})[Tiles(*row["tiles"])] = row["us"]
    assert len(times) > 60
    for (format, num_rows, outputs, inputs), of_case in times.items():
        step = next(iter(of_case)).inputs
        kind: Any = "int8_groups" if format == "int8" else format
        taken = choose_tiles(num_rows, outputs, step, inputs, kind=kind)
        assert of_case[taken] <= 1.2 * min(of_case.values()), (format, num_rows, outputs)


def test_a_tile_of_another_shape_would_be_found_slow() -> None:
    rows = json.loads(RESULTS.read_text())["results"]["timings"]
    slow = {"int8": 2048, "int4_steps": 256}
    for format, num_rows in slow.items():
        mine = [r for r in rows if r["format"] == format and r["rows"] == num_rows]
        assert max(r["us"] for r in mine) > 1.2 * min(r["us"] for r in mine)
