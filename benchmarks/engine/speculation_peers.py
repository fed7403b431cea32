"""llama.cpp's and vLLM's answers to the prompts of speculation.py, with their drafts and without.

The model is the same, and an answer ends as Penstock's does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.engine.speculation_prompts import SCHEMA
from benchmarks.engine.speculation_rows import Run
from benchmarks.peers.case import Case
from benchmarks.peers.convert import quantize_gguf, write_gguf, write_layers
from penstock.workers.model_config import ModelConfig
from penstock.workers.weights.hub import resolve_model

NEW = 128  # tokens of an answer, at most
LLAMA_MODES = {"llama.cpp off": 0, "llama.cpp lookup 2": 2, "llama.cpp lookup 10": 10}
VLLM_MODES = {"vLLM off": 0, "vLLM n-gram 5": 5}

Cell = tuple[str, int]  # kind of text, number of requests
Asked = Mapping[Cell, Sequence[Sequence[int]]]  # prompts


def _schemas(asked: Iterable[Cell]) -> list[str | None]:
    return [SCHEMA if kind == "json" else None for kind, _ in asked]


class Peer(Protocol):
    """Another system; one process a mode and call."""

    base: str  # its mode without drafts
    modes: Sequence[str]

    def answers(self, asked: Asked) -> dict[str, dict[Cell, Run]]:
        """By mode, of each cell that it can answer."""


class LlamaCpp:
    """Answers one prompt after the other. Matrices in Q8_0, or F16 where Penstock's are wider."""

    base: str = "llama.cpp off"
    modes: Sequence[str] = tuple(LLAMA_MODES)

    def __init__(
        self, python: str, model: Path, work: Path, config: ModelConfig, args: argparse.Namespace
    ):
        """`model`: SmolLM2's published file, or a checkpoint of it."""
        kind = "Q8_0" if args.weights == "int8" else "F16"
        file, published = work / f"{kind}.gguf", resolve_model("smollm2")
        if model == published:
            layers, context = config.num_layers, config.max_position_embeddings
            write_layers(published, layers, context, kind, file)
        else:
            whole = work / "F16.gguf"
            write_gguf(published, model, whole)
            if kind == "Q8_0":
                quantize_gguf(python, whole, file, "q8_0", args.threads)
        self._job = {"threads": args.threads, "num_new": NEW, "eos": list(config.eos_token_ids)}
        self._cases = {
            mode: Case("llama.cpp", mode, python, "run_llama_lookup", str(file), 8.5, 0.0,
                       {"drafts": drafts})
            for mode, drafts in LLAMA_MODES.items()
        }  # fmt: skip

    def answers(self, asked: Asked) -> dict[str, dict[Cell, Run]]:
        alone = {cell: prompts[0] for cell, prompts in asked.items() if cell[1] == 1}
        prompts = [list(ids) for ids in alone.values()]
        job = {**self._job, "prompts": prompts, "schemas": _schemas(alone)}
        return {
            mode: {cell: _llama_run(each) for cell, each in zip(alone, case.run(job), strict=True)}
            for mode, case in self._cases.items()
        }


def _llama_run(answer: dict[str, Any]) -> Run:
    ids, steps = answer["ids"], answer["steps"]
    # A step yields one token of its own, and those of its drafts that are right.
    return Run(answer["seconds"], steps, answer["drafts"], len(ids) - 1 - steps, [ids])


class Vllm:
    """Answers all prompts of a cell at once. Weights in bf16, whatever Penstock's are."""

    base: str = "vLLM off"
    modes: Sequence[str] = tuple(VLLM_MODES)

    def __init__(self, python: str, model: Path, config: ModelConfig, args: argparse.Namespace):
        self._job = {"threads": args.threads, "num_new": NEW, "eos": list(config.eos_token_ids)}
        self._cases = {
            mode: Case("vLLM", mode, python, "run_vllm_lookup", str(model), 16.0, 0.0,
                       {"drafts": drafts})
            for mode, drafts in VLLM_MODES.items()
        }  # fmt: skip

    def answers(self, asked: Asked) -> dict[str, dict[Cell, Run]]:
        groups = [[list(ids) for ids in prompts] for prompts in asked.values()]
        job = {**self._job, "groups": groups, "schemas": _schemas(asked)}
        return {
            mode: {cell: _vllm_run(each) for cell, each in zip(asked, case.run(job), strict=True)}
            for mode, case in self._cases.items()
        }


def _vllm_run(answer: dict[str, Any]) -> Run:
    return Run(
        *(answer["seconds"], answer["steps"], answer["drafts"], answer["accepted"], answer["ids"])
    )
