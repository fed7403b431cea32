"""What each number format costs: held-out perplexity of a model, weights by KV.

    python -m benchmarks.engine.format_quality --tokens tokens.json  everything, in minutes
    python -m benchmarks.engine.format_quality --weights fp32,int8 --kv auto,int8-64     some of it
    python -m benchmarks.engine.format_quality --tokens tokens.json --table  what is there so far
    python -m benchmarks.engine.format_quality --models smollm2 --windows 16     of another model

Windows of held-out books go through the production engine as prompts; it tells the log-probability
of each of their tokens. Formats see the same tokens, so the difference of two is taken token by
token, and its standard error with it. Activations are fp32 wherever weights are not bf16, but for
int4-bf16: a bf16 checkpoint with --weights int4, which a CPU multiplies in integers. Figures are
kept in the JSON file after each run, and runs that are there already are not done again.

KV formats: auto, fp8 (a scale for a head), int8-8, int8-32, int8-64 (the whole head).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.common import record
from benchmarks.common.prompt_nll import prompt_nll
from benchmarks.engine.gguf_quality import books, stretches
from penstock.kernels.quant import INT8_GROUP
from penstock.workers.config import EngineConfig, KvFormat, KvGroup
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model
from tools.builtin_models import data

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("builtin", "builtin-moe")
WEIGHTS = ("fp32", "bf16", "int8", "fp8", "int4", "nf4")
# The recipe's two switches: without attention's output projections, and with the head; activations
# in bf16; and of int8 activations other groups than 64, or one scale a row.
VARIANTS = (
    *("int8-no-o", "int8-head", "int4-no-o", "int4-head", "nf4-head", "int4-bf16"),
    *("int8-32", "int8-128", "int8-row"),
)
KV = ("auto", "int8-8", "int8-32", "int8-64", "fp8")
WINDOW = 1024


def windows(model: str, corpus: Path, num_windows: int) -> list[list[int]]:
    """`num_windows` stretches of WINDOW + 1 tokens, evenly from both books; for the built-in models
    each after the token that texts begin with."""
    if model not in MODELS:
        ours = Tokenizer.load(resolve_model(model))
        texts = [ours.encode(text, add_special_tokens=False) for text in books(corpus)]
        return stretches(texts, num_windows, WINDOW + 1)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin"), local_files_only=True)
    found = []
    for book in data.HELDOUT_BOOKS:
        ids, _, _ = data.heldout_tokens(corpus, book, tokenizer)
        for i in range(num_windows // len(data.HELDOUT_BOOKS)):
            start = i * (len(ids) - WINDOW - 1) * len(data.HELDOUT_BOOKS) // num_windows
            found.append([ids[0], *ids[start + 1 : start + WINDOW + 1]])
    return found


def token_nll(model: str, weights: str, kv: str, texts: list[list[int]]) -> list[float]:
    """-log p of each token of the texts but their first ones."""
    format, _, variant = weights.partition("-")
    groups = {"row": None, "32": 32, "128": 128}
    decoder = load_model(
        model,
        weights=format,
        int8_group=groups.get(variant, INT8_GROUP),
        quantize_o=variant != "no-o",
        quantize_lm_head=variant == "head",
        dtype="bf16" if "bf16" in (format, variant) else "fp32",
        progress=False,
    )
    kind, _, group = kv.partition("-")
    config = EngineConfig(
        kv=cast(KvFormat, kind),  # EngineConfig checks both
        kv_group=cast(KvGroup, "auto" if kind == "auto" else group or "head"),
        num_blocks=80,
        max_num_batched_tokens=512,
        prefix_cache=False,
    )
    return prompt_nll(Engine(config, decoder), texts)


def table(runs: dict[str, list[float]]) -> str:
    """Perplexity of each run, and its change against fp32 over the same tokens, in percent."""
    lines = []
    for model in dict.fromkeys(name.split()[0] for name in runs):
        base = torch.tensor(runs.get(f"{model} fp32 auto", ()), dtype=torch.float64)
        rows = [w for w in (*WEIGHTS, *VARIANTS) if any(f"{model} {w} {k}" in runs for k in KV)]
        if not len(base) or not rows:
            continue
        lines += [f"{model}: perplexity in fp32 {base.mean().exp():.3f} over {len(base)} tokens",
                  "change in percent, and the standard error of it", "",
                  "| weights | " + " | ".join(f"KV {kv}" for kv in KV) + " |",
                  "|---" * (1 + len(KV)) + "|"]  # fmt: skip
        for weights in rows:
            cells = [cell(runs.get(f"{model} {weights} {kv}"), base) for kv in KV]
            lines.append(f"| {weights} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def cell(nll: list[float] | None, base: Tensor) -> str:
    if nll is None:
        return ""
    change, error = difference(nll, base)
    return f"{change:+.3f} ± {error:.3f}"


def difference(nll: list[float], base: Tensor) -> tuple[float, float]:
    """Change of the perplexity against `base`, and its standard error, both in percent."""
    change = torch.tensor(nll, dtype=torch.float64) - base
    error = change.std().item() / math.sqrt(len(change))
    return math.expm1(change.mean().item()) * 100, error * 100


def figures(runs: dict[str, list[float]], model: str) -> dict[str, Any]:
    """Of one model, as the page of results shows them. Raises ValueError without its fp32 run."""
    if f"{model} fp32 auto" not in runs:
        raise ValueError(f"the figures of {model} are changes against fp32, which was not run")
    base = torch.tensor(runs[f"{model} fp32 auto"], dtype=torch.float64)
    rows = []
    for weights in (*WEIGHTS, *VARIANTS):
        found = {
            kv: runs[f"{model} {weights} {kv}"] for kv in KV if f"{model} {weights} {kv}" in runs
        }
        if found:
            each = {kv: difference(nll, base) for kv, nll in found.items()}
            changes = {kv: round(change, 3) for kv, (change, _) in each.items()}
            errors = {kv: round(error, 3) for kv, (_, error) in each.items()}
            rows.append({"weights": weights, "change_percent": changes, "error_percent": errors})
    return {
        "model": model,
        "perplexity_fp32": base.mean().exp().item(),
        "window_tokens": WINDOW,
        "tokens": len(base),
        "rows": rows,
    }


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
    parser.add_argument("--windows", type=int, default=8, help=f"of {WINDOW} tokens (default: 8)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=Path, help="figures of each token, kept between runs")
    parser.add_argument("--json", type=Path, help="also write the figures of one model here")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    if args.json and "," in args.models:
        parser.error("--json takes the figures of one model: name it with --models")
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    runs: dict[str, list[float]] = {}
    if args.tokens and args.tokens.exists():
        runs = json.loads(args.tokens.read_text())
    wanted = [(w, kv) for w in args.weights.split(",") for kv in args.kv.split(",")]
    wanted += [(w, "auto") for w in args.variants.split(",") if w]
    for model in args.models.split(","):
        texts = [] if args.table else windows(model, args.corpus, args.windows)
        for weights, kv in wanted:
            name = f"{model} {weights} {kv}"
            if args.table or name in runs:
                continue
            start_s = time.perf_counter()
            runs[name] = [round(each, 6) for each in token_nll(model, weights, kv, texts)]
            print(f"{name}: {time.perf_counter() - start_s:.1f} s", flush=True)
            if args.tokens:
                args.tokens.write_text(json.dumps(runs))
    print(table(runs))
    if args.json:
        record.write(args.json, __file__, figures(runs, args.models), threads=args.threads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
