"""What 4-bit weights made with text cost: held-out perplexity of rounding, GPTQ and AWQ.

    python -m benchmarks.engine.calibrated_quality --recipes nearest,gptq,awq-gptq --json out.json
    python -m benchmarks.engine.calibrated_quality --model FOLDER --tokens kept.json

The model is calibrated on stretches of training books, as `penstock quantize --calibrate` does it,
and asked for two other books, in windows of 1,024 tokens, through the engine. The written weights
are opened into fp32, so that only they differ from the fp32 run; errors are of paired differences.
By default the model is SmolLM2-135M's GGUF file moved off its own grid (common/off_grid.py).

A recipe is a method, and after colons what differs from the defaults: `gptq:g128:sym:act`; `steps`:
the grid of steps, in groups of 16; `self`: calibrated on what the model writes, instead of the
books; `t4096`: calibration tokens; `b5.2`: with 8-bit layers, up to 5.2 bits a weight.
"""

from __future__ import annotations

import argparse
import json
import lzma
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import record
from benchmarks.common.off_grid import write_off_grid
from benchmarks.engine.gguf_quality import books
from penstock.workers.calibration.checkpoint import calibrate_into, plan_calibrated, widened
from penstock.workers.calibration.own_text import own_windows
from penstock.workers.calibration.rounding import METHODS, Recipe
from penstock.workers.calibration.text import NUM_TOKENS, read_windows
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.evaluation.eval_set import cut_windows
from penstock.workers.evaluation.figures import change_of, perplexity_of
from penstock.workers.evaluation.scoring import WindowScores
from penstock.workers.models.loader import load_model
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model
from penstock.workers.weights.int4_layout import STEP_GROUP

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT.parent / "shared" / "data" / "classics"
WINDOW = 1024
PIECES, PIECE_CHARACTERS = 40, 10_000  # of the training books, evenly


def calibration_text(corpus: Path) -> str:
    """Pieces of the training books: many authors, none of them those that are tested."""
    with lzma.open(corpus / "train.txt.xz", "rt", encoding="utf-8") as file:
        text = file.read()
    step = len(text) // PIECES
    starts = [i * step + step // 2 for i in range(PIECES)]
    return "\n\n".join(text[start : start + PIECE_CHARACTERS] for start in starts)


@dataclass(frozen=True, slots=True)
class Settings:
    """`bits`: that are allowed a weight; `own_text`: the model writes what it is calibrated on."""

    recipe: Recipe
    num_tokens: int = NUM_TOKENS
    bits: float | None = None
    own_text: bool = False


def settings_of(name: str) -> Settings:
    """What the recipe `name` says. Raises ValueError for a part that is none."""
    method, *parts = name.split(":")
    if method not in METHODS:
        raise ValueError(f"{method!r} is none of {', '.join(METHODS)}")
    recipe, num_tokens, bits, own_text = Recipe(method=method), NUM_TOKENS, None, False
    for part in parts:
        if part == "sym":
            recipe = replace(recipe, grid="symmetric")
        elif part == "steps":
            recipe = replace(recipe, grid="steps", group=STEP_GROUP)
        elif part == "self":
            own_text = True
        elif part == "act":
            recipe = replace(recipe, act_order=True)
        elif part.startswith("g"):
            recipe = replace(recipe, group=int(part[1:]))
        elif part.startswith("t"):
            num_tokens = int(part[1:])
        elif part.startswith("b"):
            bits = float(part[1:])
        else:
            raise ValueError(f"{part!r} in {name!r} is no part of a recipe")
    return Settings(recipe, num_tokens, bits, own_text)


def quantized(name: str, model: Path, text: Path, out: Path) -> dict[str, Any]:
    """Make `out` from `model` by the recipe `name`; what it took."""
    settings = settings_of(name)
    start_s = time.perf_counter()
    used_s = time.process_time()
    plan = plan_calibrated(model, settings.recipe)
    if settings.own_text:
        windows = own_windows(model, settings.num_tokens)
    else:
        windows = read_windows(text, model, num_tokens=settings.num_tokens, context=2 * WINDOW)
    if settings.bits is not None:
        plan = widened(plan, windows, settings.bits)
    calibrate_into(plan, windows, out)
    return {
        "recipe": name,
        "bits_per_weight": round(plan.bits_per_weight, 4),
        "modules": plan.num_modules,
        "modules_int8": len(plan.wide),
        "weights": plan.num_weights,
        "calibration_tokens": sum(map(len, windows)),
        "seconds": round(time.perf_counter() - start_s, 1),
        "cpu_seconds": round(time.process_time() - used_s, 1),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def token_nll(model: Path, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """-log p of each token of the texts but their first ones, text by text."""
    decoder = load_model(model, weights="fp32", dtype="fp32", progress=False)
    config = EngineConfig(num_blocks=80, max_num_batched_tokens=512, prefix_cache=False)
    scores = WindowScores(texts, decoder, None)
    scores.score(Engine(config, decoder), {})
    return scores.nll.round(6).tolist()


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The figures; those of `args.tokens` are not made again."""
    kept: dict[str, Any] = {}
    if args.tokens and args.tokens.exists():
        kept = json.loads(args.tokens.read_text())
    wanted = [name for name in ("fp32", *args.recipes.split(",")) if name not in kept]
    model, text, texts = _prepared(args, work) if wanted else (work, work, [])
    for name in wanted:
        out = work / name.replace(":", "-")
        made = {} if name == "fp32" else quantized(name, model, text, out)
        kept[name] = {**made, "nll": token_nll(out if made else model, texts)}
        print(name, made, flush=True)
        if args.tokens:
            args.tokens.write_text(json.dumps(kept))
    return figures(kept, args.name)


def _prepared(args: argparse.Namespace, work: Path) -> tuple[Path, Path, Sequence[Sequence[int]]]:
    """The model, the calibration text, and the token ids of the windows that are scored."""
    model = Path(args.model) if args.model else work / "off-grid"
    if not args.model:
        write_off_grid(resolve_model("smollm2"), model)
    text = work / "text.txt"
    text.write_text(calibration_text(args.corpus), encoding="utf-8")
    tokenizer = Tokenizer.load(model)
    begin = tokenizer.prefix_ids
    ids = [tokenizer.encode(book, add_special_tokens=False) for book in books(args.corpus)]
    return model, text, cut_windows(ids, args.windows, len(begin) + WINDOW + 1, begin)


def figures(kept: dict[str, Any], name: str) -> dict[str, Any]:
    """As the page of results shows them."""
    base = _samples(kept["fp32"])
    rows = []
    for recipe, found in kept.items():
        if recipe != "fp32":
            change = change_of(_samples(found), base)
            if change.error is None:
                raise ValueError("one window has no standard error: give --windows 2 or more")
            made = {key: value for key, value in found.items() if key != "nll"}
            rows.append(
                {
                    **made,
                    "change_percent": round(100 * change.value, 3),
                    "error_percent": round(100 * change.error, 3),
                }
            )
    return {
        "model": name,
        "perplexity_fp32": perplexity_of(base).value,
        "window_tokens": WINDOW,
        "tokens": base.size,
        "errors_over": "windows" if base.shape[1] > 1 else "tokens",
        "rows": rows,
    }


def _samples(found: dict[str, Any]) -> NDArray[np.float64]:
    """-log p [windows, tokens]; files kept before have no windows, and each token is a sample."""
    nll = np.array(found["nll"], dtype=np.float64)
    return nll if nll.ndim == 2 else nll[:, None]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="with train.txt.xz")
    parser.add_argument("--model", help="a checkpoint in safetensors with its tokenizer")
    parser.add_argument("--name", default="SmolLM2-135M, off its grid", help="of the model")
    parser.add_argument("--recipes", default="nearest,gptq,awq,awq-gptq")
    parser.add_argument("--windows", type=int, default=16, help=f"of {WINDOW} tokens (default: 16)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=Path, help="figures of each token, kept between runs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    with tempfile.TemporaryDirectory(prefix="penstock-calibrated-") as work:
        found = run(args, Path(work))
    for row in found["rows"]:
        print(row)
    if args.json:
        record.write(args.json, __file__, found, threads=args.threads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
