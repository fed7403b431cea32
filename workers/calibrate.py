"""Calibrates neuron thresholds by running a model over text: a given one, or its own output.

Runs an exact engine and scores the input of each MoE layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.kernels.quant import WeightFormat
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.load import device_of
from penstock.workers.errors import ConfigError
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.experts.checkpoint import CheckpointExperts
from penstock.workers.experts.neurons.scores import NeuronScores
from penstock.workers.experts.neurons.thresholds import Calibration, ScoreHistograms
from penstock.workers.models.loader import load_model, open_model
from penstock.workers.option_groups.device import Device
from penstock.workers.quantization import check_neurons
from penstock.workers.request import Request, SamplingParams

WINDOW = 512  # tokens of one text
NUM_SEQS = 64  # texts at a time
MIN_WINDOW = 32
BLOCK_SIZE = 16


def calibrate(
    model: str,
    text_ids: Sequence[int] | None,
    num_tokens: int,
    *,
    format: WeightFormat = "int8",
    weights: str = "auto",
    device: Device = "cpu",
    expert_cache_gb: float = 1.0,
    folder: str = "/dev/shm",
    seed: int = 0,
    text: str = "",
    on_tokens: Callable[[int], object] = lambda _: None,
) -> Calibration:
    """Thresholds from about `num_tokens` tokens of `text_ids`, or, where that is None, of what the
    model writes by itself at temperature 1.

    Needs memory as `penstock serve` does, and a low-bit copy of all experts' gate and up matrices.
    `on_tokens` is called with the number of tokens of each step. Raises ConfigError and LoadError
    as loading does.
    """
    model_folder, model_config, tensors = open_model(model, weights, device_of(device))
    if not any(model_config.moe_layers):
        raise ConfigError(
            "`penstock calibrate` is for mixture-of-experts models, and this one is dense: it has "
            "no experts whose neurons could be left out"
        )
    experts = CheckpointExperts(model_folder, model_config, tensors)
    check_neurons(experts.config.stored_scheme, weights, "penstock calibrate")
    settings = ExpertSettings(cache_gb=expert_cache_gb, prefetch=False, folder=folder)
    decoder = load_model(model, weights=weights, device=device, progress=False, experts=settings)
    assert decoder.routed is not None
    try:
        source = decoder.routed.cache.copier.source
        scores = NeuronScores(source, "product", format, decoder.device)
        histograms = ScoreHistograms(len(experts.layers), source.manifest.num_experts)
        places = {layer: place for place, layer in enumerate(experts.layers)}

        def watch(layer: int, x: Tensor, ids: Tensor) -> None:
            for expert in ids.unique().tolist():
                rows = x[(ids == expert).any(1)]
                histograms.add(places[layer], expert, scores.all_of(layer, expert, rows))
            if layer == experts.layers[0]:
                on_tokens(len(x))

        decoder.routed.watch = watch
        length = min(WINDOW, decoder.config.max_position_embeddings - 1)
        if text_ids is None:
            length = min(length, max(MIN_WINDOW, -(-num_tokens // NUM_SEQS)))
            begin = decoder.config.bos_token_id or 0
            prompts: list[tuple[int, ...]] = [(begin,)] * -(-num_tokens // length)
            num_new = length
        else:
            ids = text_ids[:num_tokens]
            prompts = [tuple(ids[i : i + length]) for i in range(0, len(ids), length)]
            num_new = 1
        config = EngineConfig(
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=WINDOW,
            num_blocks=NUM_SEQS * (-(-(length + 1) // BLOCK_SIZE) + 1),
            block_size=BLOCK_SIZE,
            prefix_cache=False,
            seed=seed,
        )
        _run(Engine(config, decoder), prompts, num_new)
    finally:
        decoder.routed.close()
    return Calibration.of(
        histograms,
        routers=experts.routers(),
        format=format,
        text=text or "what the model writes at temperature 1",
        num_tokens=int(histograms.num_tokens[0].sum()) // decoder.config.num_experts_per_token,
        layers=experts.layers,
    )


@torch.inference_mode()
def _run(engine: Engine, prompts: Sequence[tuple[int, ...]], num_new: int) -> None:
    params = SamplingParams(max_tokens=num_new, temperature=1.0, ignore_eos=True)
    waiting = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while waiting or engine.has_work():
        while waiting and engine.stats().num_running + engine.stats().num_waiting < NUM_SEQS:
            engine.add(waiting.pop())
        engine.step()
