"""The decoder of one rank of a stage: receives rows, runs its layers over them, hands them on.

What travels is the residual stream after the stage's last layer, rounded as it is in one process;
the next stage begins with its norm. So the bits are those of one process. Stages overlap in the
parts of a step (GPipe, Huang et al. 2019, section 2.3; without their gradients).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.rowwise import rms_norm
from penstock.kernels.types import PackedLinear
from penstock.workers.adapters.packed import AdapterPart
from penstock.workers.adapters.step import StepAdapters
from penstock.workers.experts.modes import StepRows
from penstock.workers.experts.routed import RoutedExperts
from penstock.workers.memory.workspace import Workspace
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.decoder_layer import DecoderLayer
from penstock.workers.models.layers import AttentionInputs, LayerCache
from penstock.workers.models.shards.decoder import ShardDecoder
from penstock.workers.models.shards.exchange import Exchange
from penstock.workers.models.shards.shard import Shard
from penstock.workers.models.stages.link import StageLink
from penstock.workers.models.stages.parts import parts_of
from penstock.workers.models.stages.stage import Stage
from penstock.workers.stats import RankStats


class LayerReplay(Protocol):
    """Runs the layers without Python between the operators: execution/cpu_replay.py."""

    def suits(self, inputs: AttentionInputs) -> bool: ...

    def run_layers(self, inputs: AttentionInputs, workspace: Workspace) -> None: ...


class StageDecoder(ShardDecoder):
    """The layers of one stage, or a rank's share of each of them."""

    def __init__(
        self,
        stage: Stage,
        link: StageLink,
        shard: Shard,
        exchange: Exchange,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor | None,
        lm_head: PackedLinear | None,
        *,
        generates: bool = True,
        routed: RoutedExperts | None = None,
    ):
        """`embedding` [0, hidden], `final_norm` None and `lm_head` None: of any stage but the
        first."""
        super().__init__(
            shard, exchange, embedding, layers, final_norm, lm_head,
            generates=generates, routed=routed, config=stage.config_of(shard.own_config),
        )  # fmt: skip
        self.stage, self.link = stage, link
        self._next_norms[-1] = None  # the next stage begins with it
        self._begun: tuple[Tensor, Tensor, StepRows | None] | None = None
        self.replay: LayerReplay | None = None

    def connect(self, interface: str) -> None:
        self.link.connect(interface)
        super().connect(interface)

    def disconnect(self) -> None:
        super().disconnect()
        self.link.close()

    def begin(
        self,
        token_ids: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        ws: Workspace,
        moe_rows: StepRows | None = None,
    ) -> None:
        self._begun = token_ids, positions, moe_rows

    def run_layers(
        self,
        inputs: AttentionInputs,
        kv_layers: Sequence[LayerCache],
        ws: Workspace,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        assert self._begun is not None, "begin comes first"
        token_ids, positions, moe_rows = self._begun
        parts = parts_of(inputs, self.stage.num_stages)
        rows_of = [moe_rows and moe_rows.part(part.first, part.end) for part in parts]
        with self._whole():
            for part, inexact in zip(parts, rows_of, strict=True):
                rows, own = slice(part.first, part.end), ws
                if len(parts) > 1:
                    own = ws.rows(part.first, part.end)
                self.write_tables(positions[rows], part.inputs, own)
                if self.stage.is_first:
                    self.embed(token_ids[rows], own)
                else:
                    self.link.receive(own.residual)
                self.use_rows(inexact)
                added = None if adapters is None else adapters.part(part.first, part.end)
                replay = self.replay if own is ws and added is None else None
                if replay is not None and replay.suits(part.inputs):
                    replay.run_layers(part.inputs, own)
                else:
                    Decoder.run_layers(self, part.inputs, kv_layers, own, added)
                self.link.send(own.residual)
                self.hand_on_counts()
            if self.stage.is_first:
                for part, inexact in zip(parts, rows_of, strict=True):
                    self.link.receive(ws.residual[part.first : part.end])
                    if inexact is not None and inexact.leaves_out:
                        self.link.receive(inexact.counts)
                rms_norm(ws.residual, self.final_norm, self.config.rms_norm_eps, out=ws.normed)
            self.link.finish()
        return ws.normed

    def hand_on_counts(self) -> None:
        """Add the neuron counts of the earlier stages to this stage's, and send the sums on."""
        rows = self._rows
        if rows is None or not rows.leaves_out:
            return
        self.share_counts()
        if not self.stage.is_first:
            before = torch.empty_like(rows.counts)
            self.link.receive(before)
            rows.counts.add_(before)
        self.link.send(rows.counts)

    def own_layers(
        self, inputs: AttentionInputs, kv_layers: Sequence[LayerCache], ws: Workspace
    ) -> Tensor:
        """What lies between receiving rows and handing them on: for its replay."""
        return Decoder.run_layers(self, inputs, kv_layers, ws)

    def take_ids(self, token_ids: Tensor) -> None:
        if self.stage.is_first:  # the others embed no tokens
            super().take_ids(token_ids)

    @property
    def adapter_part(self) -> AdapterPart:
        return AdapterPart(self.stage.layers, self._outputs)

    def ranks(self) -> tuple[RankStats, ...]:
        """What each receives, and how long it waits, is known of this rank alone: the last stage's
        rows."""
        own = (self.link.num_received, self.link.waited_s, self.link.received_bytes)
        return self._ranks([own] + [(0, 0.0, 0)] * len(self.caches_of))

    @property
    def parts(self) -> tuple[ModelConfig, ...]:
        stages = [replace(self.stage, number=number) for number in range(self.stage.num_stages)]
        of_ranks = super().parts
        return tuple(stage.config_of(part) for stage in stages for part in of_ranks)


def no_embedding(hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of a stage that has none."""
    return torch.empty(0, hidden, dtype=dtype, device=device)
