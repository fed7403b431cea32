"""A scorer that uses the production engine: prompt logprobs of a request with a sink window.

    python -m benchmarks.streaming.engine_scorer --tokens 4096

compares it with the plain PyTorch scorer (torch_scorer.py), token by token: kernels, block tables,
rolls and chunks against plain arithmetic.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.streaming.torch_scorer import CachePolicy, OnTokens, TorchScorer
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from tools.builtin_models import data

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 16


class EngineScorer:
    """A checkpoint in fp32 in an engine of its own. Takes policies with at least one sink, the
    engine's positions and its block size, and the full context as far as the model's own."""

    def __init__(self, folder: Path, num_blocks: int = 256, chunk: int = 512):
        model = load_model(str(folder), weights="fp32", device="cpu", progress=False)
        config = EngineConfig(
            model=str(folder),
            weights="fp32",
            threads=torch.get_num_threads(),
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_batched_tokens=chunk,
            prefix_cache=False,
        )
        self.engine = Engine(config, model)

    def score(
        self, token_ids: Sequence[int], policy: CachePolicy, on_tokens: OnTokens | None = None
    ) -> Tensor:
        """As `Scorer.score`. Raises RequestError where the engine refuses the policy."""
        if policy.window is not None and policy.block_size != BLOCK_SIZE:
            raise ValueError(f"block_size must be {BLOCK_SIZE}, the engine's")
        if not policy.cache_positions:
            raise ValueError("cache_positions must be True: the engine has no other")
        params = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0,
            context_policy="full",
        )  # fmt: skip
        if policy.window is not None:
            params = replace(
                params, context_policy="sink_window", sinks=policy.sinks, window=policy.window,
                roll=policy.roll,
            )  # fmt: skip
        self.engine.add(Request("text", tuple(token_ids), params))
        found: list[float] = []
        while self.engine.has_work():
            for delta in self.engine.step():
                found += [each.logprob for each in delta.prompt_logprobs]
                if on_tokens:
                    on_tokens(len(delta.prompt_logprobs))
        return torch.tensor(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    corpus = ROOT.parent / "shared" / "data" / "classics"
    builtin = ROOT / "workers" / "weights" / "builtin" / "dense"
    parser.add_argument("--model", type=Path, default=builtin, help="a checkpoint's folder")
    parser.add_argument("--corpus", type=Path, default=corpus, help="with heldout-BOOK.txt.xz")
    parser.add_argument("--book", default="emma", choices=data.HELDOUT_BOOKS)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    transformers.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, local_files_only=True
    ).eval()
    ids = data.heldout_tokens(args.corpus, args.book, tokenizer)[0][: args.tokens + 1]
    policies = [
        CachePolicy("full, 1,024 tokens"),
        CachePolicy("4+240 by 32", 4, 240, 32, BLOCK_SIZE),
        CachePolicy("16+1008 by 128", 16, 1008, 128, BLOCK_SIZE),
        CachePolicy("1+112 by 1", 1, 112, 1, BLOCK_SIZE),
    ]
    torch_scorer, engine_scorer = TorchScorer(model), EngineScorer(args.model)
    print(f"{'policy':<22}{'torch':>10}{'engine':>10}{'largest difference of a logprob':>34}")
    for policy in tqdm(policies, leave=False):
        text = ids if policy.window is not None else ids[:1025]
        theirs, ours = torch_scorer.score(text, policy), engine_scorer.score(text, policy)
        assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
        perplexities = [(-each.double().mean()).exp().item() for each in (theirs, ours)]
        worst = (ours - theirs).abs().max().item()
        tqdm.write(f"{policy.name:<22}{perplexities[0]:10.4f}{perplexities[1]:10.4f}{worst:34.2e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
