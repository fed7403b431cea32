"""Runs stretches of text through one layer's attention at a time, with the engine's own modules."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.types import DecodeBatch, PrefillBatch
from penstock.workers.memory.arena import Arena, BlockLayout
from penstock.workers.memory.workspace import Workspace, activation_plan
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.layers import Attention, AttentionInputs, Turn
from penstock.workers.models.moe import MoeMlp
from penstock.workers.models.rope import Rope

BLOCK_SIZE = 16


class WindowRunner:
    """Runs windows of `length` tokens each, in fp32 on the CPU. Every one begins a sequence."""

    def __init__(self, config: ModelConfig, length: int):
        cpu = torch.device("cpu")
        num_blocks = -(-length // BLOCK_SIZE)
        layout = BlockLayout(1, config.num_kv_heads, BLOCK_SIZE, config.head_dim, torch.float32)
        (self._kv,) = Arena(layout, num_blocks, cpu).kv_layers()
        plan = activation_plan(config, torch.float32)
        self._workspace = ws = Workspace.allocate(plan, length, cpu)
        positions = torch.arange(length)
        rope = Rope(config.ropes[0], config.max_position_embeddings, cpu)
        rope.write_tables(positions, ws.cos, ws.sin, ws.angles, ws.turned)
        none = torch.zeros(0, dtype=torch.int32)
        self._inputs = AttentionInputs(
            slots=positions,
            num_decode=0,
            decode=DecodeBatch(none.view(0, 1), none, 0),
            prefill=PrefillBatch(
                torch.arange(num_blocks, dtype=torch.int32)[None],
                torch.tensor([0, length], dtype=torch.int32),
                torch.tensor([length], dtype=torch.int32),
                length,
            ),
        )

    def attend(self, attention: Attention, x: Tensor) -> Tensor:
        """What the output projection is given, [T, heads * head_dim], for normed states `x`
        [T, hidden]."""
        (turn,) = Turn.all_in(self._workspace, 1)
        attention(x, self._workspace, self._inputs, self._kv, turn, None)
        return self._workspace.attended.clone()

    def routed(self, mlp: MoeMlp, x: Tensor) -> Tensor:
        """The output of an expert MLP for normed states `x` [T, hidden]."""
        return mlp(x.clone(), self._workspace)
