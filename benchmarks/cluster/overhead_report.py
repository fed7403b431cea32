"""The figures of overhead.py, summed up as a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

TARGETS = {"ttft_ms": 5.0, "throughput": 0.85, "cpu_ms": 0.1}
COLUMNS = (
    *("path", "TTFT p50, 1 at a time", "added (quartiles)", "tokens/s, {n} under way", "of bare"),
    *("ingress CPU per token, {n} under way", "above rest, {n} / 1 under way"),
    *("engine process", "client"),
)


def summary(rounds: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each path: medians over the rounds; of ratios, of those within one round; of the added
    time to first token, over all turns, of the differences within a turn, with their quartiles."""
    return {path: _of_path(path, rounds) for path in rounds[0]["paths"]}


def _of_path(path: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    def each(under_way: str, name: str, of: str = path) -> Iterator[Any]:
        return (one["paths"][of][under_way][name] for one in rounds)

    def above_rest(under_way: str) -> float:
        rows = zip(rounds, each(under_way, "ingress_cpu_ms"), each(under_way, "wall_ms"))
        return median(cpu_ms - one["ingress_at_rest"] * wall_ms for one, cpu_ms, wall_ms in rows)

    row = {
        "ttft_ms": median(ms for turns in each("1", "ttfts_ms") for ms in turns),
        "tokens_per_s": median(each("many", "tokens_per_s")),
        "engine_cpu_ms": median(each("many", "engine_cpu_ms")),
    }
    if path == "bare":
        return row
    pairs = zip(each("1", "ttfts_ms"), each("1", "ttfts_ms", "bare"))
    added = np.concatenate([np.subtract(these, those) for these, those in pairs])
    speeds = zip(each("many", "tokens_per_s"), each("many", "tokens_per_s", "bare"))
    return row | {
        "added_ttft_ms": [float(q) for q in np.quantile(added, [0.25, 0.5, 0.75])],
        "throughput_ratio": median(this / that for this, that in speeds),
        "ingress_cpu_ms": median(each("many", "ingress_cpu_ms")),
        "ingress_cpu_above_rest_ms": above_rest("many"),
        "ingress_cpu_above_rest_single_ms": above_rest("1"),
        "client_cpu_ms": median(each("many", "client_cpu_ms")),
    }


def table(rows: dict[str, dict[str, Any]], concurrency: int) -> str:
    """In Markdown, with the targets below."""
    head = "| " + " | ".join(COLUMNS).format(n=concurrency) + " |"
    lines = [head, "|" + " --- |" * len(COLUMNS)]
    for path, row in rows.items():
        cells = [f"{row['ttft_ms']:.1f} ms", "", f"{row['tokens_per_s']:.0f}", "", "", ""]
        cells += [f"{row['engine_cpu_ms']:.3f} ms", ""]
        if path != "bare":
            low, middle, high = row["added_ttft_ms"]
            cells[1] = f"{middle:+.1f} ms ({low:+.1f}, {high:+.1f})"
            cells[3] = f"{100 * row['throughput_ratio']:.0f} %"
            cells[4] = f"{row['ingress_cpu_ms']:.3f} ms"
            above = ("ingress_cpu_above_rest_ms", "ingress_cpu_above_rest_single_ms")
            cells[5] = " / ".join(f"{row[name]:.3f}" for name in above) + " ms"
            cells[7] = f"{row['client_cpu_ms']:.3f} ms"
        lines.append(f"| {path} | " + " | ".join(cells) + " |")
    lines.append(
        f"| target | | at most {TARGETS['ttft_ms']:g} ms | | at least "
        f"{100 * TARGETS['throughput']:.0f} % | at most {TARGETS['cpu_ms']:g} ms | | | |"
    )
    return "\n".join(lines)
