"""The routed experts of one model out of a cache: opened from settings, asked by layer, counted.

Ties arena, cache and predictor together; does the work of none of them.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.moe import Expert, Visit
from penstock.workers.config import ConfigError, EngineConfig
from penstock.workers.experts.arena import Arena, Manifest
from penstock.workers.experts.budget import slots_within
from penstock.workers.experts.cache import ExpertCache
from penstock.workers.experts.predictor import Predictor, RoutedLayer
from penstock.workers.experts.writer import (
    DTYPES,
    CheckpointExperts,
    remove_arena,
    write_arena,
)
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.checkpoint import StoredTensor
from penstock.workers.models.folder import LoadError
from penstock.workers.stats import ExpertStats, LayerAccuracy

log = logging.getLogger("penstock.experts")


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """How the experts of a model are kept. `num_slots` overrides `cache_gb`; one of them is set."""

    cache_gb: float | None = None
    num_slots: int | None = None
    prefetch: bool = True
    manifest: Manifest | None = None  # of the node's store; None: an arena of one's own
    folder: str = "/dev/shm"  # where that is written
    is_fair: bool = True
    bytes_per_s: float | None = None  # imitates a slow link, for benchmarks and tests


def settings_of(config: EngineConfig, manifest: Manifest | None = None) -> ExpertSettings | None:
    """As configured; None where experts are like other weights."""
    if config.expert_cache_gb is None:
        return None
    return ExpertSettings(
        cache_gb=config.expert_cache_gb,
        prefetch=config.expert_prefetch,
        manifest=manifest,
        folder=config.expert_store_dir,
    )


class RoutedExperts:
    """What a decoder with an expert cache has instead of packed experts."""

    def __init__(self, cache: ExpertCache, config: ModelConfig, prefetch: bool):
        self.cache = cache
        self._wants_predictor = prefetch
        self._config = config
        self.predictor: Predictor | None = None

    def layer(self, layer: int) -> CachedExperts:
        return CachedExperts(self, layer)

    def look_ahead_by(self, layers: Sequence[RoutedLayer]) -> None:
        """All routers are there: predict with them, if prefetch is wanted."""
        if self._wants_predictor:
            facts = self._config
            self.predictor = Predictor(
                layers, facts.num_experts, facts.num_experts_per_token, facts.rms_norm_eps
            )

    def stats(self) -> ExpertStats:
        """A snapshot; from the thread that computes."""
        cache, counts, link = self.cache, self.cache.counts, self.cache.copier.counts
        accuracy = {} if self.predictor is None else self.predictor.accuracy
        return ExpertStats(
            num_slots=cache.num_slots,
            num_experts=len(cache.manifest.entries),
            slot_bytes=cache.slot_bytes,
            epoch=cache.manifest.epoch,
            num_hits=counts.num_hits,
            num_partial=counts.num_partial,
            num_misses=counts.num_misses,
            num_neurons_wanted=counts.num_rows_wanted,
            num_neurons_there=counts.num_rows_there,
            num_prefetched=counts.num_prefetched,
            num_prefetch_used=counts.num_prefetch_used,
            demand_bytes=link.demand_bytes,
            prefetch_bytes=link.prefetch_bytes,
            stall_s=counts.stall_s,
            link_busy_s=link.busy_s,
            num_corrupted=link.num_corrupted,
            by_layer=tuple(
                LayerAccuracy(
                    layer,
                    each.num_routed,
                    each.num_right,
                    each.num_repeated_routed,
                    each.num_repeated,
                )
                for layer, each in accuracy.items()
            ),
        )

    def hottest(self, at_most: int) -> list[tuple[int, int, int]]:
        """(layer, expert, steps that needed it), the most wanted first; from any thread."""
        uses = sorted(self.cache.uses.copy().items(), key=lambda item: -item[1])
        return [(*key, count) for key, count in uses[:at_most]]

    def close(self) -> None:
        self.cache.close()


@dataclass(frozen=True, slots=True, eq=False)
class CachedExperts:
    """The experts of one layer, each of them in device memory while it is used."""

    routed: RoutedExperts
    layer: int

    def visit(self, ids: Tensor, state: Callable[[], Tensor]) -> Visit:
        """For the routing `ids` int64 [T, k]; `state` gives the residual stream [T, hidden], with
        all that is known of this layer's output."""

        def in_turn(needed: list[int]) -> Iterator[tuple[int, Expert]]:
            cache = self.routed.cache
            return cache.visit(self.layer, needed, lambda: self._look_ahead(ids, state))

        return in_turn

    def _look_ahead(self, ids: Tensor, state: Callable[[], Tensor]) -> None:
        """Behind what this layer waits for, have the next one's experts come."""
        predictor = self.routed.predictor
        if predictor is None:
            return
        predictor.observe(self.layer, ids)
        following = predictor.next_of(self.layer)
        if following is not None:
            self.routed.cache.prefetch(following, predictor.foresee(state(), following))


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
    if settings.manifest is not None:
        if settings.manifest.checkpoint != experts.identity(compute):
            raise LoadError(
                f"the expert store {settings.manifest.path} was made of other files than those in "
                f"{folder}; have the store reload, or restart the cluster"
            )
        arena = Arena(settings.manifest)
    else:
        arena = _own_arena(experts, compute, Path(settings.folder))
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
        len(arena.manifest.entries),
        cache.num_slots,
        cache.slot_bytes / 2**20,
    )
    return RoutedExperts(cache, config, settings.prefetch), experts.names()


def _own_arena(experts: CheckpointExperts, compute: torch.dtype, folder: Path) -> Arena:
    """Of this process alone: its file has no name any more, so nothing is left behind."""
    path = folder / f"penstock-experts-{os.getpid()}-{secrets.token_hex(4)}.arena"
    try:
        return Arena(write_arena(experts, path, compute))
    finally:
        remove_arena(path)
