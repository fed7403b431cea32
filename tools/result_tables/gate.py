"""Tables of the gate: simulations, its latency and its CPU, and the autoscaler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.result_files import Result, fixed, markdown, signed, significant


def simulate(result: Result, load: str, *, fairness: bool = False, prefixes: bool = False) -> str:
    """The admission policies under one simulated load: means over the seeds."""
    head = ["policy", "preempted /100", "tokens/s", "good/s", "refused"]
    head += ["TTFT p99, s", "TPOT p99, ms", "gap p99, s"]
    head += ["Jain, tokens", "Jain, fair shares"] if fairness else []
    head += ["TTFT p50, s", "prompt tokens cached"] if prefixes else []
    rows = []
    for policy, row in result.figures["loads"][load].items():
        mean = {key: value["mean"] for key, value in row.items() if isinstance(value, Mapping)}
        cells = [
            policy,
            significant(mean["preempted_100"]),
            fixed(mean["tokens_s"], 0),
            fixed(mean["goodput"], 2),
            fixed(mean["refused_pct"], 0, " %"),
            significant(mean["ttft_p99"]),
            fixed(mean["tpot_p99_ms"], 0),
            significant(mean["gap_p99"]),
        ]
        cells += [fixed(mean["jain"], 2), fixed(mean["fairness"], 3)] if fairness else []
        if prefixes:
            cells += [fixed(mean["ttft_p50"], 2), fixed(mean["prefix_hit_pct"], 0, " %")]
        rows.append(cells)
    return markdown(head, rows)


def real_engine(result: Result) -> str:
    head = (
        *("requests/s", "policy", "preempted /100", "tokens computed again", "TTFT p99, s"),
        *("TPOT p99, ms", "gap p99, s", "good/s", "step, ms"),
    )
    rows = [
        (
            run["args"]["rate"],
            f"{policy}, {kind}",
            significant(row["preempted_100"]),
            fixed(row["recomputed"], 0),
            fixed(row["ttft_p99"], 2),
            fixed(row["tpot_p99_ms"]),
            fixed(row["gap_p99"], 2),
            fixed(row["goodput"], 2),
            fixed(row["step_ms"], 2),
        )
        for run in result.runs
        for policy in run["real"]
        for kind, row in (("real", run["real"][policy]), ("simulated", run["simulated"][policy]))
    ]
    return markdown(head, rows)


def gate_latency(result: Result) -> str:
    names = {"none": "without the gate", "pass": "on admission credit", "ask": "asking the gate"}
    head = ("path", "TTFT p50", "p95", "added at p50", "median of pairs")
    rows = [
        (
            names[path],
            fixed(row["p50_ms"], 2, " ms"),
            fixed(row["p95_ms"], 2, " ms"),
            signed(row["added_p50_ms"], 2, " ms") if path != "none" else None,
            signed(row["added_median_of_pairs_ms"], 2, " ms") if path != "none" else None,
        )
        for path, row in result.figures["paths"].items()
    ]
    return markdown(head, rows)


def gate_scale(result: Result) -> str:
    head = (
        *("workers", "queue", "requests", "mean waiting", "CPU a request", "of it attempts"),
        *("one core decides", "offered"),
    )
    rows = [_scale_row(row) for row in result.figures["rows"]]
    return markdown(head, rows)


def _scale_row(row: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        fixed(row["workers"], 0),
        row["queue"] if row["queue"] == "empty" else "long",
        fixed(row["requests"], 0),
        row["mean_waiting"],
        fixed(row["us_per_request"] / 1e3, 2, " ms"),
        fixed(row["tick_us"] / 1e3, 2, " ms"),
        f"{row['one_core_requests_per_s']:,}/s",
        f"{row['offered_requests_per_s']:,}/s",
    )


def gate_request(result: Result) -> str:
    parts = ("predict", "offer", "tick", "reports", "learn, running", "learn, ends")
    head = ("load", "refused", "answer, tokens", "CPU a request", *parts, "the rest")
    rows = [
        (
            name,
            f"{row['refused']:.0f} of {row['requests']:.0f}",
            fixed(row["answer_tokens"], 0),
            fixed(row["us"] / 1e3, 2, " ms"),
            *(fixed(row["parts_us"][part] / 1e3, 2) for part in parts),
            fixed((row["us"] - sum(row["parts_us"][part] for part in parts)) / 1e3, 2),
        )
        for name, row in result.figures["cases"].items()
    ]
    return markdown(head, rows)


def retry_after(result: Result) -> str:
    head = (
        *("load", "refusals", "quoted, p50", "admissible after, p50", "off by, p50"),
        *("quoted too little", "admitted at the return", "never admitted"),
    )
    rows = [
        (
            row["load"],
            f"{row['refusals']:.0f}",
            *(fixed(row[f"{key}_p50_s"], 1, " s") for key in ("quoted", "admissible_after")),
            fixed(row["off_by_p50_s"], 1, " s"),
            fixed(row["quoted_too_little_pct"], 0, " %"),
            fixed(row["admitted_at_return_pct"], 0, " %"),
            fixed(row["never_admitted_pct"], 0, " %"),
        )
        for row in result.figures["rows"]
    ]
    return markdown(head, rows)


def autoscale(result: Result, starts: Sequence[str] = ("30", "180", "600")) -> str:
    """Waits and worker-hours of autoscaling policies, means over seeds."""
    head = ("load", "start-up", "policy", "wait p50", "wait p99", "worker-hours", "moves/h")
    rows = [
        (
            load,
            f"{start} s",
            policy,
            fixed(each["wait_p50"]["mean"], 1, " s"),
            fixed(each["wait_p99"]["mean"], 1, " s"),
            fixed(each["worker_hours"]["mean"], 1),
            fixed(each["moves_per_hour"]["mean"], 0),
        )
        for load, by_start in result.figures["loads"].items()
        for start, policies in by_start.items()
        if start in starts
        for policy, each in policies.items()
    ]
    return markdown(head, rows)


def predictor(result: Result) -> str:
    head = ("requests", "predictor", "MAE, tokens", "Kendall tau", "NLL, nats", "0.9 covers")
    rows = [
        (
            world,
            name,
            *(fixed(row["all"][key]["mean"], n) for key, n in (("mae", 1), ("tau", 2), ("nll", 3))),
            fixed(row["all"]["coverage_90"]["mean"], 3),
        )
        for world, of_world in result.figures["worlds"].items()
        for name, row in of_world.items()
    ]
    return markdown(head, rows)
