"""What `penstock eval` says: the table for the terminal, and the rows of the JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from penstock.deployments.cli.tables import aligned, duration
from penstock.workers.evaluation.eval_set import EvalSet
from penstock.workers.evaluation.figures import Estimate
from penstock.workers.evaluation.judge import Judged

FEW_WINDOWS = 12  # with fewer, the standard errors are themselves uncertain by a quarter
MEASURES = {
    "perplexity": "exp of the mean of -log p over all scored tokens",
    "change": "perplexity / the baseline's over the same tokens - 1; paired by window",
    "kl": "KL(baseline || combination) of the next token's distribution, in nats, over the whole "
    "vocabulary (no truncation), at every scored token",
    "same_top1": "share of scored tokens before which both find the same id the likeliest, behind "
    "the same text (teacher-forced)",
    "greedy": "answers at temperature 0 to the beginnings of the windows, id by id beside the "
    "baseline's: equal_ids is the share of places with the same id, identical the share of whole "
    "answers, before_first_difference the mean number of leading equal ids",
    "bits_per_weight": "of the linear layers in memory, without embedding and head, scales and "
    "zero points included",
    "weight_bytes": "of all weights in memory, embedding and head included",
    "error": "standard error: standard deviation of the windows' means / sqrt(windows)",
    "seconds": "load, score the windows, generate the answers; not a speed benchmark",
}


def envelope() -> dict[str, Any]:
    """What a JSON file of results says of itself."""
    return {"program": "penstock eval", "version": version("penstock"), "measures": MEASURES}


def row_of(judged: Judged) -> dict[str, Any]:
    """One combination as JSON: settings, figures, and the means of each window."""
    combination = judged.combination
    return {
        **asdict(combination),
        "context": str(combination.context),
        "name": str(combination),
        "activations": judged.activations,
        "kv_format": judged.kv,
        "kv_bytes_per_token": judged.kv_bytes_per_token,
        "weight_format": judged.size.format,
        "weight_bytes": judged.size.num_bytes,
        "bits_per_weight": judged.size.bits_per_weight,
        "figures": asdict(judged.figures),
        "nll_of_windows": judged.scores.nll.mean(axis=1).tolist(),
        "kl_of_windows": judged.scores.kl.mean(axis=1).tolist(),
        "seconds": asdict(judged.seconds),
    }


def table(judged: Sequence[Judged], eval_set: EvalSet) -> str:
    """Lines for the terminal; the first row is the baseline."""
    base = judged[0].figures.perplexity
    head = [
        *("weights", "KV", "context", "MiB", "bits/weight", "perplexity", "change"),
        *("KL mean", "KL p99", "same top-1"),
    ]
    head += ["same greedy ids", "same answers"] * bool(eval_set.num_new)
    rows = [(*head, "time")]
    rows += [_row(each, is_base=each is judged[0]) for each in judged]
    num = len(eval_set.windows)
    lines = [
        *aligned(rows),
        "",
        f"{eval_set.num_scored:,} tokens scored in {num} windows of {eval_set.window_tokens:,}; "
        f"the baseline is the first row, its perplexity {_number(base, 3)} on this text",
        "± is one standard error over windows; changes are paired. KL in nats a token, over the "
        "whole vocabulary",
    ]
    if eval_set.num_new:
        lines.append(
            f"greedy: {len(eval_set.prompts)} answers of {eval_set.num_new} tokens, compared id by "
            "id with the baseline's; same answers: equal in all ids"
        )
    if num < FEW_WINDOWS:
        lines.append(
            f"WARNING: {num} windows are few; take the standard errors as rough below {FEW_WINDOWS}"
        )
    return "\n".join(lines)


def _row(judged: Judged, *, is_base: bool) -> tuple[str, ...]:
    combination, figures, size = judged.combination, judged.figures, judged.size
    cells = [
        combination.weights_name,
        combination.kv_name,
        str(combination.context),
        f"{size.num_bytes / 2**20:.1f}",
        f"{size.bits_per_weight:.2f}",
        f"{figures.perplexity.value:.3f}",
    ]
    if is_base:
        cells += ["baseline", "", "", ""]
    else:
        cells += [
            _percent(figures.change, sign="+"),
            _number(figures.kl.mean, 5),
            f"{figures.kl.p99:.4f}",
            _percent(figures.same_top1),
        ]
    if figures.greedy is not None:
        greedy = figures.greedy
        shown = (_percent(greedy.equal_ids), f"{100 * greedy.identical:.0f} %")
        cells += ("", "") if is_base else shown
    return (*cells, duration(judged.seconds.total))


def _percent(found: Estimate, sign: str = "") -> str:
    scaled = Estimate(100 * found.value, None if found.error is None else 100 * found.error)
    return f"{_number(scaled, 2, sign)} %"


def _number(found: Estimate, digits: int, sign: str = "") -> str:
    error = "" if found.error is None else f" ± {found.error:.{digits}f}"
    return f"{found.value:{sign}.{digits}f}{error}"
