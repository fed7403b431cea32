"""Tables of a model over several processes: times, and what the ranks send one another."""

from __future__ import annotations

import statistics

from tools.result_files import Result, fixed, markdown


def times(result: Result) -> str:
    """Medians, ms, with their range over the rounds."""
    rows = result.figures["rows"]
    measures = list(rows[0]["ms"])
    cells = []
    for row in rows:
        found = [row["ms"][what] for what in measures]
        spans = [
            f"{fixed(statistics.median(ms), 1)} ({fixed(min(ms), 1)} to {fixed(max(ms), 1)})"
            for ms in found
        ]
        cells.append([row["weights"], row["kind"], *spans])
    return markdown(["weights", "", *(f"{what}, ms" for what in measures)], cells)


def exchanged(result: Result) -> str:
    """Gathers of a decode step against the formula, and the ranks' waiting."""
    rows = []
    for row in result.figures["rows"]:
        for batch, found in row["exchanged"].items():
            if found:
                waited = [f"{100 * share:.0f} %" for share in found["waited"]]
                received = [
                    fixed(found[which] / 2**10, 1, " KiB") if which in found else "not counted"
                    for which in ("received_bytes", "received_bytes_by_formula")
                ]
                rows.append(
                    [
                        row["weights"], row["kind"], batch, fixed(found["gathers"], 0),
                        found["gathers_by_formula"], *received, ", ".join(waited),
                    ]
                )  # fmt: skip
    head = ["weights", "", "rows", "gathers a step", "by the formula", "received by the first rank"]
    return markdown([*head, "by the formula", "of the time, the ranks wait"], rows)
