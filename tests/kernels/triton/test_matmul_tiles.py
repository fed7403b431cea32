"""Tiles of a GPU's matmuls, and the number of rows from which a format is bound by FLOPs."""

from __future__ import annotations

import pytest

from penstock.kernels.triton.matmul_tiles import (
    RIDGE_16,
    WEIGHT_BYTES,
    choose_tiles,
    ridge_rows,
)


def test_ridges_are_those_of_the_published_cards() -> None:
    """16 bits and int8 at 153 rows on an A100 and 206 on an H200, bare int4 at 38 and 51."""
    for major, ridge, ridge_int4 in ((8, 153, 38.25), (9, 206, 51.5)):
        assert ridge_rows("plain", RIDGE_16[major]) == ridge
        assert ridge_rows("int8", RIDGE_16[major]) == ridge
        bare = 0.5 / WEIGHT_BYTES["int4"]  # without its scales
        assert ridge_rows("int4", RIDGE_16[major]) * bare == pytest.approx(ridge_int4)


@pytest.mark.parametrize("num_rows", [0, 1, 16, 17, 64, 257, 8192])
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 30), (4096, 4096), (4096, 14336)])
def test_tiles_fit(num_rows: int, outputs: int, inputs: int) -> None:
    tiles = choose_tiles(num_rows, outputs, 128, inputs)
    assert tiles.rows in (16, 32, 64, 128) and tiles.rows >= min(128, num_rows)
    assert 1 <= tiles.pieces <= max(1, inputs // 128 // 4)
    assert tiles.pieces == choose_tiles(1, outputs, 128, inputs).pieces
    programs = -(-num_rows // tiles.rows) * -(-outputs // tiles.outputs)
    programs *= tiles.pieces if tiles.apart else 1
    least = 128 if num_rows <= 64 else 66  # of 132 multiprocessors
    assert programs >= least or inputs < 4096 or num_rows == 0
