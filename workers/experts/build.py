"""Builds the expert cache of one checkpoint from its settings.

Creates the expert file or opens the store's, sizes the slots from the memory budget, and loads
neuron thresholds where they are needed.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.kernels.quant import INT8_GROUP
from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.experts.cache import ExpertCache
from penstock.workers.experts.checkpoint import CheckpointExperts
from penstock.workers.experts.expert_file import (
    ExpertFile,
    ExpertShare,
    Manifest,
    RowSource,
    copies_for,
)
from penstock.workers.experts.layouts import ExpertLayout, NeuronLayout, PackedLayout
from penstock.workers.experts.modes import POOLED_MODES
from penstock.workers.experts.neurons.scores import NeuronScores, NeuronSelector
from penstock.workers.experts.neurons.thresholds import Calibration, thresholds_path
from penstock.workers.experts.packed import PackedExperts
from penstock.workers.experts.routed import RoutedExperts
from penstock.workers.experts.writer import remove_expert_file, write_expert_file
from penstock.workers.model_config import ModelConfig
from penstock.workers.quantization import (
    INT4,
    Int4Options,
    check_neurons,
)
from penstock.workers.weights.checkpoint import StoredTensor
from penstock.workers.weights.sources import DTYPES

log = logging.getLogger("penstock.experts")


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """Settings of the expert cache. `num_slots` overrides `cache_gb`; one of the two is set."""

    cache_gb: float | None = None
    num_slots: int | None = None
    prefetch: bool | None = True  # None: where timed steps say that it pays
    mode: str = "exact"  # the least exact mode that a request may have
    keep: float = 0.5  # sparse and streamed: the share of neurons that are selected
    score: str = "product"
    copies: str = "int8"  # quantized: their number format
    thresholds: str | None = None  # a file; None: the one in the model's folder, if needed
    # What is in that file, of a rank of a group: the first one has read it. None: it is read here.
    calibration: Calibration | None = None
    manifest: Manifest | None = None  # of the node's store; None: this process writes its own file
    folder: str = "/dev/shm"  # of the file that this process writes
    source: RowSource | None = None  # for a store on another node: reads rows of `manifest`
    shares: tuple[ExpertShare, ...] = ()  # of a rank of a group: the experts that it has
    is_fair: bool = True  # layers that hold more than their share of slots are evicted from first
    bytes_per_s: float | None = None  # simulates a slow host link, for benchmarks and tests


def settings_of(
    config: EngineConfig, manifest: Manifest | None = None, source: RowSource | None = None
) -> ExpertSettings | None:
    """The settings of `config`; None if experts are loaded like other weights."""
    if config.expert_cache_gb is None:
        return None
    return ExpertSettings(
        cache_gb=config.expert_cache_gb,
        prefetch={"on": True, "off": False}.get(config.expert_prefetch),
        mode=config.moe_mode,
        keep=config.moe_keep,
        score=config.moe_score,
        copies=config.moe_copies,
        thresholds=config.moe_thresholds,
        manifest=manifest,
        source=source,
        folder=config.expert_store_dir,
    )


def settings_in_group(
    config: EngineConfig,
    manifest: Manifest | None,
    share: ExpertShare | None,
    calibration: Calibration | None,
) -> ExpertSettings | None:
    """The same for a rank of a group, which has a cache of its own experts, `share`; None: it has
    none. `manifest`: of a file with those of all ranks of this machine; None: the rank writes one
    with its own. `calibration`: of all ranks, where neurons are selected. What is predicted of
    others' experts is left to them."""
    found = settings_of(config, manifest)
    if found is None or share is None:
        return None
    return replace(found, shares=(share,), calibration=calibration)


def find_calibration(settings: ExpertSettings, folder: Path) -> Calibration | None:
    """The thresholds by which neurons of the model in `folder` are selected; None: they are not.
    Raises LoadError."""
    if settings.mode not in POOLED_MODES and settings.thresholds is None:
        return None
    if settings.calibration is not None:
        return settings.calibration
    path = _thresholds_file(settings, folder)
    if not path.is_file():
        raise LoadError(
            f"{path} is missing, and neurons are selected by its thresholds; write it with: "
            "penstock calibrate MODEL, or name another file with moe_thresholds"
        )
    return Calibration.load(path)


def _thresholds_file(settings: ExpertSettings, folder: Path) -> Path:
    if settings.thresholds is None:
        return thresholds_path(folder)
    return Path(settings.thresholds).expanduser()


def check_mode(settings: ExpertSettings, config: ModelConfig, weights: str) -> None:
    """Raise ConfigError unless experts of this model, served in `weights`, have single neurons
    where the mode needs them."""
    if config.expert_bias and settings.mode != "exact":
        raise ConfigError(
            f"moe_mode {settings.mode} needs the single neurons of experts, and those of this "
            "model have biases, so they are loaded whole: leave it at exact"
        )
    if settings.mode != "exact" or settings.thresholds is not None:
        who = "moe_thresholds" if settings.mode == "exact" else f"moe_mode {settings.mode}"
        has_copies = settings.mode == "sparse"
        check_neurons(config.stored_scheme, weights, who, has_copies=has_copies)


def build_experts(
    settings: ExpertSettings,
    folder: Path,
    config: ModelConfig,
    tensors: dict[str, StoredTensor],
    device: torch.device,
    weights: str = "auto",
    int8_group: int | None = INT8_GROUP,
    int4: Int4Options = INT4,
) -> tuple[RoutedExperts, set[str]]:
    """The experts of the checkpoint in `folder` with a cache, and the names of their tensors.

    `weights` is the format that they are served in, `int8_group` and `int4` as for `load_model`;
    the model computes in `config.dtype`. Raises ConfigError for a dense model, a budget that is too
    small or a mode that the format does not support, and LoadError if the store's expert file
    belongs to another checkpoint.
    """
    compute = DTYPES[config.dtype]
    experts = CheckpointExperts(folder, config, tensors, weights, device.type, int4)
    check_mode(settings, config, weights)
    packed = PackedExperts(experts, compute, int8_group) if experts.is_packed else None
    expert_file = _row_source(settings, experts, compute)
    layout: ExpertLayout
    if packed is None:
        layout = NeuronLayout(expert_file.manifest, compute, device)
    else:
        packed.check(expert_file.manifest)
        layout = PackedLayout(packed.images, packed.kinds, device)
    cache = _cache_of(settings, expert_file, layout)
    selector, calibration = None, find_calibration(settings, experts.folder)
    if calibration is not None:
        selector = _neuron_selector(settings, calibration, experts, expert_file, device)
    routed = RoutedExperts(cache, config, prefetch=settings.prefetch, selector=selector)
    return routed, experts.names()


def _row_source(
    settings: ExpertSettings, experts: CheckpointExperts, compute: torch.dtype
) -> RowSource:
    """The store's rows, or those of a file that this process writes. Raises LoadError if the store
    holds other experts."""
    copies = copies_for(settings.mode, experts.weights, settings.copies)
    if settings.manifest is None:
        return _own_expert_file(experts, compute, Path(settings.folder), copies, settings.shares)
    _check_manifest(settings.manifest, experts, compute, is_remote=settings.source is not None)
    if copies and copies != settings.manifest.copies:
        raise LoadError(
            f"moe_mode {settings.mode} needs {copies} copies of the experts, and the expert store "
            f"{settings.manifest.path} has {settings.manifest.copies or 'none'}; restart the "
            "cluster"
        )
    return settings.source or ExpertFile(settings.manifest.part(settings.shares))


def _cache_of(
    settings: ExpertSettings, expert_file: RowSource, layout: ExpertLayout
) -> ExpertCache:
    facts, num_slots, num_pooled = expert_file.manifest, settings.num_slots, 0
    if num_slots is None:
        assert settings.cache_gb is not None
        num_slots = slots_within(settings.cache_gb, layout.num_bytes, facts.num_all)
    if settings.mode in POOLED_MODES:
        num_slots, num_pooled = split_for_neurons(num_slots, layout.num_bytes, facts)
    cache = ExpertCache(
        expert_file,
        num_slots,
        layout,
        is_fair=settings.is_fair,
        num_pooled=num_pooled,
        bytes_per_s=settings.bytes_per_s,
    )
    log.info(
        "expert cache: %d of %d experts fit, slots of %.2f MiB; %d neurons of %d each besides",
        cache.num_slots,
        facts.num_all,
        layout.num_bytes / 2**20,
        num_pooled,
        facts.inner,
    )
    return cache


def split_for_neurons(num_slots: int, slot_bytes: int, facts: Manifest) -> tuple[int, int]:
    """The memory of `num_slots` experts, parted: slots for prompts, whose rows are exact, and the
    neurons of a pool for answers. Both have room for one expert at least."""
    num_whole = max(min(MIN_SLOTS, num_slots), round(num_slots * WHOLE_SHARE))
    row_bytes = facts.row_bytes_of(facts.num_experts if facts.is_packed else 0)
    return num_whole, max(facts.inner, (num_slots - num_whole) * slot_bytes // row_bytes)


def _check_manifest(
    manifest: Manifest, experts: CheckpointExperts, compute: torch.dtype, is_remote: bool
) -> None:
    """Raise LoadError unless `manifest` is of the same checkpoint: the same files, or, if they lie
    on another node, the same routers."""
    if is_remote:
        is_ours = manifest.routers == experts.routers()
    else:
        is_ours = manifest.checkpoint == experts.identity(compute, manifest.copies)
    if not is_ours:
        raise LoadError(
            f"the expert store {manifest.path} was made from other files than those in "
            f"{experts.folder}; restart the cluster to reload the store"
        )


def _neuron_selector(
    settings: ExpertSettings,
    calibration: Calibration,
    experts: CheckpointExperts,
    source: RowSource,
    device: torch.device,
) -> NeuronSelector:
    """A selector with the model's own thresholds. Raises LoadError if they are another model's, and
    ConfigError for a checkpoint without routers."""
    calibration.check(_thresholds_file(settings, experts.folder), experts.routers())
    scores = NeuronScores(source, settings.score, calibration.format, device)
    log.info(
        "neuron scores: %.1f MiB of %s copies, score %s",
        scores.num_bytes / 2**20,
        calibration.format,
        settings.score,
    )
    return NeuronSelector(scores, calibration.at(settings.score, settings.keep))


def _own_expert_file(
    experts: CheckpointExperts,
    compute: torch.dtype,
    folder: Path,
    copies: str,
    shares: Sequence[ExpertShare],
) -> ExpertFile:
    """A file for this process alone; unlinked at once, so that none is left when it ends."""
    path = folder / f"penstock-experts-{os.getpid()}-{secrets.token_hex(4)}.experts"
    try:
        manifest = write_expert_file(experts, path, compute, copies=copies, shares=shares)
        return ExpertFile(manifest)
    finally:
        remove_expert_file(path)


MIN_SLOTS = 2  # one in use, one loading
WHOLE_SHARE = 0.125  # of the cache, for whole experts, where answers have a pool of neurons


def slots_within(gigabytes: float, slot_bytes: int, num_experts: int) -> int:
    """The slots of `slot_bytes` that fit into `gigabytes` GiB, at most one for each of
    `num_experts`. Raises ConfigError below two."""
    num_slots = min(int(gigabytes * 2**30 // slot_bytes), num_experts)
    if num_slots < min(MIN_SLOTS, num_experts):
        raise ConfigError(
            f"expert_cache_gb {gigabytes:g} holds {num_slots} of the {num_experts} experts of this "
            f"model, which take {slot_bytes / 2**30:.4f} GiB each; at least {MIN_SLOTS} must fit: "
            f"raise it to {MIN_SLOTS * slot_bytes / 2**30:.4f}"
        )
    return num_slots
