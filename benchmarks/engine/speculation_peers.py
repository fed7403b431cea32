"""llama.cpp's answers to the prompts of speculation.py, with its prompt lookup and without.

The model is the same file in Q8_0, and an answer ends as Penstock's does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.speculation_rows import Run
from benchmarks.peers.case import Case
from benchmarks.peers.convert import write_layers
from penstock.workers.model_config import ModelConfig
from penstock.workers.weights.hub import resolve_model

NEW = 128  # tokens of an answer, at most
LLAMA_MODES = {"llama.cpp off": 0, "llama.cpp lookup 2": 2, "llama.cpp lookup 10": 10}


class LlamaCpp:
    """One process a mode and call, which answers one prompt after the other."""

    def __init__(self, python: str, folder: Path, config: ModelConfig, threads: int):
        file = folder / "Q8_0.gguf"
        context = config.max_position_embeddings
        write_layers(resolve_model("smollm2"), config.num_layers, context, "Q8_0", file)
        self._job = {"threads": threads, "num_new": NEW, "eos": list(config.eos_token_ids)}
        self._cases = {
            mode: Case("llama.cpp", mode, python, "run_llama_lookup", str(file), 8.5, 0.0,
                       {"drafts": drafts})
            for mode, drafts in LLAMA_MODES.items()
        }  # fmt: skip

    def answers(self, prompts: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Run]]:
        """By mode and kind, of the prompt of each kind."""
        job = {**self._job, "prompts": [list(ids) for ids in prompts.values()]}
        return {
            mode: {kind: _run(each) for kind, each in zip(prompts, case.run(job), strict=True)}
            for mode, case in self._cases.items()
        }


def _run(answer: dict[str, Any]) -> Run:
    ids, steps = answer["ids"], answer["steps"]
    # A step yields one token of its own, and those of its drafts that are right.
    return Run(answer["seconds"], steps, answer["drafts"], len(ids) - 1 - steps, [ids])
