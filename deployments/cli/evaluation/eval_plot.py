"""The picture of `penstock eval`: what each combination costs, by bits per weight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.evaluation.judge import Judged

SUFFIXES = (".svg", ".png", ".pdf")


def check_suffix(path: str | None) -> None:
    """Raise ConfigError before a run whose picture could not be written after it."""
    if path is not None and Path(path).suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path} must end in {', '.join(SUFFIXES)}")


def plot(path: str, judged: Sequence[Judged], title: str) -> None:
    """Two panels over bits per weight: change of the perplexity, and KL divergence, with their
    standard errors. The baseline, `judged[0]`, is the line at 0."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    for i, each in enumerate(judged[1:]):
        change, kl = each.figures.change, each.figures.kl.mean
        label = _label(each)
        x = each.size.bits_per_weight
        _point(left, i, x, 100 * change.value, 100 * (change.error or 0.0), label)
        _point(right, i, x, kl.value, kl.error or 0.0, label)
    left.axhline(0, color="grey", linewidth=0.8)
    left.set(ylabel=f"change of perplexity, % of {judged[0].figures.perplexity.value:.2f}")
    right.set(ylabel="KL to the baseline, nats a token")
    if any(each.figures.kl.mean.value > 0 for each in judged[1:]):
        right.set_yscale("log")
    for panel in (left, right):
        panel.set(xlabel="bits per weight of linear layers, in memory")
        panel.grid(alpha=0.3)
    if len(judged) > 1:
        right.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _point(panel: Any, place: int, x: float, y: float, error: float, label: str) -> None:
    marker = "osD^v<>P*X"[place % 10]
    panel.errorbar([x], [y], yerr=[error], fmt=marker, capsize=3, label=label)


def _label(judged: Judged) -> str:
    """The settings that are not the defaults, besides the weights."""
    combination = judged.combination
    parts = [combination.weights_name]
    if combination.kv != "auto":
        parts.append(f"KV {combination.kv_name}")
    if combination.context.sinks is not None:
        parts.append(f"context {combination.context}")
    return "; ".join(parts)
