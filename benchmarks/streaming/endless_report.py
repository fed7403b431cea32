"""The table and the plot of benchmarks/streaming/endless.py: whether memory and time stay flat."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock.workers.context_policy import SinkWindow


def flatness(found: dict[str, Any], policy: SinkWindow) -> dict[str, Any]:
    """From the first roll to the end of the answer."""
    first = policy.full_tokens - found["prompt_tokens"]
    arrivals = found["arrivals_s"]
    pauses = [b - a for a, b in pairwise(arrivals)]
    samples = [each for each in found["samples"] if each["num_tokens"] > first + policy.roll]
    if len(samples) < 8:
        raise SystemExit("endless: too few tokens after the first roll to say anything")
    alone = [each["num_live_blocks"] for each in samples if each["num_running"] == 1]
    at = np.array([each["num_tokens"] for each in samples])
    quarter = (len(arrivals) - first) // 4
    edges = [first + i * quarter for i in range(5)]
    edges[-1] = len(arrivals) - 1
    times = [(arrivals[b] - arrivals[a]) / (b - a) for a, b in pairwise(edges)]
    look_at = [each["num_tokens"] for each in found["samples"]]
    cpu_s = [each["worker_cpu_s"] for each in found["samples"]]
    used = [float(np.interp(edge, look_at, cpu_s)) for edge in edges]
    used_per_token = [(b - a) / quarter for a, b in pairwise(used)]

    def slope(name: str) -> float:
        return float(np.polyfit(at / 1000, [each[name] for each in samples], 1)[0])

    return {
        "first_roll_at": first,
        "rolls": int((len(arrivals) - first) // policy.roll + 1),
        "blocks_alone": [min(alone), max(alone)],
        "blocks_beside": max(each["num_live_blocks"] for each in samples),
        "blocks_of_a_roll": math.ceil(policy.roll / policy.block_size) + 1,
        "samples_alone": len(alone),
        "samples": len(samples),
        "rss_slope_mib": slope("worker_rss_mib"),
        "pss_slope_mib": slope("worker_pss_mib"),
        "ingress_slope_mib": slope("ingress_rss_mib"),
        "rss_mib": [samples[0]["worker_rss_mib"], samples[-1]["worker_rss_mib"]],
        "ms_by_quarter": [1e3 * each for each in times],
        "pause_s": {"p99": float(np.quantile(pauses, 0.99)), "longest": max(pauses)},
        "time_ratio": times[-1] / times[0],
        "cpu_ms_by_quarter": [1e3 * each for each in used_per_token],
        "cpu_ratio": used_per_token[-1] / used_per_token[0],
    }


def report(found: dict[str, Any], num_stretches: int) -> str:
    """What was measured, as text."""
    flat, policy, about = found["flatness"], found["policy"], found["about"]
    first, last = found["load_averages"]
    low, high = flat["blocks_alone"]
    quarters = " ".join(f"{each:.2f}" for each in flat["ms_by_quarter"])
    cpu = " ".join(f"{each:.2f}" for each in flat["cpu_ms_by_quarter"])
    neighbours = found["neighbours"]
    same = {None: "not checked", True: "equal", False: "NOT EQUAL"}[found["same_answer"]]
    lines = [
        f"{about['date']}, {about['cores']} cores ({about['machine']}), load average {first:.1f} "
        f"before and {last:.1f} after",
        f"builtin; {policy['sinks']} sinks, window {policy['window']}, roll {policy['roll']}, "
        f"blocks of {policy['block_size']}; {about['args']['num_blocks']} blocks, "
        f"{about['args']['threads']} compute thread",
        "",
        f"with the full context: {found['refusal']}",
        f"with a sink window:    {found['completion_tokens']:,} tokens, "
        f"{found['evicted_tokens']:,} evicted, ended by {found['finish_reason']}",
        "",
        *_table(found, num_stretches),
        "",
        f"From the first roll ({flat['first_roll_at']:,} tokens) to the end, {flat['rolls']} of "
        "them:",
        f"  KV blocks of the answer alone: {low} to {high} in {flat['samples_alone']} samples (a "
        f"roll is {flat['blocks_of_a_roll'] - 1}, and one more may be partly filled); with "
        f"neighbours up to {flat['blocks_beside']}",
        f"  worker's memory: {flat['rss_mib'][0]:.1f} MiB at first, {flat['rss_mib'][1]:.1f} in "
        f"the end; fitted {1024 * flat['rss_slope_mib']:+.1f} KiB of RSS and "
        f"{1024 * flat['pss_slope_mib']:+.1f} KiB of PSS each 1,000 tokens (PSS also moves "
        "with who else maps the same pages)",
        f"  ingress's memory: {1024 * flat['ingress_slope_mib']:+.1f} KiB each 1,000 tokens",
        f"  ms per token by quarter: {quarters}; last over first {flat['time_ratio']:.2f}",
        f"  between tokens of the answer: p99 {1e3 * flat['pause_s']['p99']:.0f} ms, longest pause "
        f"{flat['pause_s']['longest']:.2f} s, at the client",
        f"  worker's CPU ms per token by quarter: {cpu}; last over first {flat['cpu_ratio']:.2f}",
        f"Neighbours: {neighbours['finished']} of {neighbours['num']} finished, "
        f"{neighbours['same_ids']} with the ids that they get alone",
        *(f"  {error}" for error in neighbours["errors"]),
        f"The answer against a bare engine that does nothing else: {same}",
        "",
        f"begins: {found['begins']!r}",
        f"ends:   {found['ends']!r}",
    ]
    return "\n".join(lines) + "\n"


def _table(found: dict[str, Any], num_stretches: int) -> list[str]:
    arrivals, samples = found["arrivals_s"], found["samples"]
    lines = [
        f"{'tokens up to':>12}{'blocks alone':>14}{'with all':>10}{'RSS, MiB':>10}"
        f"{'PSS, MiB':>10}{'ingress':>9}{'ms/token':>10}{'CPU ms':>8}"
    ]
    edges = [len(arrivals) * i // num_stretches for i in range(num_stretches + 1)]
    at = [each["num_tokens"] for each in samples]
    cpu = np.interp(edges, at, [each["worker_cpu_s"] for each in samples])
    for i, (begin, end) in enumerate(pairwise(edges)):
        inside = [each for each in samples if begin < each["num_tokens"] <= end]
        if not inside:
            continue
        alone = [each["num_live_blocks"] for each in inside if each["num_running"] == 1]
        span = f"{min(alone)}-{max(alone)}" if alone else "-"
        most = max(each["num_live_blocks"] for each in inside)
        newest = inside[-1]
        ms = 1e3 * (arrivals[end - 1] - arrivals[begin]) / (end - 1 - begin)
        used = 1e3 * (cpu[i + 1] - cpu[i]) / (end - begin)
        lines.append(
            f"{end:12,}{span:>14}{most:10}{newest['worker_rss_mib']:10.1f}"
            f"{newest['worker_pss_mib']:10.1f}{newest['ingress_rss_mib']:9.1f}{ms:10.2f}{used:8.2f}"
        )
    return lines


def plot(found: dict[str, Any], out: Path) -> None:
    """Blocks, memory and time over the length of the answer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples, flat = found["samples"], found["flatness"]
    at = np.array([each["num_tokens"] for each in samples])
    figure, axes = pyplot.subplots(3, 1, figsize=(8, 8), sharex=True)
    alone = np.array([each["num_running"] == 1 for each in samples])
    blocks = np.array([each["num_live_blocks"] for each in samples])
    axes[0].plot(at[~alone], blocks[~alone], ".", markersize=3, label="with neighbours")
    axes[0].plot(at[alone], blocks[alone], ".", markersize=3, label="the answer alone")
    axes[0].set_ylabel("live KV blocks")
    axes[1].plot(at, [each["worker_rss_mib"] for each in samples], label="worker, RSS")
    axes[1].plot(at, [each["worker_pss_mib"] for each in samples], label="worker, PSS")
    axes[1].plot(at, [each["ingress_rss_mib"] for each in samples], label="ingress, RSS")
    axes[1].set_ylabel("MiB")
    step = int(found["about"]["args"]["every"])
    times = 1e3 * np.diff(found["arrivals_s"][::10]) / step  # of those kept: 10 each `every`
    axes[2].plot(step * (np.arange(len(times)) + 0.5), times, label=f"mean of {step} tokens")
    axes[2].set_ylabel("ms per token")
    axes[2].set_xlabel("tokens of the answer")
    for axis in axes:
        axis.axvline(flat["first_roll_at"], color="black", linestyle=":", linewidth=1)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_title("dotted: the first roll", fontsize=9, loc="left")
    figure.tight_layout()
    figure.savefig(out, dpi=90)
