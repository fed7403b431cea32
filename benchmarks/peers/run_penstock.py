"""Penstock's side of a job (job.py): the engine in this process, activations in bf16.

Settings: those of `load_model` (weights, int8_group, quantize_lm_head, dtype), of int4 (int4_group,
int4_wide_layers), and kv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.peers.job import answer
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.evaluation.judge import WeightSize
from penstock.workers.evaluation.scoring import WindowScores
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.quantization import Int4Options
from penstock.workers.request import Request, SamplingParams

BLOCK_SIZE = 16  # EngineConfig's


def load(model: str, settings: dict[str, Any]) -> Decoder:
    known = {name: value for name, value in settings.items() if name != "kv"}
    int4 = Int4Options(known.pop("int4_group", 16), known.pop("int4_activations", "auto"))
    known.setdefault("int4_wide_layers", True)
    return load_model(model, **{"dtype": "bf16", "progress": False, "int4": int4, **known})


def size_of(model: str, settings: dict[str, Any]) -> tuple[float, float]:
    """Bits of a weight in linear layers without the head, and MiB of all weights in memory."""
    found = WeightSize.of(load(model, settings))
    return found.bits_per_weight, found.num_bytes / 2**20


def _engine(job: dict[str, Any], decoder: Decoder) -> Engine:
    torch.set_num_threads(job["threads"])
    torch.set_flush_denormal(True)
    config = EngineConfig(
        num_blocks=-(-job.get("room", 25_600) // BLOCK_SIZE),
        max_num_batched_tokens=job.get("chunk", 512),
        prefix_cache=False,
        kv=job["settings"].get("kv", "auto"),
    )
    return Engine(config, decoder)


def scores(job: dict[str, Any]) -> list[list[float]]:
    decoder = load(job["model"], job["settings"])
    found = WindowScores(job["windows"], decoder, None)
    found.score(_engine(job, decoder), {})
    nll: list[list[float]] = found.nll.round(6).tolist()
    return nll


def opened(job: dict[str, Any]) -> Callable[[list[dict[str, Any]]], Iterator[int]]:
    engine = _engine(job, load(job["model"], job["settings"]))

    def run(requests: list[dict[str, Any]]) -> Iterator[int]:
        for i, each in enumerate(requests):
            params = SamplingParams(temperature=0.0, max_tokens=each["num_new"], ignore_eos=True)
            engine.add(Request(f"r{i}", tuple(each["prompt_ids"]), params))
        while engine.has_work():
            yield sum(len(delta.token_ids) for delta in engine.step())

    return run


if __name__ == "__main__":
    answer(scores, opened)
