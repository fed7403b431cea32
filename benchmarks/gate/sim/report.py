"""What a simulated run was worth: figures of its jobs, tables over seeds, a picture.

Counted are the requests that came after the first part of the run (in which predictors know
nothing and queues are empty), until the last one came; they are followed to their ends.

Fairness between tenants is Jain's index of what each was served, divided by its max-min fair share
of all that was served: as much as it demanded, or, if it demanded more, an equal part of the
rest. Tokens alone do not tell: a tenant that asks for a tenth of another's may get all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gate.sim.loads import Slo
from benchmarks.gate.sim.worker import Job

COLUMNS = (
    ("preempted_100", "preempted /100", "{:.1f}"),
    ("recomputed_pct", "again, %", "{:.1f}"),
    ("tokens_s", "tokens/s", "{:.0f}"),
    ("goodput", "good/s", "{:.3f}"),
    ("refused_pct", "refused, %", "{:.1f}"),
    ("ttft_p50", "TTFT p50, s", "{:.2f}"),
    ("ttft_p99", "p99", "{:.1f}"),
    ("tpot_p50_ms", "TPOT p50, ms", "{:.0f}"),
    ("tpot_p99_ms", "p99", "{:.0f}"),
    ("gap_p99", "longest gap p99, s", "{:.2f}"),
)

BY_TENANT = (
    ("jain", "Jain, tokens", "{:.2f}"),
    ("fairness", "Jain, of fair shares", "{:.3f}"),
    ("least_good_pct", "least good of a tenant, %", "{:.0f}"),
)


def figures(
    jobs: Sequence[Job], tokens: int, prefilled: int, window: tuple[float, float], slo: Slo
) -> dict[str, float]:
    """Of one run: `tokens` came out in the window; `prefilled` in the whole run."""
    counted = [each for each in jobs if each.arrived >= window[0]]
    seconds = window[1] - window[0]
    done = [each for each in counted if each.outcome == "done"]
    first = np.array([each.first_at - each.arrived for each in done if each.first_at is not None])
    pace = np.array(
        [(e.last_at - (e.first_at or 0.0)) / max(e.generated - 1, 1) for e in done], np.float64
    )
    gaps = np.array([each.longest_gap for each in done])
    good = (first <= slo.ttft) & (pace <= slo.tpot) & (gaps <= slo.gap)
    again = sum(each.num_recomputed for each in jobs)
    computed = prefilled + sum(each.generated for each in jobs)
    served: dict[str, float] = defaultdict(float)
    for each in done:
        if each.last_at <= window[1]:
            served[each.tenant] += each.prompt + each.generated
    demand: dict[str, float] = defaultdict(float)
    num_asked: dict[str, int] = defaultdict(int)
    num_good: dict[str, int] = defaultdict(int)
    for each in counted:
        demand[each.tenant] += each.prompt + each.length
        num_asked[each.tenant] += 1
    for each, is_good in zip(done, good):
        num_good[each.tenant] += bool(is_good)
    return {
        "preempted_100": 100 * sum(e.num_preemptions for e in counted) / max(len(done), 1),
        "recomputed_pct": 100 * again / max(computed, 1),
        "tokens_s": tokens / seconds,
        "done_s": len(done) / seconds,
        "offered_s": len(counted) / seconds,
        "goodput": float(good.sum()) / seconds,
        "refused_pct": 100 * sum(e.outcome == "refused" for e in counted) / max(len(counted), 1),
        "ttft_p50": _quantile(first, 0.5),
        "ttft_p99": _quantile(first, 0.99),
        "tpot_p50_ms": 1e3 * _quantile(pace, 0.5),
        "tpot_p99_ms": 1e3 * _quantile(pace, 0.99),
        "gap_p99": _quantile(gaps, 0.99),
        "jain": jain(list(served.values())),
        "fairness": fairness(served, demand),
        "least_good_pct": min(100 * num_good[t] / n for t, n in num_asked.items()),
        "service_gap": max(served.values(), default=0.0) - min(served.values(), default=0.0),
    }


def _quantile(values: Any, level: float) -> float:
    return float(np.quantile(values, level)) if len(values) else 0.0


def spread(runs: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation over seeds."""
    return {
        key: {
            "mean": float(np.mean([run[key] for run in runs])),
            "sd": float(np.std([run[key] for run in runs], ddof=1)) if len(runs) > 1 else 0.0,
        }
        for key in runs[0]
    }


def table(by_load: dict[str, dict[str, dict[str, float]]], *, by_tenant: bool = False) -> str:
    """Policies in rows; means and, in brackets, standard deviations over seeds."""
    columns = [*COLUMNS, *(BY_TENANT if by_tenant else ())]
    lines = ["| policy | " + " | ".join(name for _, name, _ in columns) + " | CPU ms/request |"]
    lines.append("|" + "---|" * (len(columns) + 2))
    for policy, each in by_load.items():
        cells = [
            f"{form.format(each[key]['mean'])} ({form.format(each[key]['sd'])})"
            for key, _, form in columns
        ]
        cells.append(f"{each['policy_ms']['mean']:.2f}")
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def claims(by_load: dict[str, dict[str, Any]]) -> list[str]:
    """What was to be shown, load by load, as far as the loads and policies were run."""

    def of(load: str, policy: str, key: str) -> float | None:
        each = by_load.get(load, {}).get(policy)
        return None if each is None else float(each[key]["mean"])

    def line(load: str, ours: str, theirs: str, key: str, what: str, inverse: bool) -> None:
        one, other = of(load, ours, key), of(load, theirs, key)
        if one is None or other is None:
            return
        top, bottom = (other, one) if inverse else (one, other)
        ratio = f"{top / bottom:.2f}" if bottom else "infinitely many"
        lines.append(f"{load}: {what} of {ours} and {theirs}: {one:.3g}, {other:.3g} ({ratio} x)")

    lines: list[str] = []
    mine = "predicted"
    line("reasoning", mine, "optimistic", "preempted_100", "preemptions /100", True)
    line("reasoning", mine, "optimistic", "tokens_s", "throughput", False)
    line("overload", mine, "optimistic, cap", "goodput", "goodput", False)
    line("overload", mine, "optimistic, cap", "tpot_p99_ms", "TPOT p99 (ms)", True)
    line("generous", mine, "reserve-max", "tokens_s", "throughput", False)
    line("generous", mine, "reserve-max", "goodput", "goodput", False)
    return lines


def draw(path: Path, by_load: dict[str, dict[str, Any]]) -> None:
    """Bars by load and policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("preempted_100", "preemptions per 100 requests", True),
        ("goodput", "good requests, of those offered", False),
        ("tpot_p99_ms", "TPOT p99, ms", True),
        ("ttft_p99", "TTFT p99, s", True),
    )
    policies = list(dict.fromkeys(name for each in by_load.values() for name in each))
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 7.5))
    width = 0.8 / len(policies)
    for axis, (key, title, is_log) in zip(axes.ravel(), panels):
        for i, policy in enumerate(policies):
            rows = [each.get(policy) for each in by_load.values()]
            means = np.array([row[key]["mean"] if row else np.nan for row in rows])
            errors = np.array([row[key]["sd"] if row else 0.0 for row in rows])
            if key == "goodput":
                offered = np.array([row["offered_s"]["mean"] if row else 1.0 for row in rows])
                means, errors = means / offered, errors / offered
            at = np.arange(len(by_load)) + (i - (len(policies) - 1) / 2) * width
            axis.bar(at, means, width, yerr=errors, label=policy, error_kw={"lw": 0.7})
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(by_load)), list(by_load), fontsize=9)
        if is_log:
            axis.set_yscale("symlog", linthresh=1)
        axis.set_ylim(bottom=0.0)
    axes[0][1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all are equal, 1 / n if one has everything."""
    squares = sum(each * each for each in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def fair_shares(demand: Mapping[str, float], total: float) -> dict[str, float]:
    """Max-min fair: the smallest wishes first, each at most an equal part of what is left."""
    shares: dict[str, float] = {}
    left = total
    for number, tenant in enumerate(sorted(demand, key=lambda each: demand[each])):
        shares[tenant] = min(demand[tenant], left / (len(demand) - number))
        left -= shares[tenant]
    return shares


def fairness(served: Mapping[str, float], demand: Mapping[str, float]) -> float:
    """Jain's index of what each was served over its fair share of all that was: 1 is fair."""
    shares = fair_shares(demand, sum(served.values()))
    return jain([served.get(each, 0.0) / share for each, share in shares.items() if share])
