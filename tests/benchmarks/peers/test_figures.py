"""The rows of benchmarks/peers, from scores and times that were made up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.peers.figures import draw, rows_of


@dataclass(frozen=True)
class Made:
    system: str
    format: str
    bits: float = 8.0
    mib: float = 100.0

    @property
    def name(self) -> str:
        return f"{self.system} {self.format}"


BASES = {"Penstock": "fp32", "llama.cpp": "F16"}


def test_rows_are_changes_over_the_systems_own_base_and_medians():
    compared = [Made("Penstock", "fp32"), Made("Penstock", "int8"), Made("llama.cpp", "F16")]
    nll = {
        "Penstock fp32": [[1.0, 2.0], [3.0, 4.0]],
        "Penstock int8": [[1.01, 2.01], [3.03, 4.03]],
        "llama.cpp F16": [[9.0, 9.0], [9.0, 9.0]],
    }

    def times(first_s: float) -> dict[str, dict[str, float]]:
        one = {"first_s": first_s, "total_s": first_s + 0.9, "num": 10}
        return {"W1": one, "W2": {"first_s": 0.1, "total_s": 10 * first_s, "num": 50}}

    rows = rows_of(compared, nll, {"Penstock int8": [times(0.5), times(0.1), times(0.2)]}, BASES)
    base, int8, other = rows
    assert base["perplexity"] == round(math.exp(2.5), 3) and "change_percent" not in base
    assert int8["change_percent"] == pytest.approx(100 * math.expm1(0.02), abs=1e-3)
    assert int8["error_percent"] == pytest.approx(1.0, rel=0.05)  # windows: +1 and +3 %
    assert int8["w1_first_token_ms"] == 200.0 and int8["w1_ms_per_token"] == 100.0
    assert int8["w2_tokens_per_s"] == 25.0
    assert "change_percent" not in other and "w1_ms_per_token" not in other


def test_a_picture_is_drawn(tmp_path: Path):
    row = {"system": "OpenVINO", "format": "int8", "bits_per_weight": 8.0, "change_percent": 0.4,
           "w1_ms_per_token": 5.0, "w2_tokens_per_s": 300.0}  # fmt: skip
    draw([row, {"system": "OpenVINO", "format": "fp32"}], tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
