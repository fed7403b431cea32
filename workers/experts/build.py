"""The routed experts of one checkpoint behind a cache, opened as configured.

Ties expert file, slots, scores and routing together; does the work of none of them.

How many expert slots a budget of device memory holds.

Knows sizes; nothing of who comes into a slot.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.experts.cache import ExpertCache
from penstock.workers.experts.checkpoint import CheckpointExperts
from penstock.workers.experts.expert_file import ExpertFile, Manifest, RowSource
from penstock.workers.experts.layouts import ExpertLayout, NeuronLayout, PackedLayout
from penstock.workers.experts.neurons import NeuronScores, NeuronSelector
from penstock.workers.experts.packed import PackedExperts
from penstock.workers.experts.routed import RoutedExperts
from penstock.workers.experts.thresholds import FILE_NAME, Calibration
from penstock.workers.experts.writer import remove_expert_file, write_expert_file
from penstock.workers.model_config import ModelConfig
from penstock.workers.quantization import check_neurons
from penstock.workers.weights.checkpoint import StoredTensor
from penstock.workers.weights.sources import DTYPES

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
    manifest: Manifest | None = None  # of the node's store; None: a file of this process's own
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


def build_experts(
    settings: ExpertSettings,
    folder: Path,
    config: ModelConfig,
    tensors: dict[str, StoredTensor],
    device: torch.device,
    weights: str = "auto",
) -> tuple[RoutedExperts, set[str]]:
    """The experts of the checkpoint in `folder` behind a cache, and the names of their tensors.

    `weights` is the format that they are served in, and `config` says in which dtype the model
    computes. Raises ConfigError for a dense model, a budget that is too small or a mode that the
    format does not have, and LoadError if the store's expert file is another checkpoint's.
    """
    compute = DTYPES[config.dtype]
    experts = CheckpointExperts(folder, config, tensors, weights, device.type)
    if settings.mode != "exact" or settings.thresholds is not None:
        who = "moe_thresholds" if settings.mode == "exact" else f"moe_mode {settings.mode}"
        check_neurons(config.stored_scheme, weights, who)
    packed = PackedExperts(experts, compute) if experts.is_packed else None
    expert_file = _row_source(settings, experts, compute)
    layout: ExpertLayout
    if packed is None:
        layout = NeuronLayout(expert_file.manifest, compute, device)
    else:
        packed.check(expert_file.manifest)
        layout = PackedLayout(packed.image, device)
    cache = _cache_of(settings, expert_file, layout)
    selector = None
    if settings.mode == "sparse" or settings.thresholds is not None:
        selector = _neuron_selector(settings, experts, expert_file, device)
    routed = RoutedExperts(cache, config, prefetch=settings.prefetch, selector=selector)
    return routed, experts.names()


def _row_source(
    settings: ExpertSettings, experts: CheckpointExperts, compute: torch.dtype
) -> RowSource:
    """The store's, or one of this process. Raises LoadError if it is not of these experts."""
    needs_int8_copies = settings.mode == "quantized"
    if settings.manifest is None:
        return _own_expert_file(experts, compute, Path(settings.folder), needs_int8_copies)
    _check_manifest(settings.manifest, experts, compute, is_remote=settings.source is not None)
    if needs_int8_copies and not settings.manifest.has_int8_copies:
        raise LoadError(
            f"the expert store {settings.manifest.path} has no int8 copies, and moe_mode quantized "
            "needs them; restart the cluster"
        )
    return settings.source or ExpertFile(settings.manifest)


def _cache_of(
    settings: ExpertSettings, expert_file: RowSource, layout: ExpertLayout
) -> ExpertCache:
    num_slots, num_experts = settings.num_slots, expert_file.manifest.num_all
    if num_slots is None:
        assert settings.cache_gb is not None
        num_slots = slots_within(settings.cache_gb, layout.num_bytes, num_experts)
    cache = ExpertCache(
        expert_file, num_slots, layout, is_fair=settings.is_fair, bytes_per_s=settings.bytes_per_s
    )
    log.info(
        "%d of %d experts fit into their cache: %d slots of %.2f MiB",
        cache.num_slots,
        num_experts,
        cache.num_slots,
        layout.num_bytes / 2**20,
    )
    return cache


def _check_manifest(
    manifest: Manifest, experts: CheckpointExperts, compute: torch.dtype, is_remote: bool
) -> None:
    """Raise LoadError unless it is of the same checkpoint: the same files, or, where they lie on
    another node, the same routers."""
    if is_remote:
        is_ours = manifest.routers == experts.routers()
    else:
        is_ours = manifest.checkpoint == experts.identity(compute, manifest.has_int8_copies)
    if not is_ours:
        raise LoadError(
            f"the expert store {manifest.path} was made of other files than those in "
            f"{experts.folder}; have the store reload, or restart the cluster"
        )


def _neuron_selector(
    settings: ExpertSettings, experts: CheckpointExperts, source: RowSource, device: torch.device
) -> NeuronSelector:
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
    return NeuronSelector(scores, calibration.at(settings.score, settings.keep))


def _own_expert_file(
    experts: CheckpointExperts, compute: torch.dtype, folder: Path, has_int8_copies: bool
) -> ExpertFile:
    """Of this process alone: its file has no name any more, so nothing is left behind."""
    path = folder / f"penstock-experts-{os.getpid()}-{secrets.token_hex(4)}.experts"
    try:
        return ExpertFile(
            write_expert_file(experts, path, compute, has_int8_copies=has_int8_copies)
        )
    finally:
        remove_expert_file(path)


MIN_SLOTS = 2  # one in use, one on its way


def slots_within(gigabytes: float, slot_bytes: int, num_experts: int) -> int:
    """How many slots of `slot_bytes` a budget of GiB gives, at most one for each of `num_experts`.
    Raises ConfigError below two."""
    num_slots = min(int(gigabytes * 2**30 // slot_bytes), num_experts)
    if num_slots < min(MIN_SLOTS, num_experts):
        raise ConfigError(
            f"expert_cache_gb {gigabytes:g} holds {num_slots} of the {num_experts} experts of this "
            f"model, which take {slot_bytes / 2**30:.4f} GiB each: {MIN_SLOTS} are the least; "
            f"raise it to {MIN_SLOTS * slot_bytes / 2**30:.4f}"
        )
    return num_slots
