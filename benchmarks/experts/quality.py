"""The quality cost of sparse and quantised experts: perplexity of held-out text by keep fraction.

The built-in MoE model reads windows of two books; neither the model nor its thresholds were made
from them. The first 64 tokens of a window are exact, as a prompt is; the rest, whose perplexity
counts, keeps a share of each expert's neurons by one of the three scores, or, as a control, at
random. Every setting reads the same tokens, so differences are paired: the error bar is the
standard error over windows of the mean difference in negative log-likelihood. Compared with the
exact model and with its int8 copies.

    python -m benchmarks.experts.quality --out OUT
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.experts.common import MODEL, books, finish, parser_of
from penstock.kernels.types import DecodeBatch, PrefillBatch
from penstock.workers.config import MOE_SCORES
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.experts.expert_file import ExpertFile
from penstock.workers.experts.modes import StepRows
from penstock.workers.experts.neurons.scores import NeuronScores, NeuronSelector
from penstock.workers.experts.neurons.thresholds import FILE_NAME, Calibration
from penstock.workers.memory.arena import Arena, BlockLayout
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import AttentionInputs
from penstock.workers.models.loader import load_model
from penstock.workers.weights.hub import resolve_model

WINDOW, NUM_EXACT = 512, 64
KEEPS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BLOCK_SIZE = 16


class ByLot:
    """The control: selects neurons at random."""

    def __init__(self, keep: float, inner: int):
        self.keep, self.inner = keep, inner
        self.random = torch.Generator().manual_seed(0)

    def active(self, layer: int, expert: int, x: Tensor) -> Tensor:
        return torch.rand(len(x), self.inner, generator=self.random) < self.keep


class Reader:
    """One window after another through the model, each over the same blocks."""

    def __init__(self, model: Decoder):
        facts, num_blocks = model.config, -(-WINDOW // BLOCK_SIZE)
        layout = BlockLayout(
            facts.num_layers, facts.num_kv_heads, BLOCK_SIZE, facts.head_dim, model.dtype
        )
        self.model = model
        self.kv_layers = Arena(layout, num_blocks, model.device).kv_layers()
        self.positions = torch.arange(WINDOW)
        nothing = torch.zeros(0, 1, dtype=torch.int32)
        self.inputs = AttentionInputs(
            slots=self.positions,
            num_decode=0,
            decode=DecodeBatch(nothing, nothing[:, 0], 0),
            prefill=PrefillBatch(
                torch.arange(num_blocks, dtype=torch.int32)[None],
                torch.tensor([0, WINDOW], dtype=torch.int32),
                torch.tensor([WINDOW], dtype=torch.int32),
                WINDOW,
            ),
        )

    @torch.inference_mode()
    def read(self, ids: Tensor, mode: str) -> tuple[float, float]:
        """Mean negative log-likelihood of the tokens after the exact ones, and the kept share."""
        rows = StepRows.of([(mode, NUM_EXACT, 0, WINDOW)], self.model.device)
        hidden = self.model.forward(ids, self.positions, self.inputs, self.kv_layers, moe_rows=rows)
        logits = self.model.logits(hidden[NUM_EXACT:-1])
        loss = torch.nn.functional.cross_entropy(logits, ids[NUM_EXACT + 1 :])
        if rows is None or rows.pooled is None:
            return float(loss), 1.0
        return float(loss), 1 - int(rows.num_skipped.sum()) / int(rows.num_neurons.sum())


def windows(corpus: Path, num_windows: int) -> list[Tensor]:
    """Evenly over the held-out books."""
    texts = books(corpus)
    found, share = [], num_windows // len(texts)
    for text in texts:
        ids = torch.tensor(text)
        step = (len(ids) - WINDOW) // share
        found += [ids[i * step : i * step + WINDOW].long() for i in range(share)]
    return found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a setting."""
    settings = ExpertSettings(num_slots=10**6, prefetch=False, mode="quantized")
    model = load_model(MODEL, weights="fp32", progress=False, experts=settings)
    routed = model.routed
    assert routed is not None and isinstance(routed.cache.copier.source, ExpertFile)
    calibration = Calibration.load(args.thresholds or resolve_model(MODEL) / FILE_NAME)
    reader, texts, rows = Reader(model), windows(args.corpus, args.windows), []
    plan: list[tuple[str, str, float]] = [("exact", "", 1.0), ("quantized", "", 1.0)]
    plan += [("sparse", score, keep) for score in args.scores for keep in KEEPS]
    baseline: list[float] = []
    scores: dict[str, NeuronScores] = {}
    for mode, score, keep in tqdm(plan, mininterval=20):
        if score == "by lot":
            routed.selector = ByLot(keep, routed.cache.manifest.inner)  # type: ignore[assignment]
        elif mode == "sparse":
            if score not in scores:
                source = routed.cache.copier.source
                scores[score] = NeuronScores(source, score, calibration.format, model.device)
            routed.selector = NeuronSelector(scores[score], calibration.at(score, keep))
        read = [reader.read(ids, mode) for ids in texts]
        losses, kept = [loss for loss, _ in read], statistics.fmean(share for _, share in read)
        baseline = baseline or losses
        differences = [a - b for a, b in zip(losses, baseline, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        rows.append(
            {
                "mode": mode,
                "score": score,
                "keep": keep,
                "kept": kept,
                "nll": statistics.fmean(losses),
                "perplexity": math.exp(statistics.fmean(losses)),
                "more_nll": statistics.fmean(differences),
                "more_nll_error": error,
            }
        )
    assert model.routed is not None
    model.routed.close()
    return rows


def lines(found: dict[str, Any]) -> list[str]:
    text = [
        f"{found['tokens']:,} tokens that count, windows of {WINDOW}; perplexity, and by how many "
        "% it is higher than exact (+- standard error)",
        "",
        f"{'mode':>10} {'score':>8} {'keep':>5} {'kept':>6} {'perplexity':>11} {'higher %':>16}",
    ]
    for row in found["rows"]:
        higher, error = 100 * math.expm1(row["more_nll"]), 100 * row["more_nll_error"]
        text.append(
            f"{row['mode']:>10} {row['score']:>8} {row['keep']:>5.2f} {row['kept']:>6.3f} "
            f"{row['perplexity']:>11.2f} {higher:>8.2f} +- {error:.2f}"
        )
    return text


def plot(found: dict[str, Any], path: Path) -> None:
    """How much higher perplexity is, over the share of neurons that was really kept."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for score, marker in zip((*MOE_SCORES, "by lot"), "so^x", strict=True):
        rows = [row for row in found["rows"] if row["score"] == score]
        if not rows:
            continue
        axes.errorbar(
            [row["kept"] for row in rows],
            [100 * math.expm1(row["more_nll"]) for row in rows],
            yerr=[100 * math.exp(row["more_nll"]) * row["more_nll_error"] for row in rows],
            marker=marker, markersize=4, capsize=2, linewidth=1, label=score,
        )  # fmt: skip
    axes.set_yscale("symlog", linthresh=0.1)
    axes.axhline(0, color="grey", linewidth=1)
    axes.set_xlabel("share of an expert's neurons that a token keeps")
    axes.set_ylabel("perplexity above exact, % (linear below 0.1)")
    axes.set_title("Built-in MoE, held-out books: neurons left out, by score")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--windows", type=int, default=24, help="of 512 tokens, over two books")
    parser.add_argument("--thresholds", type=Path, help="of penstock calibrate; none: the model's")
    parser.add_argument("--scores", nargs="+", default=[*MOE_SCORES, "by lot"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = measure(args)
    found = {"tokens": args.windows * (WINDOW - NUM_EXACT - 1), "rows": rows}
    finish(__file__, args, found, lines)
    if args.out is not None:
        plot(found, args.out.with_name(args.out.name + ".png"))


if __name__ == "__main__":
    main()
