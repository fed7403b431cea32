"""Tables of where ideas about memory pay: benchmarks/memory/where.py."""

from __future__ import annotations

from statistics import median
from typing import Any

from tools.result_files import Result, fixed, markdown

MODES = ("recompute", "load", "split", "auto")


def memory_where(result: Result) -> str:
    """By link the time to the first token of a prompt that returns; by memory what the tail of the
    pool brings."""
    times: dict[float, dict[str, Any]] = {}
    for row in result.figures["host"]:
        times.setdefault(row["link"], {})[row["mode"]] = row
    head = ("link, times the rate of computing", "MB/s", *(f"`{mode}`" for mode in MODES))
    host = [
        (
            f"{link:g}",
            fixed(rows["auto"]["mb_per_s"]),
            *(fixed(rows[mode]["seconds"], 2, " s") for mode in MODES),
        )
        for link, rows in times.items()
    ]
    runs = result.figures["arena"]
    arena = []
    for gb in dict.fromkeys(row["gb"] for row in runs):
        of = {(r["round"], r["mode"]): r for r in runs if r["gb"] == gb}
        rounds = sorted({number for number, _ in of})
        blocks = [of[0, mode]["blocks"] for mode in ("separate", "tail")]
        ratios = [
            median(of[n, "tail"][key] / of[n, "separate"][key] for n in rounds)
            for key in ("tokens_per_s", "ttft_s")
        ]
        shortened = median(of[n, "tail"]["shortened_steps"] for n in rounds)
        more = f"{blocks[0]:,} and {blocks[1] - blocks[0]} more"
        arena.append((f"{gb:g}", more, *(f"{x:.2f}x" for x in ratios), fixed(shortened, 0)))
    columns = ("GiB for KV and activations", "blocks", "tokens/s", "mean TTFT", "shortened steps")
    return "\n\n".join((markdown(head, host), markdown(columns, arena)))
