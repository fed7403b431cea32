"""The tables of benchmarks/memory/pressure.py, from its results."""

from __future__ import annotations

import statistics
from typing import Any


def summary(pool: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each variant: medians over the rounds of ratios within a round, and sums of counts."""
    first = next(iter(pool["rows"].values()))
    found = []
    for name, rows in pool["rows"].items():
        entry: dict[str, Any] = {"name": name}
        for key in ("seconds", "cpu_s"):
            ratios = [a[key] / b[key] for a, b in zip(first, rows)]
            entry[f"speed_{key}"] = statistics.median(ratios)
            entry[f"speed_{key}_range"] = [min(ratios), max(ratios)]
        counts = [key for key in rows[0] if key not in ("seconds", "cpu_s")]
        entry |= {key: sum(row[key] for row in rows) for key in counts}
        entry["tokens_per_s"] = entry["num_generated_tokens"] / sum(row["seconds"] for row in rows)
        found.append(entry)
    return found


def report(found: dict[str, Any]) -> str:
    """What was measured, as text."""
    about = found["about"]
    first, last = about["load_averages"]
    lines = [
        f"{about['date']}, {about['cores']} cores ({about['machine']}), load average {first:.1f} "
        f"before and {last:.1f} after; builtin in {about['dtype']}, one thread",
        f"{about['args']['requests']} requests at once, counts are sums of "
        f"{about['args']['rounds']} rounds; speed: tokens/s over eager's in the same round, "
        "median (least-most), by the clock and by CPU time",
    ]
    for pool in found["pools"]:
        lines += ["", *_pool(pool)]
    lines += ["", *_links(found["links"])]
    lines += ["", "All variants gave the same ids in every round."]
    return "\n".join(lines) + "\n"


def _pool(pool: dict[str, Any]) -> list[str]:
    measured, load = next(iter(pool["ridges"].values())), pool["load"]
    lines = [
        f"{pool['name']}: {load['num_blocks']} blocks, prompts of {load['prompt'][0]}-"
        f"{load['prompt'][1]} and answers of {load['answer'][0]}-{load['answer'][1]} tokens "
        f"(measured ridge: {measured:g} rows)",
        f"{'':<28}{'tokens/s':>9}{'speed':>19}{'by CPU':>19}{'preempted':>11}{'avoided':>9}"
        f"{'prompt again':>14}{'passes':>8}{'loaded':>8}{'steps':>7}",
    ]
    for each in pool["summary"]:
        lines.append(
            f"{each['name']:<28}{each['tokens_per_s']:9.0f}{_ratio(each, 'seconds'):>19}"
            f"{_ratio(each, 'cpu_s'):>19}{each['num_preemptions']:11}"
            f"{each['num_preemptions_avoided']:9}{each['computed_again']:14,}"
            f"{each['num_recomputed_tokens']:8,}{each['num_loaded_tokens']:8,}"
            f"{each['num_steps']:7,}"
        )
    return lines


def _ratio(each: dict[str, Any], key: str) -> str:
    low, high = each[f"speed_{key}_range"]
    return f"{each[f'speed_{key}']:.2f} ({low:.2f}-{high:.2f})"


def _links(rows: list[dict[str, Any]]) -> list[str]:
    even = rows[0]["break_even_bytes_per_s"] / 1e6
    lines = [
        "Prompts of 1,024 tokens that come back from host memory, one at a time; medians of the "
        "visits, and the fastest.",
        f"Computing is as fast as a link of {even:.1f} MB/s (measured at the start)",
        f"{'link':<14}{'MB/s':>9}  {'kv_restore':<11}{'chose':<18}{'loaded':>8}{'computed':>10}"
        f"{'first token, ms':>17}{'fastest':>9}",
    ]
    for row in rows:
        lines.append(
            f"{row['link']:<14}{row['bytes_per_s'] / 1e6:9.1f}  {row['mode']:<11}"
            f"{', '.join(row['chosen']):<18}{row['loaded']:8.0f}{row['computed']:10.0f}"
            f"{1e3 * row['seconds']:17.0f}{1e3 * row['least_seconds']:9.0f}"
        )
    return lines
