"""Tables of the same benchmark at several commits, which took turns in one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tools.result_files import Result, fixed, markdown

PATH_FIGURES = (
    ("ttft_ms", "TTFT, ms", 2),
    ("tokens_per_s", "tokens/s", 0),
    ("ingress_cpu_ms", "ingress CPU a token, ms", 4),
    ("engine_cpu_ms", "worker CPU a token, ms", 4),
)


def engines(results: Sequence[Result]) -> str:
    """Old and new engine by workload: seconds, the rounds' ratios, and whether ids agree."""
    head = ("workload", "rounds", "old, s", "new, s", "new / old", "of the rounds", "token ids")
    rows = []
    for result in results:
        old, new = result.figures["runs"]["old"], result.figures["runs"]["new"]
        ratios = sorted(b["total_s"] / a["total_s"] for a, b in zip(old, new, strict=True))
        digests = {each["digest"] for each in (*old, *new)}
        rows.append(
            (
                result.figures["workload"],
                str(len(ratios)),
                fixed(statistics.median(each["total_s"] for each in old), 2),
                fixed(statistics.median(each["total_s"] for each in new), 2),
                fixed(statistics.median(ratios), 3),
                f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
                "equal" if len(digests) == 1 else "differ",
            )
        )
    return markdown(head, rows)


def path(result: Result) -> str:
    """The way through the cluster: medians, and in brackets those of the rounds' ratios to the
    first commit."""
    rounds: list[dict[str, Any]] = result.figures["rounds"]
    names = list(result.figures["commits"])
    rows = []
    for front in rounds[0][names[0]]:
        for name in names:
            cells = []
            for figure, _, digits in PATH_FIGURES:
                values = [each[name][front][figure] for each in rounds]
                base = [each[names[0]][front][figure] for each in rounds]
                ratio = statistics.median(v / b for v, b in zip(values, base, strict=True))
                cells.append(f"{statistics.median(values):.{digits}f} ({ratio:.3f})")
            rows.append((front, result.figures["commits"][name], *cells))
    return markdown(("front end", "commit", *(title for _, title, _ in PATH_FIGURES)), rows)


def startup(result: Result) -> str:
    """What a start takes, by phase, and the memory at rest by process: medians of the starts."""
    summaries: dict[str, dict[str, Any]] = result.figures["summary"]
    starts = result.figures["starts"]
    head = ("", *(f"{name}, {len(starts[name])} starts" for name in summaries))
    rows: list[tuple[object, ...]] = []

    def add(what: str, values: Sequence[float | None], unit: str, digits: int = 1) -> None:
        rows.append((what, *(fixed(each, digits, unit) for each in values)))

    each = list(summaries.values())
    add("**CPU time until ready**", [one["cpu_s"] for one in each], " s")
    add("ready after the call", [one["ready_s"] for one in each], " s")
    for phase in each[0]["phases_s"]:
        add(f"of which: {phase}", [one["phases_s"][phase] for one in each], " s")
    if "replaced_s" in each[0]:
        add("a killed worker is replaced after", [one["replaced_s"] for one in each], " s")
    add("**memory at rest, PSS**", [one["total_pss_mb"] for one in each], " MB", 0)
    for role in dict.fromkeys(role for one in each for role in one["pss_mb"]):
        add(role, [one["pss_mb"].get(role) for one in each], " MB", 0)
    return markdown(head, rows)
