"""Shared by the expert benchmarks: the model, its text, an expert file, and writing of results."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import record
from penstock.workers.engine.engine import Engine
from penstock.workers.evaluation.machine import cpu_name
from penstock.workers.experts.checkpoint import CheckpointExperts
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.experts.writer import remove_expert_file, write_expert_file
from penstock.workers.models.loader import open_model
from penstock.workers.request import Request, SamplingParams
from penstock.workers.weights.hub import resolve_model
from penstock.workers.weights.sources import DTYPES
from tools.builtin_models import data

ROOT = Path(__file__).resolve().parents[2]
MODEL = "builtin-moe"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """With the options that all of them have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    corpus = ROOT.parent / "shared" / "data" / "classics"
    parser.add_argument("--corpus", type=Path, default=corpus, help="with heldout-BOOK.txt.xz")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="path without a suffix")
    return parser


def books(corpus: Path) -> list[Sequence[int]]:
    """Tokens of the held-out books, which the model was not made from."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MODEL), local_files_only=True)
    return [data.heldout_tokens(corpus, book, tokenizer)[0] for book in data.HELDOUT_BOOKS]


def made_up_model(folder: Path, num_experts: int) -> tuple[str, Sequence[int]]:
    """A checkpoint of Qwen3-MoE's shape, an eighth as wide, and a prompt for it.

    Random weights. Its routers prefer some experts: in trained models a few get most tokens.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=2048, hidden_size=256, num_hidden_layers=8, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, num_experts=num_experts,
        num_experts_per_tok=8, moe_intermediate_size=96, norm_topk_prob=True,
        max_position_embeddings=2048, dtype="bfloat16",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight.data.mul_(torch.randn(num_experts, 1).exp() * 8)
        elif "layers" in name and weight.dim() > 1:
            weight.data.mul_(2)  # so that layers change the residual stream
    model.save_pretrained(folder)
    return str(folder), torch.randint(0, 2048, (256,)).tolist()


@contextmanager
def temporary_expert_file(model: str, weights: str, *, copies: str = "") -> Iterator[Manifest]:
    """The experts of a model in shared memory, for as long as it is open."""
    folder, config, tensors = open_model(model, weights, "cpu")
    experts = CheckpointExperts(folder, config, tensors, weights)
    path = Path(f"/dev/shm/penstock-bench-{os.getpid()}-{weights}.experts")
    try:
        yield write_expert_file(experts, path, DTYPES[config.dtype], copies=copies)
    finally:
        remove_expert_file(path)


def drain(engine: Engine, ids: Sequence[int], num_new: int) -> None:
    """Answer one prompt to its end."""
    params = SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True)
    engine.add(Request("one", tuple(ids), params))
    while engine.has_work():
        engine.step()


def finish(
    program: str,
    args: argparse.Namespace,
    found: dict[str, Any],
    lines: Callable[[Any], list[str]],
) -> None:
    """Print the machine and the table that `lines` makes of `found`; write them to `args.out`.

    program: `__file__` of the benchmark. The figures go to OUT.json, the text to OUT.txt.
    """
    text = "\n".join([machine(), "", *lines(found)])
    print(text)
    out = args.out
    if out is not None:
        path = out.with_name(out.name + ".json")
        record.write(path, program, found, threads=args.threads)
        out.with_name(out.name + ".txt").write_text(text + "\n")


def machine() -> str:
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {os.cpu_count()} cores, {threads} thread(s), torch {torch.__version__}"
