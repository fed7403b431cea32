"""The table of a model's loads: without packed weights on the disk, storing and reading them."""

from __future__ import annotations

from tools.result_files import Result, fixed, markdown


def packed_weights(result: Result) -> str:
    """Seconds, CPU seconds and peak memory of each kind of load, medians of the rounds."""
    figures = result.figures
    head = (f"weights ({figures['model']})", "MiB", "without", "storing them", "reading them",
            "reading / without", "CPU time, without", "reading", "peak of memory, without",
            "reading")  # fmt: skip
    rows = [
        (
            f"`{row['format']}`",
            row["weights_mib"],
            *(fixed(row[f"{kind}_seconds"], 2, " s") for kind in ("none", "stored", "read")),
            fixed(row["ratio"], 3),
            *(fixed(row[f"{kind}_cpu_s"], 1, " s") for kind in ("none", "read")),
            *(fixed(row[f"{kind}_peak_mib"], 0, " MiB") for kind in ("none", "read")),
        )
        for row in figures["rows"]
    ]
    return markdown(head, rows)
