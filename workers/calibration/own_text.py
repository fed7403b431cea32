"""The text that a model is calibrated on where none is given: what it writes itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from penstock.workers.calibration.text import WINDOW
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams

NUM_SEQS = 32  # windows at a time
BLOCK_SIZE = 16


@torch.inference_mode()
def own_windows(
    model: Path, num_tokens: int, on_tokens: Callable[[int], object] = lambda _: None
) -> list[list[int]]:
    """About `num_tokens` ids in windows of one length, sampled at temperature 1 from the token that
    begins a text on, ends of sequence included. The same on the same machine.

    `on_tokens` is called with the number of tokens after each step. Raises ConfigError and
    LoadError as loading does.
    """
    decoder = load_model(str(model), weights="auto", device="cpu", progress=False)
    length = min(WINDOW, decoder.config.max_position_embeddings - 1, num_tokens)
    first, num_windows = _first_token(decoder.config), max(1, num_tokens // length)
    num_seqs = min(NUM_SEQS, num_windows)
    config = EngineConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=WINDOW,
        max_waiting=num_windows,
        num_blocks=num_seqs * (length // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        prefix_cache=False,
        seed=0,
    )
    engine = Engine(config, decoder)
    params = SamplingParams(max_tokens=length - 1, temperature=1.0, ignore_eos=True)
    windows = [[first] for _ in range(num_windows)]
    for i in range(num_windows):
        engine.add(Request(str(i), (first,), params))
    while engine.has_work():
        for delta in engine.step():
            windows[int(delta.request_id)] += delta.token_ids
            on_tokens(len(delta.token_ids))
    engine.close()
    return windows


def _first_token(config: ModelConfig) -> int:
    """A text's beginning; for models that have no token for it, an end: it stands between texts."""
    if config.bos_token_id is not None:
        return config.bos_token_id
    return min(config.eos_token_ids, default=0)
