"""MoE checkpoints as tests of experts need them: what is stored, the plain model, bad guesses.

Knows nothing of what is tested.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from penstock.kernels.moe.rows import write_neurons
from penstock.workers.experts.cache import ExpertCache
from penstock.workers.experts.checkpoint import CheckpointExperts
from penstock.workers.experts.layouts import NeuronLayout
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import load_model
from penstock.workers.weights.checkpoint import open_checkpoint
from tests.workers.checkpoints import FAMILIES
from tests.workers.models.test_decoder import PagedDecoder, Tokens, folder_of

OTHERS = ("mixtral", "minimax_m2", "qwen3_next")
MOE = [name for name in FAMILIES if "moe" in name or name in OTHERS]
BIASED = ["gpt_oss"]  # whose experts are moved whole
NUM_LAYERS, NUM_EXPERTS = 3, 5


def experts_of(folder: Path) -> CheckpointExperts:
    return CheckpointExperts(folder, ModelConfig.from_pretrained(folder), open_checkpoint(folder))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def poison(cache: ExpertCache) -> None:
    """Rows that were never written are NaN; the layout's padding stays zero."""
    facts = cache.manifest
    shape = facts.inner, 3 * facts.hidden
    if cache.pool is not None:
        cache.pool.rows.fill_(0xFF)
    for slot in cache.table:
        if facts.is_packed:
            slot.memory.fill_(0xFF)
            continue
        assert isinstance(cache.layout, NeuronLayout)
        device = cache.layout.device
        nan = torch.full(shape, float("nan"), dtype=cache.layout.dtype, device=device)
        write_neurons(slot.widest, nan, torch.arange(facts.inner, device=device))


@functools.cache
def plain(name: str, weights: str = "fp32"):
    return load_model(folder_of(name), weights=weights, progress=False)


class Garbage:
    """A predictor that is always wrong or worse, of experts and of neurons."""

    num_experts = NUM_EXPERTS

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.accuracy: dict = {}

    def needs_all_experts(self, num_rows: int) -> bool:
        return bool(self.random.integers(0, 2))

    def observe(self, *_: object) -> None: ...

    def forget(self, *_: object) -> None: ...

    def next_of(self, _: int) -> int:
        return int(self.random.integers(-1, NUM_LAYERS + 1))

    def predict_experts(self, *_: object) -> list[int]:
        return self.random.integers(-2, NUM_EXPERTS + 2, self.random.integers(0, 9)).tolist()

    def predict_neurons(self, *_: object) -> dict[int, np.ndarray]:
        some = self.random.random((NUM_EXPERTS, 40)) < self.random.random()
        return {
            e: np.flatnonzero(some[e]) for e in range(NUM_EXPERTS) if self.random.random() < 0.8
        }


@torch.inference_mode()
def logits_of(decoder, prompt: Sequence[int], num_new: int) -> torch.Tensor:
    """Of a prefill, and of greedy decoding after it."""
    paged, seq = PagedDecoder(decoder), Tokens(list(prompt))
    rows = [*paged.step((seq, len(prompt)))[0]]
    for _ in range(num_new):
        seq.ids.append(int(rows[-1].argmax()))
        rows += [*paged.step((seq, 1), num_decode=1)[0]]
    return torch.stack(rows)
