"""Table of long prompts: seconds and memory of Penstock, OpenVINO GenAI and llama.cpp."""

from __future__ import annotations

from tools.result_files import Result, fixed, markdown


def long_prompts(result: Result) -> str:
    """`grown`: memory at most, beyond that of the warm model. Ratios are to the first system."""
    rows = result.figures["rows"]
    base = rows[0]["run"]
    head = ("tokens", "threads", "system", "prefill", f"of {base}", "grown", "K and V by plan")
    return markdown(
        head,
        [
            (
                f"{row['tokens']:,}",
                row["threads"],
                row["run"],
                fixed(row["seconds"], 2, " s"),
                fixed(row["ratio"], 2, "x"),
                fixed(row["grown_mib"], 1, " MiB"),
                "" if row["planned_kv_mib"] is None else fixed(row["planned_kv_mib"], 1, " MiB"),
            )
            for row in rows
        ],
    )
