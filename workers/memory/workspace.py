"""The activations of a step: their shapes, their bytes, and their place in the arena.

A step's arrays lie one after another in one range of the arena: the last free blocks of the KV pool
and the fixed reserve after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from penstock.workers.errors import InvariantError
from penstock.workers.memory.arena import Arena
from penstock.workers.memory.block_pool import BlockPool
from penstock.workers.model_config import ModelConfig

ALIGN_BYTES = 256  # of every array: whole sectors of a GPU, whole vectors of a CPU


@dataclass(frozen=True, slots=True)
class Array:
    """`columns` elements of `dtype` for each row of a step."""

    name: str
    columns: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize


Phase = tuple[Array, ...]  # arrays that live at the same time, side by side
Region = tuple[Phase, ...]  # phases that take turns in the same bytes


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Regions one after another; each is as large as the largest of its phases."""

    regions: tuple[Region, ...]

    def bytes_for(self, num_rows: int) -> int:
        """Bytes that `num_rows` rows take, a multiple of 256."""
        return sum(_region_bytes(region, num_rows) for region in self.regions)

    def rows_in(self, num_bytes: int) -> int:
        """The most rows that fit into `num_bytes`."""
        per_row = sum(
            max(sum(array.row_bytes for array in phase) for phase in region)
            for region in self.regions
        )
        num_rows = num_bytes // per_row
        while num_rows and self.bytes_for(num_rows) > num_bytes:  # by the alignment only
            num_rows -= 1
        return num_rows

    def views(self, num_rows: int, memory: Tensor) -> dict[str, Tensor]:
        """Each array as [num_rows, columns] in `memory`, uint8 [at least bytes_for(num_rows)]."""
        if memory.numel() < self.bytes_for(num_rows):
            raise InvariantError("the memory is too small for the step")
        if memory.data_ptr() % ALIGN_BYTES and not memory.is_cpu:
            raise InvariantError("the memory of a step is not aligned")
        views, region_start = {}, 0
        for region in self.regions:
            for phase in region:
                start = region_start
                for array in phase:
                    flat = memory[start : start + num_rows * array.row_bytes].view(array.dtype)
                    views[array.name] = flat.view(num_rows, array.columns)
                    start += _array_bytes(array, num_rows)
            region_start += _region_bytes(region, num_rows)
        return views


def _array_bytes(array: Array, num_rows: int) -> int:
    return -(-array.row_bytes * num_rows // ALIGN_BYTES) * ALIGN_BYTES


def _region_bytes(region: Region, num_rows: int) -> int:
    return max(sum(_array_bytes(array, num_rows) for array in phase) for phase in region)


def activation_plan(
    config: ModelConfig, dtype: torch.dtype, num_scales: int = 1, *, in_columns: bool = False
) -> BufferPlan:
    """The arrays that `Decoder.forward` writes besides K and V, with a row for each token.

    R1 is the residual stream; R2 the output of a norm, of attention or of an MLP; R3 the wide
    arrays: the fused projection with the queries for the sinks (and of linear attention with b and
    a), the output projection, gate and up, the arrays of routed experts, and before the first layer
    the angles. In addition cos and sin,
    for absolute positions and for those relative to the sinks, and `num_scales` of int8 rows, whose
    codes overwrite the values that they are made from. Several rotary embeddings have a table each,
    one after the other in `cos` and so on. `in_columns`: of a rank that has some columns of all
    routed experts (kernels/moe/columns.py).
    """
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = heads * (1 + config.attention_gate) + 2 * config.num_kv_heads * config.head_dim
    linear = config.linear_attention if config.has_states else None
    values = 0 if linear is None else linear.values
    inner = config.intermediate_size if not all(config.moe_layers) else 0
    num_experts = config.num_experts if any(config.moe_layers) else 0
    shared = config.shared_expert_intermediate_size if num_experts else 0
    in_all = (config.num_experts_per_token + 2) * config.moe_intermediate_size * in_columns
    routed_inner = max(2 * config.moe_intermediate_size, 2 * shared, in_all)
    router_dtype = torch.float32 if config.router.in_fp32 else dtype
    is_widened = num_experts and router_dtype != dtype
    half, fp32, fp64 = config.rotary_dim // 2, torch.float32, torch.float64
    all_halves = half * len(config.ropes)
    wide: Region = (
        (Array("angles", half, fp64), Array("turned", half, fp64)),
        (Array("qkv", qkv, dtype), Array("q_sink", heads, dtype)),
        (
            Array("delta_qkvz", 0 if linear is None else linear.channels + values, dtype),
            Array("delta_ba", 0 if linear is None else 2 * linear.num_value_heads, dtype),
        ),
        (Array("projected", hidden, dtype),),
        (Array("gate_up", 2 * inner, dtype),),
        (
            Array("router_input", hidden * bool(is_widened), fp32),
            Array("scores", num_experts + (shared > 0 and config.shared_expert_gate), router_dtype),
            Array("router_logits", num_experts, fp32),
            Array("probabilities", num_experts, fp32),
            Array("grouped", config.num_experts_per_token * hidden * (num_experts > 0), dtype),
            Array("inner", routed_inner * (num_experts > 0), dtype),
            Array("shared", hidden * (shared > 0), dtype),
        ),
    )
    turns = ("cos", "sin", "sink_cos", "sink_sin")
    tables = tuple(Array(name, all_halves, fp32) for name in turns)
    tables += (Array("row_scales", num_scales, fp32),)
    tables += (Array("query_scales", config.query_scaling is not None, fp32),)
    return BufferPlan(
        (
            ((Array("residual", hidden, dtype),),),
            (
                (Array("normed", hidden, dtype),),
                (Array("attended", heads, dtype),),
                (Array("delta_out", values, dtype),),
            ),
            wide,
            (tables,),
        )
    )


def logits_plan(config: ModelConfig, dtype: torch.dtype) -> BufferPlan:
    """fp32 logits, and the logits in the model's dtype if that is another one."""
    narrow = 0 if dtype == torch.float32 else config.vocab_size
    logits = Array("logits", config.vocab_size, torch.float32)
    return BufferPlan((((logits, Array("narrow", narrow, dtype)),),))


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """The arrays of one step of T rows, [T, columns] each; those of one region share memory.

    An array that the model does not use has no columns. The arrays are not initialised.
    """

    residual: Tensor  # R1
    normed: Tensor  # R2
    attended: Tensor  # R2
    qkv: Tensor  # R3
    q_sink: Tensor  # R3, at the same time as qkv
    delta_qkvz: Tensor  # R3, of linear attention
    delta_ba: Tensor  # R3, at the same time
    delta_out: Tensor  # R2
    projected: Tensor  # R3
    gate_up: Tensor  # R3
    router_input: Tensor  # R3, as all below up to `shared`
    scores: Tensor
    router_logits: Tensor
    probabilities: Tensor
    grouped: Tensor  # [T, k * hidden]
    inner: Tensor
    shared: Tensor
    angles: Tensor  # R3, before the first layer
    turned: Tensor
    cos: Tensor
    sin: Tensor
    sink_cos: Tensor
    sink_sin: Tensor
    row_scales: Tensor  # [T, most groups], of the int8 rows of the moment
    query_scales: Tensor  # [T, 1], or without columns

    @classmethod
    def allocate(cls, plan: BufferPlan, num_rows: int, device: torch.device) -> Workspace:
        """A workspace in newly allocated memory."""
        memory = torch.empty(plan.bytes_for(num_rows), dtype=torch.uint8, device=device)
        return cls(**plan.views(num_rows, memory))

    def rows(self, first: int, end: int) -> Workspace:
        """The rows [first, end) of each array."""
        return Workspace(*(getattr(self, each.name)[first:end] for each in fields(self)))


@dataclass(frozen=True)  # without slots, for the cached property: a step asks for it several times
class StepRange:
    """Where one process has the rows of a step: in a reserve, and in the blocks before it."""

    plan: BufferPlan
    reserve_tokens: int  # rows in the reserve
    block_bytes: int  # 0: it has no blocks, and every step lies in the reserve

    @cached_property
    def reserve_bytes(self) -> int:
        return self.plan.bytes_for(self.reserve_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` rows need beyond the reserve."""
        lacking = self.plan.bytes_for(num_tokens) - self.reserve_bytes
        return -(-lacking // self.block_bytes) if lacking > 0 else 0

    def rows_in(self, num_blocks: int) -> int:
        """The most rows that fit into `num_blocks` blocks and the reserve."""
        return self.plan.rows_in(num_blocks * self.block_bytes + self.reserve_bytes)


class StepMemory:
    """Gives each step its workspace and its logits, all inside the arena.

    The reserve after the blocks holds the activations of `reserve_tokens` rows and the logits of
    `num_logits` rows. A step with more rows borrows the last blocks of the pool while it runs: they
    and the reserve are one range. With `reserve_tokens` as large as the largest step, nothing is
    ever borrowed. The remainder of the reserve is `rest`: the scratch blocks of deferred commit.

    In a group all ranks borrow blocks of the same ids for a step: as many as the rank with the
    smallest blocks needs.
    """

    def __init__(
        self,
        arena: Arena,
        pool: BlockPool,
        own: StepRange,
        logits: BufferPlan,
        *,
        num_logits: int,
        others: Sequence[StepRange] = (),
    ):
        """`others`: of the other ranks, on the first one, which decides for all."""
        self.arena = arena
        self.pool = pool
        self.plan = own.plan
        self.reserve_tokens = own.reserve_tokens
        self.reserve_bytes = own.reserve_bytes
        self._ranges = list(dict.fromkeys((own, *others)))
        if arena.reserve_bytes < self.reserve_bytes + logits.bytes_for(num_logits):
            raise InvariantError("the reserve is too small for the logits")
        remainder = arena.tail(0)[self.reserve_bytes :]
        views = logits.views(num_logits, remainder)
        self.rest = remainder[logits.bytes_for(num_logits) :]
        self.logits, self.narrow = views["logits"], views["narrow"]
        self._free_rows: dict[int, int] = {}  # by rows of a step
        self._small: dict[int, Workspace] = {}  # by rows, in the reserve: always the same addresses

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a step of `num_tokens` rows borrows."""
        return max(each.blocks_for(num_tokens) for each in self._ranges)

    def tokens_that_fit(self, wanted: int) -> int:
        """How many of `wanted` rows a step can have with the blocks that are free now."""
        needed = self.blocks_for(wanted)
        lendable = self.pool.num_lendable(needed)
        if lendable == needed:
            return wanted
        return min(each.rows_in(lendable) for each in self._ranges)

    def num_kept(self, most_rows: int) -> int:
        """Blocks that admissions leave for steps of up to `most_rows` rows: what these borrow, and
        at most a sixteenth of the pool, since more of it is worth more requests at a time."""
        return min(self.blocks_for(most_rows), self.pool.num_blocks // 16)

    def free_rows(self, num_tokens: int) -> int:
        """Rows that a step of `num_tokens` can have more without borrowing further blocks."""
        known = self._free_rows.get(num_tokens)
        if known is None:  # it takes as long as a search for drafts
            borrowed = self.blocks_for(num_tokens)
            known = min(each.rows_in(borrowed) for each in self._ranges) - num_tokens
            self._free_rows[num_tokens] = known
        return known

    @contextmanager
    def lease(self, num_tokens: int) -> Iterator[Workspace]:
        """The workspace of a step of `num_tokens` rows, which must fit.

        The blocks are returned once all work that uses them is queued on the device: later writes
        to them are queued after it.
        """
        num_blocks = self.blocks_for(num_tokens)
        if not num_blocks:
            yield self._in_reserve(num_tokens)
            return
        self.pool.lend(num_blocks)
        try:
            memory = self.arena.tail(num_blocks)[: self.plan.bytes_for(num_tokens)]
            yield Workspace(**self.plan.views(num_tokens, memory))
        finally:
            self.pool.give_back()

    def _in_reserve(self, num_tokens: int) -> Workspace:
        workspace = self._small.get(num_tokens)
        if workspace is None:
            workspace = Workspace(**self.plan.views(num_tokens, self.arena.tail(0)))
            if num_tokens <= self.logits.shape[0]:  # decode steps: the views are reused
                self._small[num_tokens] = workspace
        return workspace
