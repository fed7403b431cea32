"""The draft model of an engine: loads it, and gives it memory and an executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from penstock.workers.config import EngineConfig
from penstock.workers.engine.sizing import Beside
from penstock.workers.engine.speculation import draft_problem, unsupported_reason
from penstock.workers.errors import ConfigError
from penstock.workers.execution.cpu_replay import replay_for
from penstock.workers.execution.draft_model import CATCH_UP_ROWS, NEAR
from penstock.workers.execution.executor import Executor
from penstock.workers.memory.arena import Arena, BlockLayout
from penstock.workers.memory.block_pool import BlockPool
from penstock.workers.memory.workspace import StepMemory, StepRange, logits_plan
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import LayerCache
from penstock.workers.models.loader import load_model
from penstock.workers.models.shards.decoder import ShardDecoder
from penstock.workers.models.shards.rank import Rank
from penstock.workers.packed.cache import PackedCache
from penstock.workers.progress import Report
from penstock.workers.quantization import int4_options
from penstock.workers.weights.model_digest import verified_folder

MAX_SEQS = 32  # for which it drafts at once: with more, steps are large, and drafts pay no more
LARGE = 0.8  # of the model's bytes, which a draft model has at least where it can hardly pay


def load_draft(
    config: EngineConfig,
    folder: Path,
    device: str,
    model: Decoder,
    report: Report | bool = False,
    rank: Rank | None = None,
) -> Decoder | None:
    """The draft model of `config`; None: it wants none here. `folder`: of `model`.

    `report`: as `progress` of load_model. `rank`: of a group. Of the model itself each rank has
    what it has of `model`; another model is whole, on the first rank alone. Raises ConfigError and
    LoadError.
    """
    is_own = config.draft_model is not None
    if config.speculate != "draft" or (is_own and rank is not None and rank.number > 0):
        return None
    if (problem := unsupported_reason(model)) is not None:
        raise ConfigError(f"speculate draft is not possible: {problem}; leave it out")
    dtype = "auto"
    if config.draft_model is None:  # it reads and writes the same K and V
        dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[model.dtype]
    else:
        other = replace(config, model=config.draft_model, revision=None, model_digest=None)
        folder = verified_folder(other, report if callable(report) else None)
    draft = load_model(
        folder,
        weights=config.draft_weights,
        quantize_lm_head=True,
        int4=int4_options(config),
        dtype=dtype,
        device=device,
        progress=report,
        rank=None if is_own else rank,
        beside=model if isinstance(model, ShardDecoder) and not is_own else None,
        max_model_len=config.max_model_len,
        cache=PackedCache.of(config, device),
    )
    if (problem := draft_problem(model, draft)) is not None:
        raise ConfigError(f"speculate draft is not possible: {problem}; leave it out")
    if config.draft_model is None and torch.equal(draft.embedding, model.embedding):
        draft.embedding = model.embedding
    return draft


def drafts_described(config: EngineConfig, model: Decoder, draft: Decoder | None) -> str:
    """Where draft tokens come from, for people; `draft`: the draft model."""
    if draft is None:
        earlier = "" if config.speculate == "lookup" else " and of earlier answers"
        return f"the text of the request{earlier}"
    weights = draft.weights
    what = config.draft_model or "the model itself on the same KV cache"
    found = f"{what}: {weights.format} weights of {weights.num_bytes / 2**20:.1f} MiB"
    if config.num_ranks > 1:
        found += " on the first rank"
    # What a step of each reads one after another: another model is whole, and stages take turns.
    num_turns = 1 if config.draft_model is None else config.pipeline_parallel_size
    if weights.num_bytes > LARGE * num_turns * model.weights.num_bytes:
        found += (
            ", hardly fewer than the model's, so that drafts save little: name a smaller "
            "draft_model, or a smaller format with draft_weights"
        )
    return found


def weight_bytes(model: Decoder, draft: Decoder | None) -> int:
    """Of both in this process; an embedding that they share counts once."""
    if draft is None:
        return model.weights.num_bytes
    shared = draft.embedding.nbytes if draft.embedding is model.embedding else 0
    return model.weights.num_bytes + draft.weights.num_bytes - shared


def num_draft_rows(config: EngineConfig) -> int:
    """Most rows of a step of the draft model that is not catching up."""
    near = 0 if config.draft_model is None else NEAR
    return min(config.max_num_seqs, MAX_SEQS) + near


def memory_beside(config: EngineConfig, draft: Decoder | None, layout: BlockLayout) -> Beside:
    """What a draft model takes but for its weights. `layout`: of its own blocks."""
    if draft is None:
        return Beside()
    block_bytes = 0 if config.draft_model is None else layout.block_bytes
    return Beside(_reserve(config, draft)[1], block_bytes)


def draft_executor(
    config: EngineConfig,
    draft: Decoder,
    layout: BlockLayout,
    num_blocks: int,
    shared: Sequence[LayerCache],
    max_model_len: int,
) -> Executor:
    """Over K and V of its own, in `num_blocks` blocks of `layout`, or over those of the model,
    `shared`."""
    is_own = config.draft_model is not None
    num_rows, num_bytes = _reserve(config, draft)
    # With the model's K and V, the arena's one block is unused.
    num_own = num_blocks if is_own else 1
    arena = Arena(layout, num_own, draft.device, num_bytes)
    arena.storage.zero_()  # blocks that it has not filled are read, too
    memory = StepMemory(
        arena,
        BlockPool(num_own),
        StepRange(draft.plan, max(num_rows, CATCH_UP_ROWS if is_own else 0), layout.block_bytes),
        logits_plan(draft.config, draft.dtype),
        num_logits=num_rows,
    )
    caches: Sequence[LayerCache] = arena.kv_layers() if is_own else shared
    longest = -(-max_model_len // config.block_size) + 1
    replay = replay_for(draft, caches, num_rows, longest)
    return Executor(draft, caches, config.block_size, memory, replay)


def _reserve(config: EngineConfig, draft: Decoder) -> tuple[int, int]:
    """Rows whose logits are computed, and bytes for them and for the activations."""
    num_rows = num_draft_rows(config)
    most = max(num_rows, 0 if config.draft_model is None else CATCH_UP_ROWS)
    logits = logits_plan(draft.config, draft.dtype)
    return num_rows, draft.plan.bytes_for(most) + logits.bytes_for(num_rows)
