"""How a worker's memory is divided: KV blocks, activations, logits and scratch, in one arena."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError
from penstock.workers.memory.arena import Arena, BlockLayout
from penstock.workers.memory.block_pool import BlockPool
from penstock.workers.memory.kv_format import KvFormat
from penstock.workers.memory.workspace import BufferPlan, StepMemory, StepRange, logits_plan
from penstock.workers.models.decoder import Decoder
from penstock.workers.scheduling.deferral import most_pending, num_scratch_blocks, scratch_bytes

log = logging.getLogger("penstock.engine")

GPU_KV_FRACTION = 0.85  # of the memory that is free once the weights are loaded
CPU_KV_FRACTION = 1 / 8  # of the machine's memory: other programs need the rest


@dataclass(frozen=True, slots=True)
class Beside:
    """Memory that a draft model takes beside the arena: in all, and for each block of the pool."""

    num_bytes: int = 0
    block_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankSizes:
    """The sizes that determine how one rank of a group, or a single process, divides its memory."""

    plan: BufferPlan  # of a step's activations
    layout: BlockLayout
    state_bytes: int = 0  # of recurrent states

    def step_range(self, config: EngineConfig) -> StepRange:
        """The reserve has room for a row of each sequence, so that a step is possible however full
        the pool is, and for some rows of drafts; with separate activations, or without K and V,
        for the largest step."""
        block_bytes, rows = self.layout.block_bytes, config.max_sampled_rows
        if config.activation_memory == "separate" or not block_bytes:
            rows = config.max_num_batched_tokens
        elif num_scratch_blocks(config):  # one sequence at its limit always fits
            rows += most_pending(config)
        return StepRange(self.plan, rows, block_bytes)


def step_memory(
    config: EngineConfig,
    model: Decoder,
    ranks: Sequence[RankSizes],
    extra_bytes: int = 0,
    *,
    other_bytes: int = 0,
    beside: Beside = Beside(),
) -> StepMemory:
    """The arena with its pool, and the activations and logits of a step in it.

    `ranks`: this process, then the others of its group, if it decides how many blocks all have.
    `extra_bytes` of the reserve stay free, after the scratch blocks. `other_bytes` of the device
    are left to adapters that are loaded later, where the size follows from its free memory;
    `beside` is taken by a draft model. Raises ConfigError if memory is short.
    """
    steps = [each.step_range(config) for each in ranks]
    most_rows = config.max_sampled_rows
    logits = logits_plan(model.config, model.dtype)
    reserves = [
        of_steps.reserve_bytes
        + logits.bytes_for(most_rows)
        + scratch_bytes(config, each.layout)
        + extra_bytes
        for each, of_steps in zip(ranks, steps, strict=True)
    ]
    num_blocks = _num_blocks(config, model, ranks, reserves, other_bytes=other_bytes, beside=beside)
    num_borrowed = max(each.blocks_for(config.max_num_batched_tokens) for each in steps)
    return StepMemory(
        Arena(ranks[0].layout, num_blocks, model.device, reserves[0]),
        BlockPool(num_blocks, num_tail=min(num_borrowed, num_blocks // 2)),
        steps[0],
        logits,
        num_logits=most_rows,
        others=steps[1:],
    )


def sizes_of_ranks(
    model: Decoder, layout: BlockLayout, bytes_of_parts: Sequence[int]
) -> list[RankSizes]:
    """The sizes of all ranks of a group, computed on the first rank, whose blocks have `layout`.
    `bytes_of_parts`: bytes of recurrent states of each rank."""
    return [
        RankSizes(
            plan,
            replace(layout, num_layers=part.num_kv_layers, num_kv_heads=part.num_kv_heads),
            of_states,
        )
        for plan, part, of_states in zip(model.plans, model.parts, bytes_of_parts, strict=True)
    ]


def saved_bytes(config: EngineConfig, memory: StepMemory) -> int:
    """How much larger the reserve would be if it had room for the largest step's activations."""
    return memory.plan.bytes_for(config.max_num_batched_tokens) - memory.reserve_bytes


def log_memory(config: EngineConfig, memory: StepMemory) -> None:
    arena, saved = memory.arena, saved_bytes(config, memory)
    log.info(
        "arena of %.1f MiB: %d KV blocks of %.1f KiB (%s), and a reserve of %.1f MiB for steps of "
        "up to %d tokens; larger ones, up to %d, borrow the free tail: %.1f MiB or %d blocks saved",
        arena.num_bytes / 2**20,
        arena.num_blocks,
        arena.layout.block_bytes / 2**10,
        KvFormat(arena.layout.dtype, arena.layout.group),
        arena.reserve_bytes / 2**20,
        memory.reserve_tokens,
        config.max_num_batched_tokens,
        saved / 2**20,
        saved // arena.layout.block_bytes,
    )


def _num_blocks(
    config: EngineConfig,
    model: Decoder,
    ranks: Sequence[RankSizes],
    reserves: Sequence[int],
    *,
    other_bytes: int,
    beside: Beside,
) -> int:
    """Blocks in the pool: as configured, else what fits on every rank and can ever be in use.

    `reserves`: bytes of each rank. Raises ConfigError if not even one block fits next to them.
    """
    max_len = config.max_model_len or model.config.max_position_embeddings
    useful = config.max_num_seqs * -(-max_len // config.block_size)
    if config.num_blocks is not None:
        return config.num_blocks
    budget = cache_budget(config, model.device, other_bytes) - beside.num_bytes
    if config.kv_cache_gb is None and model.device.type == "cuda":
        budget += ranks[0].state_bytes  # they are allocated already, and no longer free
    num_blocks = useful
    for rank, reserve_bytes in zip(ranks, reserves, strict=True):
        block_bytes = rank.layout.block_bytes + beside.block_bytes
        if not block_bytes:  # a stage may have no K and V
            continue
        left = budget - rank.state_bytes
        num_blocks = min(num_blocks, int((left - reserve_bytes) // block_bytes))
        if num_blocks < 1:
            raise ConfigError(
                f"the KV pool of {left / 2**30:.2f} GiB holds no block of {block_bytes} bytes"
                f" next to {reserve_bytes / 2**20:.1f} MiB for the activations and logits of a "
                "step; raise kv_cache_gb, lower max_num_seqs or max_num_batched_tokens, or choose "
                "a smaller model or block_size"
            )
    return num_blocks


def cache_budget(config: EngineConfig, device: torch.device, other_bytes: int = 0) -> float:
    """Bytes for the KV cache, recurrent states and the activations of a step."""
    if config.kv_cache_gb is not None:
        return config.kv_cache_gb * 2**30
    if device.type == "cuda":
        return (torch.cuda.mem_get_info(device)[0] - other_bytes) * GPU_KV_FRACTION
    return total_memory_bytes() * CPU_KV_FRACTION / config.num_ranks


def total_memory_bytes() -> int:
    """Memory of this machine in bytes, or of the container that this process runs in."""
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as text:
                limit = text.read().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total
