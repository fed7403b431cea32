"""The rows and the picture of benchmarks/peers: what a format costs, against how fast it is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from penstock.workers.evaluation.figures import change_of

MARKS = {"Penstock": ("o", "#1f6feb"), "OpenVINO": ("s", "#d29922"), "llama.cpp": ("^", "#8250df")}
Timed = Mapping[str, Mapping[str, float]]  # by workload, what job.py answers


class Format(Protocol):
    """What is said of a format that was measured."""

    @property
    def system(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def bits(self) -> float: ...
    @property
    def mib(self) -> float: ...


def rows_of(
    compared: Sequence[Format],
    nll: Mapping[str, Sequence[Sequence[float]]],
    speed: Mapping[str, Sequence[Timed]],
    bases: Mapping[str, str],
) -> list[dict[str, Any]]:
    """A row for each format. Perplexity in percent over the system's own base, of `bases`, with the
    standard error over windows; medians of the rounds."""
    rows = []
    for each in compared:
        found = np.array(nll[each.name])
        row: dict[str, Any] = {
            "system": each.system,
            "format": each.format,
            "bits_per_weight": round(each.bits, 3),
            "weights_mib": round(each.mib, 1),
            "perplexity": round(float(np.exp(found.mean())), 3),
        }
        if each.format != bases[each.system]:
            change = change_of(found, np.array(nll[f"{each.system} {bases[each.system]}"]))
            row["change_percent"] = round(100 * change.value, 3)
            if change.error is not None:
                row["error_percent"] = round(100 * change.error, 3)
        if timed := speed.get(each.name):
            row |= _speeds(timed)
        rows.append(row)
    return rows


def _speeds(timed: Sequence[Timed]) -> dict[str, float]:
    one = [each["W1"] for each in timed]
    many = [each["W2"] for each in timed]
    steps = [(each["total_s"] - each["first_s"]) / (each["num"] - 1) for each in one]
    return {
        "w1_first_token_ms": round(1e3 * statistics.median(each["first_s"] for each in one), 1),
        "w1_ms_per_token": round(1e3 * statistics.median(steps), 3),
        "w2_tokens_per_s": round(statistics.median(e["num"] / e["total_s"] for e in many), 1),
    }


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Perplexity against the time of a token (W1) and against tokens a second (W2)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6), sharey=True)
    shown = [row for row in rows if "w1_ms_per_token" in row and "change_percent" in row]
    for axis, key, name in (
        (axes[0], "w1_ms_per_token", "W1: ms a token (left is better)"),
        (axes[1], "w2_tokens_per_s", "W2: tokens/s (right is better)"),
    ):
        middle = 0.6 * max(row[key] for row in shown)
        for row in shown:
            mark, colour = MARKS[row["system"]]
            axis.plot(row[key], row["change_percent"], mark, color=colour, markersize=8)
            label = f"{row['format']}, {row['bits_per_weight']:.2f} bits"
            place = (row[key], row["change_percent"])
            x, side = (6, "left") if row[key] < middle else (-6, "right")  # inside the frame
            axis.annotate(label, place, (x, 4), textcoords="offset points", ha=side, fontsize=7.5)
        axis.set_yscale("symlog", linthresh=1)
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
        axis.margins(x=0.18)
    axes[0].set_ylabel("perplexity over the unquantised model, %")
    for system, (mark, colour) in MARKS.items():
        axes[0].plot([], [], mark, color=colour, label=system)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
