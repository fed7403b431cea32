"""What each number format costs: the judge of `penstock eval` over the built-in models and others.

    python -m benchmarks.engine.format_quality --models builtin --json quality.json
    python -m benchmarks.engine.format_quality --models smollm2 --windows 16 --variants ''
    python -m benchmarks.engine.format_quality --weights int8 --kv auto,int8-64       some of it

Windows of held-out books go through the production engine as prompts; all formats see the same
tokens. Activations are fp32 wherever weights are not bf16. A model may be a folder; --name says in
the figures what it is. Result files before `penstock eval` have standard errors over tokens; newer
ones, over windows.

KV formats: auto, fp8 (a scale for a head), int8-8, int8-32, int8-64 (the whole head).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.common import record
from benchmarks.engine.gguf_quality import books
from penstock.workers.config import (
    EngineConfig,
    Int4Group,
    Int8Group,
    KvFormat,
    KvGroup,
    WeightFormat,
)
from penstock.workers.evaluation.combination import Combination
from penstock.workers.evaluation.eval_set import EvalSet, cut_windows
from penstock.workers.evaluation.figures import Estimate
from penstock.workers.evaluation.judge import Judged, judge
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("builtin", "builtin-moe")
BASELINE = "fp32"
WEIGHTS = (BASELINE, "bf16", "int8", "fp8", "int4", "nf4")
# The recipe's two switches: without attention's output projections, and with the head; int8 with
# other groups than 64, or one scale a row; int4 in other groups than 16, without wide layers, or
# with plain activations.
VARIANTS = (
    *("int8-no-o", "int8-head", "int4-no-o", "int4-head", "nf4-head"),
    *("int8-32", "int8-128", "int8-row", "int4-32", "int4-64", "int4-128", "int4-plain"),
    "int4-narrow",
)
KV = ("auto", "int8-8", "int8-32", "int8-64", "fp8")
WINDOW = 1024  # tokens that are scored, after the first


def combination_of(weights: str, kv: str) -> Combination:
    """The settings behind the names of WEIGHTS, VARIANTS and KV."""
    format, _, variant = weights.partition("-")
    kind, _, group = kv.partition("-")
    group_of = {format: variant} if variant in ("16", "32", "64", "128", "row") else {}
    return Combination(  # EngineConfig checks the values
        weights=cast(WeightFormat, format),
        int8_group=cast(Int8Group, group_of.get("int8", Combination().int8_group)),
        int4_group=cast(Int4Group, group_of.get("int4", Combination().int4_group)),
        int4_wide_layers=variant != "narrow",
        int4_activations="plain" if variant == "plain" else "auto",
        quantize_o=variant != "no-o",
        quantize_lm_head=variant == "head",
        activations="bf16" if format == "bf16" else "fp32",
        kv=cast(KvFormat, kind),
        kv_group=cast(KvGroup, "auto" if kind == "auto" else group or "head"),
    )


def eval_set(model: str, corpus: Path, num_windows: int) -> EvalSet:
    """Windows of held-out books, after what the model's tokenizer puts before a text."""
    tokenizer = Tokenizer.load(resolve_model(model))
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in books(corpus)]
    return EvalSet(cut_windows(ids, num_windows, WINDOW + 1, tokenizer.prefix_ids))


def figures(name: str, judged: Sequence[tuple[str, str, Judged]]) -> dict[str, Any]:
    """Of the model `name`, as the page of results shows them. `judged`: names of weights and KV,
    and what came of them; the baseline first."""
    base = judged[0][2]
    rows: dict[str, dict[str, Any]] = {}
    for weights, kv, each in judged:
        row = rows.setdefault(
            weights,
            {"weights": weights, "bits_per_weight": round(each.size.bits_per_weight, 3),
             "change_percent": {}, "error_percent": {}, "kl": {}, "same_top1_percent": {}},
        )  # fmt: skip
        found = each.figures
        row["change_percent"][kv] = round(100 * found.change.value, 3)
        row["error_percent"][kv] = round(100 * _error(found.change), 3)
        row["kl"][kv] = round(found.kl.mean.value, 6)
        row["same_top1_percent"][kv] = round(100 * found.same_top1.value, 2)
    return {
        "model": name,
        "perplexity_fp32": base.figures.perplexity.value,
        "window_tokens": WINDOW,
        "tokens": base.scores.nll.size,
        "errors_over": "windows",
        "rows": list(rows.values()),
    }


def _error(found: Estimate) -> float:
    if found.error is None:
        raise ValueError("one window has no standard error: give --windows 2 or more")
    return found.error


def show(judged: Sequence[tuple[str, str, Judged]]) -> None:
    for weights, kv, each in judged:
        found, change = each.figures, each.figures.change
        print(
            f"{weights:10} KV {kv:8} {100 * change.value:+.3f} ± {100 * _error(change):.3f} %  "
            f"KL {found.kl.mean.value:.5f}  same top-1 {100 * found.same_top1.value:.2f} %"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    corpus = ROOT.parent / "shared" / "data" / "classics"
    parser.add_argument("--corpus", type=Path, default=corpus, help="with heldout-BOOK.txt.xz")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--weights", default=",".join(WEIGHTS))
    parser.add_argument("--variants", default=",".join(VARIANTS), help="with KV auto only")
    parser.add_argument("--kv", default=",".join(KV))
    parser.add_argument("--windows", type=int, default=16, help=f"of {WINDOW} tokens (default: 16)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", help="of the model, in the figures (default: as given)")
    parser.add_argument("--json", type=Path, help="also write the figures of one model here")
    args = parser.parse_args()
    if args.json and "," in args.models:
        parser.error("--json takes the figures of one model: name it with --models")
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    names = {
        combination_of(weights, kv): (weights, kv)
        for weights, kv in [
            (BASELINE, "auto"),  # first
            *((weights, kv) for weights in args.weights.split(",") for kv in args.kv.split(",")),
            *((variant, "auto") for variant in args.variants.split(",") if variant),
        ]
    }
    baseline, *others = names
    for model in args.models.split(","):
        config = EngineConfig(model=model, device="cpu", num_blocks=160, max_num_batched_tokens=512)
        start_s, judged = time.perf_counter(), []
        folder, texts = resolve_model(model), eval_set(model, args.corpus, args.windows)
        for each in judge(config, folder, baseline, others, texts):
            judged.append((*names[each.combination], each))
            print(f"{each.combination}: {time.perf_counter() - start_s:.0f} s", flush=True)
        print(f"{model}: perplexity in fp32 {judged[0][2].figures.perplexity.value:.3f}")
        show(judged)
        if args.json:
            record.write(
                args.json, __file__, figures(args.name or model, judged), threads=args.threads
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
