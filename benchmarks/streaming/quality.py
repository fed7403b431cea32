"""The quality cost of a context policy: perplexity over a long text whose old tokens are dropped.

One held-out book that the model never saw, as one sequence far longer than it was trained for,
teacher-forced. Compares the full context, a window alone, sinks and a window (S = 1, 4, 16), the
same with the sinks at their absolute distance (not StreamingLLM), and the window recomputed from
scratch for every token, which is the quality to reach; that one is measured at positions drawn at
random, one from each of equal stretches, and compared with the others at just these positions.
All policies of a cache size hold as many tokens, and drop an eighth of them at once.

    python -m benchmarks.streaming.quality --out OUT

Writes OUT.json, OUT.txt (the tables) and OUT.png (needs matplotlib: the extra `bench`).
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import record
from benchmarks.streaming.quality_report import plot, report
from benchmarks.streaming.torch_scorer import CachePolicy, OnTokens, TorchScorer, recompute
from penstock.workers.evaluation.machine import cpu_name
from tools.builtin_models import data

ROOT = Path(__file__).resolve().parents[2]
SINKS = (0, 1, 4, 16)
BLOCK_SIZE = 16
EARLY = 256  # attention is looked at from this position on
SHARES = ("first", "first_4", "first_16", "older_than_256", "uniform")


@dataclass
class Findings:
    """All that is measured; the JSON file."""

    args: dict[str, Any]
    machine: dict[str, Any]
    long: list[dict[str, Any]] = field(default_factory=list)
    recompute: list[dict[str, Any]] = field(default_factory=list)
    short: list[dict[str, Any]] = field(default_factory=list)
    attention: list[dict[str, Any]] = field(default_factory=list)


def policies(cache: int) -> list[CachePolicy]:
    """Those that hold `cache` tokens."""
    found = []
    for sinks in SINKS:
        first = -(-sinks // BLOCK_SIZE) * BLOCK_SIZE
        name = f"{sinks}+{cache - first}" if sinks else f"window {cache}"
        found.append(CachePolicy(name, sinks, cache - first, cache // 8, BLOCK_SIZE))
    four = found[2]
    absolute = CachePolicy(f"{four.name} absolute", 4, four.window, four.roll, BLOCK_SIZE, False)
    return [*found, absolute]


def perplexity(logprobs: Tensor) -> float:
    return math.exp(-logprobs.double().mean().item())


def paired(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """How much higher the perplexity of `ours` is, in percent, with its standard error."""
    difference = (theirs - ours).double()
    error = difference.std().item() / math.sqrt(len(difference))
    return {
        "percent": 100 * math.expm1(difference.mean().item()),
        "error_percent": 100 * error,
    }


def score_long(
    scorer: TorchScorer, ids: list[int], args: argparse.Namespace, found: Findings, bar: OnTokens
) -> dict[str, Tensor]:
    """Every policy over the whole text; the full context over its first --full-tokens."""
    kept = {}
    full = scorer.score(ids[: args.full_tokens + 1], CachePolicy("full"), bar)
    found.long.append({"name": "full", "cache": None, "tokens": len(full), **_summary(full, args)})
    for cache in args.cache:
        for policy in policies(cache):
            logprobs = scorer.score(ids, policy, bar)
            row = {"name": policy.name, "cache": cache, "tokens": len(logprobs)}
            found.long.append(row | asdict(policy) | _summary(logprobs, args))
            kept[policy.name] = logprobs
    return kept


def _summary(logprobs: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    beyond = logprobs[data.CONTEXT - 1 :]
    return {
        "perplexity": perplexity(logprobs),
        "perplexity_trained": perplexity(logprobs[: data.CONTEXT - 1]),
        "perplexity_beyond": perplexity(beyond) if len(beyond) >= args.stretch else None,
        "by_position": [perplexity(part) for part in logprobs.split(args.stretch)],
    }


def score_recompute(
    model: Any,
    ids: list[int],
    kept: dict[str, Tensor],
    args: argparse.Namespace,
    found: Findings,
    bar: OnTokens,
) -> None:
    """The window run from scratch, at --samples positions, next to the policies at the same ones;
    after the mark that texts begin with, as a request with this window as its prompt would be, and
    without it."""
    for cache, marked in itertools.product(args.cache, (True, False)):
        generator = torch.Generator().manual_seed(cache)
        edges = torch.linspace(cache, len(ids) - 1, args.samples + 1)
        places = edges[:-1] + torch.rand(args.samples, generator=generator) * edges.diff()
        positions = places.long().clamp(cache - 1, len(ids) - 2)
        theirs = recompute(model, ids, positions.tolist(), cache, 8, bar, marked=marked)
        row: dict[str, Any] = {"cache": cache, "marked": marked, "samples": len(positions)}
        row["perplexity"] = perplexity(theirs)
        row["policies"] = [
            {"name": p.name, "perplexity": perplexity(kept[p.name][positions])}
            | paired(kept[p.name][positions], theirs)
            for p in policies(cache)
        ]
        found.recompute.append(row)


def score_short(
    scorer: TorchScorer, ids: list[int], args: argparse.Namespace, found: Findings, bar: OnTokens
) -> None:
    """Passages no longer than the trained context, where the full context is the truth: after the
    first eviction, against the full context at the same tokens. Each begins with an end-of-text
    mark, as in training, and once without it."""
    passages = [
        ids[1 + i * data.CONTEXT : 1 + (i + 1) * data.CONTEXT - 1] for i in range(args.passages)
    ]
    for cache in args.short_cache:
        for begins in ([0], []):
            texts = [begins + passage for passage in passages]
            table = {
                p.name: torch.cat(
                    [scorer.score(text, p, bar)[cache - len(begins) :] for text in texts]
                )
                for p in (CachePolicy("full"), *policies(cache))
            }
            full = table["full"]
            for name, logprobs in table.items():
                row = {"name": name, "cache": cache, "marked": bool(begins)}
                row |= {"tokens": len(full), "perplexity": perplexity(logprobs)}
                found.short.append(row | paired(logprobs, full))


def watch_attention(
    model: Any, ids: list[int], args: argparse.Namespace, found: Findings, bar: OnTokens
) -> None:
    """Where the queries of the first tokens look, layer by layer and head by head."""
    for begins in ([0], []):
        shares = _Shares({}, 0)
        scorer = TorchScorer(model, on_attention=shares.add)
        scorer.score(
            begins + ids[1 : args.attention_tokens + 2 - len(begins)], CachePolicy("full"), bar
        )
        for layer, total in shares.sums.items():
            for head, means in enumerate((total / shares.num_queries).tolist()):
                row = {"marked": bool(begins), "layer": layer, "head": head}
                found.attention.append(row | dict(zip(SHARES, means)))


@dataclass
class _Shares:
    """Sums over queries of how much of a head's weight falls where; one entry a name of SHARES."""

    sums: dict[int, Tensor]  # layer -> [heads, len(SHARES)]
    num_queries: int

    def add(self, layer: int, weights: Tensor, at: Tensor, keys_at: Tensor) -> None:
        rows = at >= EARLY
        if not rows.any():
            return
        part = weights[:, rows].double()
        old = at[rows, None] - keys_at >= EARLY
        shares = [
            part[:, :, 0],
            part[:, :, :4].sum(-1),
            part[:, :, :16].sum(-1),
            (part * old).sum(-1),
            (1 / (at[rows] + 1.0)).expand(part.shape[:2]),
        ]
        self.sums[layer] = self.sums.get(layer, 0) + torch.stack(shares, dim=-1).sum(1)
        self.num_queries += int(rows.sum()) if layer == 0 else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    builtin = ROOT / "workers" / "weights" / "builtin" / "dense"
    corpus = ROOT.parent / "shared" / "data" / "classics"
    parser.add_argument("--model", type=Path, default=builtin, help="a checkpoint's folder")
    parser.add_argument("--corpus", type=Path, default=corpus, help="with heldout-BOOK.txt.xz")
    parser.add_argument("--book", default="emma", choices=data.HELDOUT_BOOKS)
    parser.add_argument("--tokens", type=int, default=53_248, help="of the book, its start")
    parser.add_argument("--full-tokens", type=int, default=8192, help="for the full context")
    parser.add_argument("--stretch", type=int, default=4096, help="tokens of one point")
    parser.add_argument("--cache", type=int, nargs="+", default=[1024, 256], help="sizes, tokens")
    parser.add_argument("--samples", type=int, default=1024, help="positions that are recomputed")
    parser.add_argument("--passages", type=int, default=6, help="short texts; 0: none")
    parser.add_argument("--short-cache", type=int, nargs="+", default=[256, 64])
    parser.add_argument("--attention-tokens", type=int, default=data.CONTEXT)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="path without a suffix")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # Attention is so peaked that weights underflow; products with such numbers take six times as
    # long on a CPU.
    torch.set_flush_denormal(True)
    transformers.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, local_files_only=True
    ).eval()
    ids = data.heldout_tokens(args.corpus, args.book, tokenizer)[0][: args.tokens + 1]
    settings = {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()}
    settings["model"] = args.model.name
    del settings["corpus"], settings["out"]
    found = Findings(settings, _machine())
    per_cache = len(policies(args.cache[0]))
    total = args.full_tokens + sum(
        per_cache * args.tokens + 2 * args.samples * c for c in args.cache
    )
    total += 2 * args.attention_tokens
    total += 2 * (per_cache + 1) * args.passages * data.CONTEXT * len(args.short_cache)
    started = time.perf_counter()
    with tqdm(total=total, unit="tok", mininterval=5) as progress:
        scorer = TorchScorer(model)
        watch_attention(model, ids, args, found, progress.update)
        if args.passages:
            score_short(scorer, ids, args, found, progress.update)
        _write(found, args.out)
        kept = score_long(scorer, ids, args, found, progress.update)
        _write(found, args.out)
        score_recompute(model, ids, kept, args, found, progress.update)
    found.machine["elapsed_s"] = round(time.perf_counter() - started)
    text = _write(found, args.out)
    plot(asdict(found), args.out.with_name(args.out.name + ".png"))
    print(text)
    return 0


def _write(found: Findings, out: Path) -> str:
    """The JSON file and the tables of what there is so far -> the tables."""
    text = report(asdict(found))
    path = out.with_name(out.name + ".json")
    record.write(path, __file__, _rounded(asdict(found)), threads=found.args["threads"])
    out.with_name(out.name + ".txt").write_text(text)
    return text


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    raise SystemExit(main())
