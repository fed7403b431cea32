"""The routed experts of one checkpoint behind a cache, opened as configured.

Ties arena, slots, scores and routing together; does the work of none of them.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.workers.config import ConfigError, EngineConfig
from penstock.workers.experts.arena import Arena, Manifest, RowSource
from penstock.workers.experts.budget import slots_within
from penstock.workers.experts.cache import ExpertCache
from penstock.workers.experts.calibration import FILE_NAME, Calibration
from penstock.workers.experts.neurons import NeuronChoice, NeuronScores
from penstock.workers.experts.routed import RoutedExperts
from penstock.workers.experts.writer import (
    DTYPES,
    CheckpointExperts,
    remove_arena,
    write_arena,
)
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.checkpoint import StoredTensor
from penstock.workers.models.folder import LoadError

log = logging.getLogger("penstock.experts")


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """How the experts of a model are kept. `num_slots` overrides `cache_gb`; one of them is set."""

    cache_gb: float | None = None
    num_slots: int | None = None
    prefetch: bool = True
    mode: str = "exact"  # the least exact that rows may be
    keep: float = 0.5  # sparse: the share of neurons
    score: str = "product"
    thresholds: str | None = None  # the file; None: beside the model, if neurons are chosen
    manifest: Manifest | None = None  # of the node's store; None: an arena of one's own
    folder: str = "/dev/shm"  # where that is written
    source: RowSource | None = None  # of a store on another node, which `manifest` is of
    is_fair: bool = True
    bytes_per_s: float | None = None  # imitates a slow link, for benchmarks and tests


def settings_of(
    config: EngineConfig, manifest: Manifest | None = None, source: RowSource | None = None
) -> ExpertSettings | None:
    """As configured; None where experts are like other weights."""
    if config.expert_cache_gb is None:
        return None
    return ExpertSettings(
        cache_gb=config.expert_cache_gb,
        prefetch=config.expert_prefetch,
        mode=config.moe_mode,
        keep=config.moe_keep,
        score=config.moe_score,
        thresholds=config.moe_thresholds,
        manifest=manifest,
        source=source,
        folder=config.expert_store_dir,
    )


def check_weights(weights: str, config: ModelConfig) -> None:
    """Raise ConfigError unless experts are plain numbers: the store knows no quantised ones."""
    if config.stored_scheme is not None:
        raise ConfigError(
            "expert_cache_gb takes checkpoints that are not quantised; this one is: leave it out, "
            "or give the original checkpoint"
        )
    if weights not in ("auto", *DTYPES):
        raise ConfigError(
            f"expert_cache_gb keeps experts in the checkpoint's own numbers, and weights is "
            f"{weights}: leave one of them out, or choose weights auto, fp32 or bf16"
        )


def open_experts(
    settings: ExpertSettings,
    folder: Path,
    config: ModelConfig,
    tensors: dict[str, StoredTensor],
    device: torch.device,
) -> tuple[RoutedExperts, set[str]]:
    """The experts of the checkpoint in `folder` behind a cache, and the names of their tensors.

    `config` says in which dtype the model computes. Raises ConfigError for a dense model or a
    budget that is too small, and LoadError if the store's arena is another checkpoint's.
    """
    compute = DTYPES[config.dtype]
    experts = CheckpointExperts(folder, config, tensors)
    arena: RowSource
    if settings.manifest is not None:
        _check_manifest(settings.manifest, experts, compute, is_far=settings.source is not None)
        arena = settings.source or Arena(settings.manifest)
    else:
        has_twins = settings.mode == "quantized"
        arena = _own_arena(experts, compute, Path(settings.folder), has_twins)
    if settings.mode == "quantized" and not arena.manifest.has_twins:
        raise LoadError(
            f"the expert store {arena.manifest.path} has no int8 twins, and moe_mode quantized "
            "needs them; restart the cluster"
        )
    num_slots = settings.num_slots
    if num_slots is None:
        assert settings.cache_gb is not None
        num_slots = slots_within(settings.cache_gb, arena.manifest, compute, device)
    cache = ExpertCache(
        arena,
        num_slots,
        compute,
        device,
        is_fair=settings.is_fair,
        bytes_per_s=settings.bytes_per_s,
    )
    log.info(
        "%d of %d experts fit into their cache: %d slots of %.2f MiB",
        cache.num_slots,
        arena.manifest.num_all,
        cache.num_slots,
        cache.slot_bytes / 2**20,
    )
    choice = None
    if settings.mode == "sparse" or settings.thresholds is not None:
        choice = _choice(settings, experts, arena, device)
    routed = RoutedExperts(cache, config, prefetch=settings.prefetch, choice=choice)
    return routed, experts.names()


def _check_manifest(
    manifest: Manifest, experts: CheckpointExperts, compute: torch.dtype, is_far: bool
) -> None:
    """Raise LoadError unless it is of the same checkpoint: the same files, or, where they lie on
    another node, the same routers."""
    if is_far:
        is_ours = manifest.routers == experts.routers()
    else:
        is_ours = manifest.checkpoint == experts.identity(compute, manifest.has_twins)
    if not is_ours:
        raise LoadError(
            f"the expert store {manifest.path} was made of other files than those in "
            f"{experts.folder}; have the store reload, or restart the cluster"
        )


def _choice(
    settings: ExpertSettings, experts: CheckpointExperts, source: RowSource, device: torch.device
) -> NeuronChoice:
    """By thresholds of the model's own. Raises LoadError if there are none, ConfigError for a
    checkpoint without routers."""
    path = experts.folder / FILE_NAME
    if settings.thresholds is not None:
        path = Path(settings.thresholds).expanduser()
    if not path.is_file():
        raise LoadError(
            f"{path} is not there, and neurons are chosen by its thresholds; write it with: "
            "penstock calibrate MODEL, or name another file with moe_thresholds"
        )
    calibration = Calibration.load(path)
    calibration.check(path, experts.routers())
    scores = NeuronScores(source, settings.score, calibration.format, device)
    log.info(
        "%.1f MiB of %s copies tell neurons' %s scores",
        scores.num_bytes / 2**20,
        calibration.format,
        settings.score,
    )
    return NeuronChoice(scores, calibration.at(settings.score, settings.keep))


def _own_arena(
    experts: CheckpointExperts, compute: torch.dtype, folder: Path, has_twins: bool
) -> Arena:
    """Of this process alone: its file has no name any more, so nothing is left behind."""
    path = folder / f"penstock-experts-{os.getpid()}-{secrets.token_hex(4)}.arena"
    try:
        return Arena(write_arena(experts, path, compute, has_twins=has_twins))
    finally:
        remove_arena(path)
