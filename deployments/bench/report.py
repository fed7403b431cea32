"""Writes the figures of a benchmark as a table, a JSON file, or a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.deployments.bench.figures import Outcome
from penstock.workers.errors import ConfigError

COLUMNS = ("mean", "p50", "p90", "p99", "max")
PLOT_REMEDY = "--plot needs matplotlib: pip install 'penstock[bench]', or pip install matplotlib"
OF_THE_CLIENT = ("client_held_ms", "client_late_ms")
NOTEWORTHY_MS = 0.5  # below it, the client had no part in what was measured
LATE_MS = 10.0  # at p99: with later requests the load was not open-loop

ROWS = {
    "ttft_ms": "time to first token (TTFT)",
    "tpot_ms": "time per token after it (TPOT)",
    "itl_ms": "inter-token time (ITL)",
    "pause_ms": "pause between chunks",
    "e2e_ms": "whole request (E2E)",
    "client_held_ms": "delayed by --max-concurrency",
    "client_late_ms": "delayed by the client itself",
    "step_ms": "engine step",
    "step_prefill_ms": "steps that prefill",
    "step_decode_ms": "steps that only decode",
}


def table(figures: Mapping[str, Any]) -> str:
    """All figures, as lines for the terminal."""
    lines = [*_counts(figures), ""]
    lines.append(f"{'milliseconds':32}" + "".join(f"{name:>10}" for name in COLUMNS))
    for name, label in ROWS.items():
        row = figures.get(name)
        if row is not None and (name not in OF_THE_CLIENT or row["max"] > NOTEWORTHY_MS):
            lines.append(f"{label:32}" + "".join(f"{_short(row[c]):>10}" for c in COLUMNS))
    return "\n".join([*lines, *_remarks(figures)])


def _counts(figures: Mapping[str, Any]) -> list[str]:
    rows = [
        ("requests completed", f"{figures['num_completed']} of {figures['num_requests']}"),
        ("seconds", f"{figures['wall_s']:.2f}"),
        ("requests/s", f"{figures['requests_per_s']:.2f}"),
        ("input tokens, tokens/s", _tokens(figures, "input")),
        ("output tokens, tokens/s", _tokens(figures, "output")),
    ]
    if num_drafts := figures["draft_tokens"]:
        accepted = figures["accepted_draft_tokens"]
        rows.append(("draft tokens, accepted", f"{num_drafts}, {accepted}"))
    if goodput := figures.get("goodput"):
        share = f"{goodput['requests_per_s']:.2f} ({100 * goodput['share']:.0f} %)"
        rows.append(("goodput, requests/s", share))
    rows += [(f"error: {kind}", str(num)) for kind, num in figures["errors"].items()]
    return [f"{label:32}{value}" for label, value in rows]


def _tokens(figures: Mapping[str, Any], kind: str) -> str:
    return f"{figures[f'{kind}_tokens']:,}, {figures[f'{kind}_tokens_per_s']:,.1f}"


def _remarks(figures: Mapping[str, Any]) -> list[str]:
    """What a reader of the figures has to know."""
    remarks = []
    if figures.get("num_cut"):
        remarks.append(f"{figures['num_cut']} answers were cut by the client at the wanted length")
    if counts := figures.get("token_counts"):
        ways = ", ".join(f"{how} ({num})" for how, num in counts.items())
        remarks.append(f"tokens of a chunk, by answers: {ways}")
    if figures.get("input_tokens_estimated"):
        num = figures["input_tokens_estimated"]
        remarks.append(f"input tokens of {num} answers as planned: the server did not say")
    late = figures.get("client_late_ms")
    if late is not None and late["p99"] > LATE_MS:
        remarks.append(
            f"WARNING: this client was late by {late['p99']:.0f} ms (p99): the load was not as"
            " planned; run it on a machine of its own, or lower the rate"
        )
    return ["", *remarks] if remarks else []


def _short(number: float) -> str:
    """Three digits or so."""
    if number == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:.{min(digits, 3)}f}"


def write_json(path: str, content: Mapping[str, Any]) -> None:
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def request_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row per request, for figures that the table does not have. Times in seconds from the
    first request's start."""
    began_s = min((each.sent_s for each in outcomes), default=0.0)
    rows = []
    for each in outcomes:
        counts, how = each.token_counts() if each.chunks else ([], None)
        rows.append(
            {
                "planned_s": each.job.at_s,
                "sent_s": each.sent_s - began_s,
                "ended_s": each.ended_s - began_s,
                "prompt_tokens": each.prompt_tokens,
                "wanted_output_tokens": each.job.output_tokens,
                "output_tokens": each.num_output_tokens(),
                "chunks_s": [chunk.at_s - began_s for chunk in each.chunks],
                "chunk_tokens": counts,
                "token_counts": how,
                "was_cut": each.was_cut,
                "error": each.error,
            }
        )
    return rows


def check_plot(path: str | None) -> None:
    """Raise ConfigError before a run whose picture could not be made after it."""
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(PLOT_REMEDY) from None


def plot(path: str, outcomes: Sequence[Outcome], title: str) -> None:
    """Four panels: the distributions of TTFT, of ITL and TPOT, and over time the requests under
    way and the tokens that came."""
    import numpy as np
    from matplotlib.figure import Figure

    answered = [each for each in outcomes if each.error is None and each.chunks]
    figure = Figure(figsize=(11, 7), layout="constrained")
    (first, later), (load, flow) = figure.subplots(2, 2)
    figure.suptitle(title)
    _cumulative(first, "TTFT", [each.ttft_s * 1e3 for each in answered])
    _cumulative(later, "ITL", [t * 1e3 for each in answered for t in each.itl_s()])
    _cumulative(later, "TPOT", [t * 1e3 for each in answered if (t := each.tpot_s()) is not None])
    for panel, label in ((first, "time to first token, ms"), (later, "time per token, ms")):
        panel.set(xlabel=label, ylabel="share of samples", ylim=(0, 1))
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend()
    began_s = min((each.sent_s for each in outcomes), default=0.0)
    changes = sorted(
        (at_s - began_s, step)
        for each in outcomes
        for at_s, step in ((each.sent_s, 1), (each.ended_s, -1))
    )
    load.step([at_s for at_s, _ in changes], np.cumsum([step for _, step in changes]), where="post")
    load.set(xlabel="seconds", ylabel="requests under way")
    times = [chunk.at_s - began_s for each in answered for chunk in each.chunks]
    if times:
        counts = [num for each in answered for num in each.token_counts()[0]]
        width_s = max(max(times) / 60, 1e-3)
        totals, edges = np.histogram(times, bins=60, range=(0, 60 * width_s), weights=counts)
        flow.stairs(totals / width_s, edges, fill=True, alpha=0.6)
    flow.set(xlabel="seconds", ylabel="output tokens/s")
    figure.savefig(path, dpi=120)


def _cumulative(panel: Any, label: str, values: Sequence[float]) -> None:
    ordered = sorted(values)
    if ordered:
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        panel.step(ordered, shares, where="post", label=label)
