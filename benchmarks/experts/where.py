"""Draws where prefetch and neurons pay: time of a token over that of exact experts without either.

Reads result files of speed.py. Below 1 the mode is faster, above it slower.

    python -m benchmarks.experts.where --prefetch FILE... --neurons FILE... --out NAME.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BASE = "fair"
MODES = {
    "prefetch": ("fair + always", "fair + auto"),
    "neurons": ("fair + neurons", "fair + streamed"),
}
MARKS = {
    "fair + always": ":", "fair + auto": "-", "fair + neurons": "-", "fair + streamed": ":",
}  # fmt: skip


def ratios(file: Path, mode: str) -> dict[float, list[tuple[float, float]]]:
    """By link in GB/s: (percent of the experts in the cache, time over that of exact experts)."""
    found: dict[float, list[tuple[float, float]]] = {}
    for link in json.loads(file.read_text())["results"]["decode"]:
        times = {(row["mode"], row["percent"]): row["token_ms"] for row in link["rows"]}
        points = [(p, ms / times[BASE, p]) for (name, p), ms in times.items() if name == mode]
        found[link["bytes_per_s"] / 1e9] = sorted(points)
    return found


def draw(axes: Any, title: str, files: Sequence[Path], modes: Sequence[str]) -> None:
    for number, file in enumerate(files):
        for mode in modes:
            for place, (link, points) in enumerate(ratios(file, mode).items()):
                if points:
                    label = f"{mode.removeprefix('fair + ')}, {file.stem}, {link:g} GB/s"
                    style = {"linestyle": MARKS[mode], "marker": "osx^"[number]}
                    axes.plot(*zip(*points), label=label, color=f"C{place}", **style)
    axes.axhspan(1, axes.get_ylim()[1], alpha=0.08, color="red")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(title=title, xlabel="experts in the cache, %", ylabel="time of a token, exact = 1")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="xx-small")


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefetch", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--neurons", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    args = parser.parse_args()
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw(left, "prefetch of experts", args.prefetch, MODES["prefetch"])
    draw(
        right,
        "sparse: a fifth of the neurons; streamed: these first",
        args.neurons,
        MODES["neurons"],
    )
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
