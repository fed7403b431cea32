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
from penstock.workers.memory.workspace import StepMemory, blocks_to_borrow, logits_plan
from penstock.workers.models.decoder import Decoder
from penstock.workers.scheduling.deferral import most_pending, num_scratch_blocks, scratch_bytes

log = logging.getLogger("penstock.engine")

GPU_KV_FRACTION = 0.85  # of the memory that is free once the weights are loaded
CPU_KV_FRACTION = 1 / 8  # of the machine's memory: other programs need the rest


@dataclass(frozen=True, slots=True)
class Beside:
    """Memory that a draft model takes beside the arena, or by how much more or less another rank of
    a group takes than this one: in all, and for each block of the pool."""

    num_bytes: int = 0
    block_bytes: int = 0


def step_memory(
    config: EngineConfig,
    layout: BlockLayout,
    model: Decoder,
    extra_bytes: int = 0,
    *,
    other_bytes: int = 0,
    state_bytes: int = 0,
    beside: Beside = Beside(),
    elsewhere: Sequence[Beside] = (Beside(),),
) -> StepMemory:
    """The arena with its pool, and the activations and logits of a step in it.

    The reserve has room for a row of each sequence, so that a step is possible however full the
    pool is, and for some rows of drafts; with separate activations, for the largest step.
    `extra_bytes` of it stay free, after the scratch blocks. `other_bytes` of the device are left to
    adapters that are loaded later, where the size follows from its free memory; `state_bytes` of
    what is allowed are taken by recurrent states, and `beside` by a draft model. `elsewhere`: of
    all ranks, which have as many blocks. Raises ConfigError
    if memory is short.
    """
    plan, logits = model.plan, logits_plan(model.config, model.dtype)
    is_separate = config.activation_memory == "separate"
    most_rows = config.max_sampled_rows
    reserve_tokens = config.max_num_batched_tokens if is_separate else most_rows
    if num_scratch_blocks(config) and not is_separate:  # one sequence at its limit always fits
        reserve_tokens += most_pending(config)
    reserve_bytes = plan.bytes_for(reserve_tokens) + logits.bytes_for(most_rows)
    reserve_bytes += scratch_bytes(config, layout) + extra_bytes
    num_blocks = _num_blocks(
        config, layout, model, reserve_bytes, other_bytes, state_bytes=state_bytes, beside=beside,
        elsewhere=elsewhere,
    )  # fmt: skip
    num_borrowed = blocks_to_borrow(
        plan, config.max_num_batched_tokens, plan.bytes_for(reserve_tokens), layout.block_bytes
    )
    return StepMemory(
        Arena(layout, num_blocks, model.device, reserve_bytes),
        BlockPool(num_blocks, num_tail=min(num_borrowed, num_blocks // 2)),
        plan,
        logits,
        reserve_tokens=reserve_tokens,
        num_logits=most_rows,
    )


def more_elsewhere(
    model: Decoder, layout: BlockLayout, state_bytes: int, bytes_of_parts: Sequence[int]
) -> list[Beside]:
    """What each rank of a group takes more or less than this one, which counts blocks for all of
    them. `layout` and `state_bytes`: of this one; `bytes_of_parts`: of states, of all."""
    return [
        Beside(
            of_states - state_bytes,
            replace(
                layout, num_layers=part.num_kv_layers, num_kv_heads=part.num_kv_heads
            ).block_bytes
            - layout.block_bytes,
        )
        for part, of_states in zip(model.parts, bytes_of_parts, strict=True)
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
    layout: BlockLayout,
    model: Decoder,
    reserve_bytes: int,
    other_bytes: int,
    *,
    state_bytes: int,
    beside: Beside,
    elsewhere: Sequence[Beside],
) -> int:
    """Blocks in the pool: as configured, else what fits in memory and can ever be in use.

    Raises ConfigError if not even one block fits next to a reserve of `reserve_bytes`.
    """
    max_len = config.max_model_len or model.config.max_position_embeddings
    useful = config.max_num_seqs * -(-max_len // config.block_size)
    if config.num_blocks is not None:
        return config.num_blocks
    # The states are allocated already: on a GPU they are no longer free.
    taken = 0 if config.kv_cache_gb is None and model.device.type == "cuda" else state_bytes
    budget = cache_budget(config, model.device, other_bytes) - taken - beside.num_bytes
    block_bytes = layout.block_bytes + beside.block_bytes
    that_fit = [
        int((budget - more.num_bytes - reserve_bytes) // each)
        for more in elsewhere
        if (each := block_bytes + more.block_bytes)  # a stage may have no K and V
    ]
    num_blocks = min(*that_fit, useful)
    if num_blocks < 1:
        raise ConfigError(
            f"the KV pool of {budget / 2**30:.2f} GiB holds no block of {block_bytes} bytes"
            f" next to {reserve_bytes / 2**20:.1f} MiB for the activations and logits of a step;"
            " raise kv_cache_gb, lower max_num_seqs or max_num_batched_tokens, or choose a smaller"
            " model or block_size"
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
