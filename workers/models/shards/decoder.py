"""The decoder of one rank of a group: as decoder.py, and the first one tells the others of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.matmul import linear
from penstock.kernels.types import PackedLinear
from penstock.workers.adapters.packed import AdapterPart
from penstock.workers.adapters.step import StepAdapters
from penstock.workers.adapters.table import OtherRanks
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.experts.modes import Modes, StepRows
from penstock.workers.experts.routed import RoutedExperts
from penstock.workers.memory.host_tier import HostMirror
from penstock.workers.memory.workspace import BufferPlan, Workspace, activation_plan
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.decoder_layer import DecoderLayer
from penstock.workers.models.host_batch import CacheBytes, GroupMemory, GroupStep, HostBatch
from penstock.workers.models.layers import (
    AttentionInputs,
    LayerCache,
)
from penstock.workers.models.moe import MoeMlp
from penstock.workers.models.shards.exchange import Exchange
from penstock.workers.models.shards.layers import columns_of
from penstock.workers.models.shards.moe import AbsentExperts
from penstock.workers.models.shards.shard import Shard, Span
from penstock.workers.stats import ExpertStats, RankStats

# Tells the other ranks of a step, or of the rows that logits are wanted of.
OnStep = Callable[[GroupStep], None]
OnLogits = Callable[[int], None]
# Tells the other ranks how much memory their caches take; and what those of this rank take.
OnMemory = Callable[[GroupMemory, CacheBytes], None]
# Has the others capture decode graphs; returns what waits until they have.
OnCapture = Callable[[], Callable[[], None]]
OnAdapters = Callable[[StepAdapters | None], None]  # of the step that comes next
# Has the ranks of a machine, this one being 0, read their experts from another epoch of its file.
OnExperts = Callable[[int, Manifest], None]


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
        self.plan = self._plan_with(self.num_scales)
        # Of all ranks, on the first one: their `num_scales`, bytes of weights, and other memory.
        self.scales_of: list[int] = []
        self.weights_of: list[int] = []
        self.caches_of: list[CacheBytes] = []
        self.on_step: OnStep | None = None  # of the first rank, once there are others
        self.on_logits: OnLogits | None = None
        self.on_memory: OnMemory | None = None
        self.on_capture: OnCapture | None = None
        self.on_adapters: OnAdapters | None = None
        self.on_experts: OnExperts | None = None
        # What the other ranks last said of their expert caches; None: they have none.
        self.others_experts: Callable[[], Sequence[ExpertStats | None]] | None = None
        self.other_ranks: OtherRanks | None = None  # for its adapters
        # Takes host memory for a number of blocks on the other ranks.
        self.on_host: Callable[[int], HostMirror] | None = None
        self.on_broken: Callable[[], None] | None = None
        self._rows: StepRows | None = None  # of the current step, or of a part of it
        self._absent = [  # in layers that have experts on other ranks alone
            layer.mlp.experts
            for layer in layers
            if isinstance(layer.mlp, MoeMlp) and isinstance(layer.mlp.experts, AbsentExperts)
        ]
        self.on_close: Callable[[], None] | None = None

    def connect(self, interface: str) -> None:
        """To the other ranks, at the same time as they: as Exchange.connect."""
        self.exchange.connect(interface)

    def disconnect(self) -> None:
        """The others have ended."""
        self.exchange.close()

    def announce(
        self,
        batch: HostBatch,
        token_ids: Tensor,
        adapters: StepAdapters | None = None,
        *,
        modes: Modes | None = None,
        is_graph: bool = False,
    ) -> None:
        if self.on_adapters is not None:
            self.on_adapters(adapters)
        if self.on_step is None:
            return
        shares = bool(batch.unread.size) and self.exchange.shares_ids
        if batch.unread.size and not shares:  # a CPU: the step before is done
            batch = replace(batch, token_ids=token_ids.numpy())
        self.on_step(GroupStep(batch, modes, is_graph, shares))
        if shares:
            self.exchange.share_ids(token_ids)

    def expert_stats(self) -> ExpertStats | None:
        others = () if self.others_experts is None else self.others_experts()
        found = [each for each in (super().expert_stats(), *others) if each is not None]
        return ExpertStats.of_ranks(found) if found else None

    def use_experts(self, manifest: Manifest, machine: int = 0) -> None:
        super().use_experts(manifest, machine)
        if self.on_experts is not None:
            self.on_experts(machine, manifest)

    def take_ids(self, token_ids: Tensor) -> None:
        """Receive the ids [T] of a step that the device of the first rank alone knows."""
        self.exchange.share_ids(token_ids)

    def run_layers(
        self,
        inputs: AttentionInputs,
        kv_layers: Sequence[LayerCache],
        ws: Workspace,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        with self._whole():
            hidden = super().run_layers(inputs, kv_layers, ws, adapters)
            self.share_counts()
        return hidden

    def use_rows(self, rows: StepRows | None) -> None:
        super().use_rows(rows)
        self._rows = rows
        for each in self._absent:
            each.rows = rows

    def share_counts(self) -> None:
        """Sum the neuron counts of all ranks, which are integers, with one gather a step. They fit
        into the buffers for rows."""
        rows, num_ranks = self._rows, self.shard.num_ranks
        if rows is None or not rows.leaves_out or num_ranks == 1:
            return
        num = rows.counts.shape[1]
        spans = [Span(rank * num, (rank + 1) * num, num_ranks * num) for rank in range(num_ranks)]
        of_all = rows.counts.new_empty(len(rows.counts), num_ranks * num)
        self.exchange.gather(rows.counts, spans, of_all)
        torch.sum(of_all.unflatten(1, (num_ranks, num)), 1, out=rows.counts)

    @property
    def adapter_part(self) -> AdapterPart:
        return AdapterPart(range(self.config.num_layers), self._outputs)

    def _outputs(self, module: str) -> slice:
        """Which outputs of a linear this rank has."""
        span = self.shard.rows_of(module)
        return slice(None) if span is None else slice(span.first, span.end)

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

    @property
    def plans(self) -> tuple[BufferPlan, ...]:
        return tuple(map(self._plan_with, self.scales_of or [self.num_scales]))

    def _plan_with(self, num_scales: int) -> BufferPlan:
        """The activation plan of a rank whose int8 rows have up to `num_scales` scales. The other
        array sizes are equal on all ranks."""
        return activation_plan(
            self.shard.config, self.dtype, num_scales, in_columns=self.shard.cuts_experts
        )

    def sink_queries(self, ws: Workspace) -> Tensor:
        return columns_of(ws.q_sink, self.shard.attended.size)

    def ranks(self) -> tuple[RankStats, ...]:
        return self._ranks(self.exchange.counts())

    def _ranks(self, counts: Sequence[tuple[int, float, int]]) -> tuple[RankStats, ...]:
        """`counts`: as Exchange.counts."""
        return tuple(
            RankStats(weights, caches.kv, *each, caches.states, reserve_bytes=caches.reserve)
            for weights, caches, each in zip(self.weights_of, self.caches_of, counts)
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
        return self._finished(whole, out)

    def graph_logits(self, hidden: Tensor, out: Tensor, narrow: Tensor) -> Tensor:
        """On every rank: all have all rows of a pass."""
        whole = out if self.dtype == torch.float32 else narrow
        self.exchange.gather_logits(linear(hidden, self.lm_head), self.vocab, whole)
        return self._finished(whole, out)

    def _finished(self, whole: Tensor, out: Tensor | None) -> Tensor:
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
