"""Attention, MLPs and decoder of one rank: as layers.py, moe.py and decoder.py, with the gathers
between.

Each linear has this rank's outputs and the whole input. Rows are rounded to int8 after they have
been gathered, by every rank alike, as one process does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.matmul import linear
from penstock.kernels.moe import Expert, Visited
from penstock.kernels.quant import Int8Rows
from penstock.kernels.rowwise import act_mul, rms_norm
from penstock.kernels.types import PackedLinear
from penstock.workers.adapters.step import StepAdapters
from penstock.workers.experts.modes import StepRows
from penstock.workers.experts.routed import RoutedExperts
from penstock.workers.experts.routing import ExpertSource, LayerRouting
from penstock.workers.memory.host_tier import HostMirror
from penstock.workers.memory.workspace import Workspace, activation_plan
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.decoder_layer import DecoderLayer
from penstock.workers.models.layers import (
    Attention,
    AttentionInputs,
    LayerCache,
    Mlp,
    RolledRows,
    Turn,
    rows_for,
)
from penstock.workers.models.moe import MoeMlp
from penstock.workers.models.shards.exchange import Exchange
from penstock.workers.models.shards.shard import Shard, Span
from penstock.workers.stats import RankStats

# Tells the other ranks of a step, or of the rows that logits are wanted of.
OnStep = Callable[[Tensor, Tensor, AttentionInputs], None]
OnLogits = Callable[[int], None]
RankMemory = tuple[int, int, int]  # bytes of weights, of K and V, and of recurrent states


class ShardAttention(Attention):
    """The heads of one rank, and its columns of the output."""

    def join(self, shard: Shard, exchange: Exchange) -> None:
        self.exchange = exchange
        self.attended, self.hidden = shard.spans("attended"), shard.spans("hidden")
        self.normed = self.attended, shard.spans("key_columns")

    def __call__(
        self,
        x: Tensor | Int8Rows,
        workspace: Workspace,
        inputs: AttentionInputs,
        kv: LayerCache,
        turn: Turn | None,
        rolled: RolledRows | None,
    ) -> Tensor:
        attended = self.attend(
            x, workspace, inputs, kv, turn, rolled,
            qkv=_columns(workspace.qkv, self.qkv.out_features),
            attended=_columns(workspace.attended, self.attended[self.exchange.rank].size),
        )  # fmt: skip
        whole = self.exchange.gather(attended, self.attended, workspace.attended)
        own = _columns(workspace.projected, self.o.out_features)
        linear(rows_for(self.o, whole, workspace), self.o, out=own)
        return self.exchange.gather(own, self.hidden, workspace.projected)

    def _normed(self, x: Tensor, which: int, weights: tuple[Tensor, Tensor]) -> Tensor:
        """Over the heads of all ranks, in other memory, or over each head, in place."""
        if not self.norm_over_all_heads:
            return super()._normed(x, which, weights)
        spans, rows = self.normed[which], x.view(x.shape[0], -1)
        span = spans[self.exchange.rank]
        whole = self.exchange.heads(which, len(rows), span.whole, x.dtype)
        self.exchange.gather(rows, spans, whole)
        rms_norm(whole, weights[which], self.eps, out=whole)
        return whole[:, span.first : span.end].unflatten(1, x.shape[1:])


class ShardMlp(Mlp):
    """Some inner columns of one rank, and its columns of the output."""

    def join(self, shard: Shard, exchange: Exchange, inner: str = "inner") -> None:
        """`inner`: the span of the shard that this MLP's inner columns are."""
        self.exchange = exchange
        self.inner, self.hidden = shard.spans(inner), shard.spans("hidden")

    def __call__(self, x: Tensor | Int8Rows, workspace: Workspace) -> Tensor:
        return self.run(x, workspace.gate_up, workspace.normed, workspace)

    def run(self, x: Tensor | Int8Rows, memory: Tensor, out: Tensor, ws: Workspace) -> Tensor:
        """`x` [T, hidden] -> [T, hidden] in `out`. `memory` [T, twice the inner columns of all]:
        for this rank's, and for their products."""
        both = linear(x, self.gate_up, out=_columns(memory, self.gate_up.out_features))
        span = self.inner[self.exchange.rank]
        own = act_mul(both, both[:, : span.size], self.activation)
        whole = self.exchange.gather(own, self.inner, _columns(memory, span.whole))
        own = _columns(out, self.down.out_features)
        linear(rows_for(self.down, whole, ws), self.down, out=own)
        return self.exchange.gather(own, self.hidden, out)


class ShardMoe(MoeMlp):
    """The router, some of the experts, and some columns of the shared expert.

    Every rank routes alike, since all have the same rows. A token's outputs are added in the order
    of its routes, as in one process, once those of all ranks are there.
    """

    def join(self, shard: Shard, exchange: Exchange) -> None:
        self.exchange, self.complete = exchange, self._gather
        # The first expert of each rank, and the end of the last one's.
        self.firsts = [*(span.first for span in shard.spans("experts")), shard.experts.whole]
        if isinstance(self.shared, ShardMlp):
            self.shared.join(shard, exchange, "shared_inner")

    @property
    def held(self) -> Sequence[Expert]:
        return self.experts.experts if isinstance(self.experts, HeldExperts) else ()

    def _run_shared(self, shared: Mlp, x: Tensor, ws: Workspace) -> None:
        assert isinstance(shared, ShardMlp)
        shared.run(x, ws.inner, ws.shared, ws)

    def _gather(self, outputs: Tensor, ends: list[int]) -> None:
        rows = [0, *ends]
        self.exchange.gather_rows(outputs, [rows[first] for first in self.firsts])


class HeldExperts:
    """The experts of one rank, as an ExpertSource that yields no others."""

    def __init__(self, experts: Sequence[Expert], span: Span):
        self.experts, self.span = experts, span

    def route(self, ids: Tensor, x: Tensor, state: Callable[[], Tensor]) -> LayerRouting:
        return LayerRouting(ids, self.span.whole, self._held)

    def _held(self, used: list[int]) -> Iterator[Visited]:
        for number in used:
            if self.span.first <= number < self.span.end:
                yield number, self.experts[number - self.span.first]


@dataclass(frozen=True, slots=True)
class OwnExperts:
    """The experts of one rank out of its expert cache, as an ExpertSource that yields no others."""

    source: ExpertSource
    span: Span

    def route(self, ids: Tensor, x: Tensor, state: Callable[[], Tensor]) -> LayerRouting:
        routing = self.source.route(ids, x, state)
        visit = routing.experts
        assert callable(visit), "experts of a cache are visited"

        def own(used: list[int]) -> Iterator[Visited]:
            return visit([each for each in used if self.span.first <= each < self.span.end])

        return replace(routing, experts=own)


class ShardDecoder(Decoder):
    """The decoder of one rank. `config` is of its heads alone: for its KV cache."""

    def __init__(
        self,
        shard: Shard,
        exchange: Exchange,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor | None,
        lm_head: PackedLinear | None,
        *,
        generates: bool = True,
        routed: RoutedExperts | None = None,
        config: ModelConfig | None = None,
    ):
        """`config`: of what this rank holds; None: of all layers."""
        super().__init__(
            config or shard.own_config, embedding, layers, final_norm, lm_head, routed,
            generates=generates,
        )  # fmt: skip
        self.shard, self.exchange, self.whole_config = shard, exchange, shard.config
        self.vocab = shard.spans("vocab")
        self.plan = activation_plan(shard.config, self.dtype, self.num_scales)
        self.memory_of: list[RankMemory] = []  # of all ranks, on the first one
        self.on_step: OnStep | None = None  # of the first rank, once there are others
        self.on_logits: OnLogits | None = None
        # Of blocks, tokens of a sequence, slots for states; bytes here of K and V, and of states.
        self.on_memory: Callable[[int, int, int, tuple[int, int]], None] | None = None
        # Takes host memory for a number of blocks on the other ranks.
        self.on_host: Callable[[int], HostMirror] | None = None
        self.on_broken: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None

    def connect(self, interface: str) -> None:
        """To the other ranks, at the same time as they: as Exchange.connect."""
        self.exchange.connect(interface)

    def disconnect(self) -> None:
        """The others have ended."""
        self.exchange.close()

    def begin(
        self,
        token_ids: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        ws: Workspace,
        moe_rows: StepRows | None = None,
    ) -> None:
        if self.on_step is not None:
            self.on_step(token_ids, positions, inputs)
        super().begin(token_ids, positions, inputs, ws, moe_rows)

    def run_layers(
        self,
        inputs: AttentionInputs,
        kv_layers: Sequence[LayerCache],
        ws: Workspace,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        assert adapters is None, "the configuration allows no adapters in a group"
        with self._whole():
            return super().run_layers(inputs, kv_layers, ws)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Around what all ranks compute together: an error here leaves the others in the middle."""
        try:
            yield
        except BaseException:
            if self.on_broken is not None:
                self.on_broken()
            raise

    @property
    def parts(self) -> tuple[ModelConfig, ...]:
        ranks = range(self.shard.num_ranks)
        return tuple(replace(self.shard, rank=rank).own_config for rank in ranks)

    def sink_queries(self, ws: Workspace) -> Tensor:
        return _columns(ws.q_sink, self.shard.attended.size)

    def ranks(self) -> tuple[RankStats, ...]:
        return self._ranks(self.exchange.waits())

    def _ranks(self, waits: Sequence[tuple[int, float]]) -> tuple[RankStats, ...]:
        """`waits`: as Exchange.waits."""
        return tuple(
            RankStats(weights, kv, *wait, states)
            for (weights, kv, states), wait in zip(self.memory_of, waits)
        )

    @torch.inference_mode()
    def logits(
        self, hidden: Tensor, out: Tensor | None = None, narrow: Tensor | None = None
    ) -> Tensor:
        whole = out if self.dtype == torch.float32 else narrow
        if whole is None:
            whole = hidden.new_empty(len(hidden), self.shard.vocab.whole)
        with self._whole():
            if self.on_logits is not None:
                self.exchange.offer(hidden, partial(self.on_logits, len(hidden)))
            self.exchange.gather_logits(linear(hidden, self.lm_head), self.vocab, whole)
        if out is None:
            out = whole.float()
        elif whole is not out:
            out.copy_(whole)
        return self.logit_scaling.apply_(out)

    def close(self) -> None:
        super().close()
        if self.on_close is not None:
            self.on_close()

    @torch.inference_mode()
    def own_logits(self, num_rows: int) -> None:
        """This rank's part of the logits that the first rank wants."""
        hidden = self.exchange.offered(num_rows, self.config.hidden_size, self.dtype)
        self.exchange.gather_logits(linear(hidden, self.lm_head), self.vocab, None)


def _columns(memory: Tensor, columns: int) -> Tensor:
    """[T, columns], dense, at the beginning of a wider array [T, ...]."""
    num_rows = memory.shape[0]
    return memory.view(-1)[: num_rows * columns].view(num_rows, columns)
