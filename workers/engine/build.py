"""Builds the parts of an engine: memory, KV cache, scheduler and executor.

First the arena, then what uses it, then what is measured on it.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.workers.adapters.table import AdapterTable
from penstock.workers.config import EngineConfig
from penstock.workers.engine.draft import draft_executor, memory_beside
from penstock.workers.engine.sizing import log_memory, sizes_of_ranks, step_memory
from penstock.workers.engine.speculation import drafting_of
from penstock.workers.engine.state_memory import StateMemory, check_states, state_memory
from penstock.workers.errors import ConfigError
from penstock.workers.execution.cpu_replay import replay_for
from penstock.workers.execution.cuda_graphs import (
    Capture,
    CudaCapture,
    GraphSizes,
    captured,
    graph_sizes,
)
from penstock.workers.execution.executor import Executor
from penstock.workers.memory.arena import BlockLayout
from penstock.workers.memory.kv_format import KvFormat, kv_format
from penstock.workers.memory.restore import PROBE_ROWS, Rates
from penstock.workers.memory.state_slots import StatePool
from penstock.workers.memory.workspace import StepMemory
from penstock.workers.model_config import check_length
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.host_batch import CacheBytes, GroupMemory
from penstock.workers.models.layers import LayerCache
from penstock.workers.models.shards.decoder import ShardDecoder
from penstock.workers.scheduling.deferral import (
    Rule,
    deferral_of,
    num_scratch_blocks,
    rule_of,
    scratch_bytes,
    scratch_views,
)
from penstock.workers.scheduling.kv_cache import KVCache
from penstock.workers.scheduling.scheduler import Scheduler
from penstock.workers.scheduling.states import StateCache
from penstock.workers.scheduling.swap import GroupHost, host_swap
from penstock.workers.speculation.draft import DraftSteps, Proposer, Widths


@dataclass(frozen=True, slots=True)
class EngineParts:
    """`rates`: measured for the host tier; None without one. `max_model_len` in tokens."""

    memory: StepMemory
    cache: KVCache
    scheduler: Scheduler
    executor: Executor
    max_model_len: int
    rates: Rates | None
    adapters: AdapterTable | None


def build_parts(
    config: EngineConfig,
    model: Decoder,
    commit_rule: Rule | None,
    capture: Capture | None,
    speculation: tuple[Proposer, Widths] | None = None,
    draft: Decoder | None = None,
    draft_steps: DraftSteps | None = None,
) -> EngineParts:
    """The connected parts. Raises ConfigError where memory is short, and LoadError where an adapter
    cannot be read. Arguments: those of Engine."""
    if model.whole_config.has_states:
        check_states(config)
    check_length(config.max_model_len, model.config.max_position_embeddings)
    kv = kv_format(config.kv, config.kv_group, model.config.head_dim, model.dtype)
    layout = block_layout(config, model, kv)
    sizes = graph_sizes(config, model, capture is not None)
    adapters = adapters_of(config, model)
    reserved = 0 if adapters is None else adapters.reserved_bytes - adapters.num_bytes
    graph_bytes = 0 if sizes is None else sizes.num_bytes
    states = state_memory(config, model)
    state_bytes = 0 if states is None else states.num_bytes
    of_parts = (0,) * len(model.parts) if states is None else states.bytes_of_parts
    draft_layout = layout if draft is None else layout_of_draft(config, draft, layout)
    memory = step_memory(
        config,
        model,
        sizes_of_ranks(model, layout, of_parts),
        graph_bytes,
        other_bytes=reserved,
        beside=memory_beside(config, draft, draft_layout),
    )
    log_memory(config, memory)
    cache = KVCache(
        memory.pool,
        config.block_size,
        prefix_cache=config.prefix_cache,
        salt=secrets.token_bytes(32) + str(kv).encode(),
    )
    max_num_seqs = config.max_num_seqs
    if states is not None:
        cache.states = StateCache(
            StatePool(states.num_slots),
            config.block_size,
            keeps_snapshots=config.prefix_cache,
            slot_bytes=states.num_bytes // states.num_slots,
        )
        max_num_seqs = min(max_num_seqs, states.num_slots // 2)
    scheduler = Scheduler(
        cache,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tokens_that_fit=memory.tokens_that_fit,
        num_kept=memory.num_kept(config.max_num_batched_tokens),
        merges=config.merge_steps,
    )
    max_model_len = min(
        config.max_model_len or model.config.max_position_embeddings,
        memory.arena.num_blocks * config.block_size,
    )
    executor = make_executor(config, model, memory, max_model_len, states)
    if isinstance(model, ShardDecoder) and model.on_memory is not None:  # before the first pass
        sized = GroupMemory(
            memory.arena.num_blocks,
            max_model_len,
            0 if states is None else states.num_slots,
            None if sizes is None else asdict(sizes),
        )
        kv_bytes = memory.arena.num_blocks * layout.block_bytes
        model.on_memory(sized, CacheBytes(kv_bytes, state_bytes, memory.arena.reserve_bytes))
    # Of a step for a measurement: as many as other steps may have, which ranks of a group rely on.
    most_rows = memory.tokens_that_fit(min(PROBE_ROWS, config.max_num_batched_tokens))
    if config.kv_commit != "eager":
        rule = commit_rule or rule_of(
            config,
            model.config,
            executor.run_rows,
            most_rows=most_rows,
            device=_device_name(model.device),
            weights=model.weights.format,
            layout=layout,
        )
        scheduler.deferral = deferral_of(config, rule)
    if sizes is not None:
        _capture(executor, sizes, capture, memory.rest[scratch_bytes(config, layout) :], config)
    drafts = None
    if draft is not None:
        num_blocks, caches = memory.arena.num_blocks, executor.kv_layers
        drafts = draft_executor(config, draft, draft_layout, num_blocks, caches, max_model_len)
    scheduler.drafting = drafting_of(
        config, model, cache, executor, max_model_len, speculation, drafts, draft_steps
    )
    rates = None
    if config.host_kv_gb is not None:
        group = group_host(model, memory.arena.num_blocks)
        cache.swap, rates = host_swap(config, memory.arena, executor.run_rows, most_rows, group)
        memory.pool.on_evict = cache.swap.keep
    return EngineParts(memory, cache, scheduler, executor, max_model_len, rates, adapters)


def adapters_of(config: EngineConfig, model: Decoder) -> AdapterTable | None:
    """Those of the configuration, loaded; None: adapters are off. Raises LoadError."""
    if not config.enable_lora:
        return None
    table = AdapterTable(
        model.whole_config,
        model.device,
        config.max_loras,
        config.max_lora_rank,
        model.adapter_part,
        model.other_ranks if isinstance(model, ShardDecoder) else None,
    )
    for name, folder in config.adapter_folders.items():
        table.load(name, folder)
    return table


def _device_name(device: torch.device) -> str | None:
    """Of a graphics card; None: it is a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def group_host(model: Decoder, num_blocks: int) -> GroupHost | None:
    """None: `model` is no rank of a group."""
    if not isinstance(model, ShardDecoder) or model.on_host is None:
        return None
    block_bytes = sum(each.kv for each in model.caches_of) // num_blocks
    return GroupHost(block_bytes, model.on_host)


def block_layout(config: EngineConfig, model: Decoder, kv: KvFormat) -> BlockLayout:
    return BlockLayout(
        num_layers=model.config.num_kv_layers,
        num_kv_heads=model.config.num_kv_heads,
        block_size=config.block_size,
        head_dim=model.config.head_dim,
        dtype=kv.dtype,
        group=kv.group,
    )


def layout_of_draft(config: EngineConfig, draft: Decoder, layout: BlockLayout) -> BlockLayout:
    """Of the blocks of a draft model; `layout`: of the model's, which it shares unless it is
    another one."""
    if config.draft_model is None:
        return layout
    kv = kv_format(config.kv, "auto", draft.config.head_dim, draft.dtype)
    return block_layout(config, draft, kv)


def make_executor(
    config: EngineConfig,
    model: Decoder,
    memory: StepMemory,
    max_model_len: int,
    states: StateMemory | None = None,
) -> Executor:
    arena = memory.arena
    kv_layers = arena.kv_layers()
    if config.kv_commit != "eager":
        scratch = scratch_views(config, arena.layout, memory.rest)
        kv_layers = [layer.with_scratch(scratch) for layer in kv_layers]
    caches: list[LayerCache] = list(kv_layers)
    if states is not None:
        of_states, of_kv = iter(states.layers), iter(kv_layers)
        caches = [
            next(of_states) if is_linear else next(of_kv)
            for is_linear in model.config.linear_layers
        ]
    longest = -(-max_model_len // config.block_size) + num_scratch_blocks(config)
    replay = replay_for(model, caches, config.max_sampled_rows, longest)
    return Executor(
        model, caches, config.block_size, memory, replay, samples_fast=config.fast_sampling
    )


def _capture(
    executor: Executor,
    sizes: GraphSizes,
    capture: Capture | None,
    inputs: Tensor,
    config: EngineConfig,
) -> None:
    model, is_needed = executor.model, config.cuda_graphs == "on"
    make = partial(executor.capture, sizes, capture or CudaCapture(), inputs)
    if not isinstance(model, ShardDecoder) or model.on_capture is None:
        executor.graphs = captured(make, is_needed=is_needed)
        return
    until_captured = model.on_capture()  # at the same time as this rank, since they exchange rows
    try:
        executor.graphs = captured(make, is_needed=True)
    except Exception as error:  # the other ranks are in the middle of theirs
        raise ConfigError(
            f"this group's decode graphs could not be captured ({error}): set cuda_graphs off"
        ) from error
    until_captured()


def wants_async_scheduling(
    config: EngineConfig, device: torch.device, is_routed: bool = False
) -> bool:
    """Whether the next step is launched before the last one was read, wherever possible.

    Never for a model whose experts come out of a cache (`is_routed`): the host waits for the
    routing of every layer.
    """
    is_on = config.async_scheduling == "on" or (
        config.async_scheduling == "auto" and device.type == "cuda"
    )
    return is_on and not is_routed
