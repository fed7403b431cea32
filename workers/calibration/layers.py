"""Calibrates a decoder layer by layer: the text runs through each layer once, part by part.

The linear layers of one part are rounded as soon as their inputs over the whole text are known, and
what the rounded ones make of them is the next part's input, so that later layers make up for
earlier ones. What the unrounded model makes of the same text goes beside it, where the method asks
for it: that is what the later layers correct towards. Memory: one layer in fp32, the moments of one
part, and the text's states, of both models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.workers.calibration.gptq import Inputs, moments
from penstock.workers.calibration.streams import Rows, Stream
from penstock.workers.calibration.tensors import ReplacedWeights
from penstock.workers.calibration.windows import WindowRunner
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig

# An expert that fewer tokens of the text went through is rounded without them.
MIN_EXPERT_TOKENS = 128


def unsupported_reason(config: ModelConfig) -> str | None:
    """Why a text cannot be led through a model layer by layer here; None: it can.

    Of the switches of ModelConfig, those that change a layer's linear maps are handled; these are
    refused by name.
    """
    names = FAMILIES[config.architecture].names
    switches = {
        "norms behind attention and MLP": config.norm_place != "pre",
        "norms stored with an offset": config.norm_offset != 0.0,
        "layers with linear attention": config.has_states,
        "gates of the attention's output": config.attention_gate,
        "projections fused into one matrix": names.qkv or names.gate_up,
        "layers without rotary embedding": None in config.layer_ropes,
        "rotary embeddings that differ by layer": len(config.ropes) > 1,
        "queries that grow with their position": config.query_scaling is not None,
        f"activation {config.activation}": config.activation != "silu",
        "scaled embeddings": config.embedding_scale != 1.0,
        "scaled residuals": config.residual_scale != 1.0,
    }
    found = [name for name, is_on in switches.items() if is_on]
    return f"it has {' and '.join(found)}" if found else None


@dataclass(slots=True)
class ExpertCounts:
    """Experts so far, and those among them that too few tokens went through."""

    total: int = 0
    without_text: int = 0
    least: int = MIN_EXPERT_TOKENS


class Rounds(Protocol):
    """What is done with the linear layers of one input: Rounder, or a measurement.

    `needs_exact`: whether the inputs of the unrounded model are wanted, too."""

    tensors: ReplacedWeights

    @property
    def needs_exact(self) -> bool: ...

    def needs_inputs(self, modules: Sequence[str]) -> bool: ...

    def round_all(
        self, modules: Sequence[str], inputs: Inputs | None, *, norm: str | None = None
    ) -> None: ...


class LayerCalibrator:
    """Rounds one layer after another, for the states of the text in between.

    `states`: the embedded text, [T, hidden] fp32 of each window; they change in place, and are the
    residual stream behind the last layer in the end."""

    def __init__(
        self, config: ModelConfig, rounder: Rounds, runner: WindowRunner, states: Sequence[Tensor]
    ):
        self.config = config
        self._names = FAMILIES[config.architecture].names
        self.rounder = rounder
        self.tensors = rounder.tensors
        self.experts = ExpertCounts()
        self._streams = [Stream(config, self.tensors, runner, states)]
        if rounder.needs_exact:
            exact = ReplacedWeights(self.tensors.source)  # in which nothing is replaced
            copies = [state.clone() for state in states]
            self._streams.append(Stream(config, exact, runner, copies))

    @torch.inference_mode()
    def layer(self, index: int) -> None:
        """Round layer `index`, and bring the text behind it."""
        name = f"model.layers.{index}"
        self._attention(index, f"{name}.self_attn", f"{name}.{self._names.attention_norm}.weight")
        norm = f"{name}.{self._names.mlp_norm}.weight"
        if self.config.moe_layers[index]:
            self._experts(index, norm)
        else:
            modules = [f"{name}.mlp.{part}_proj" for part in ("gate", "up", "down")]
            x = self._normed(norm)
            inner = self._mlp(modules, x, self._num_windows, norm)
            for stream, each in zip(self._streams, inner, strict=True):
                stream.add(modules[2], each)
        self.tensors.replaced.clear()

    @torch.inference_mode()
    def head(self) -> None:
        """Round the LM head, if it is to be."""
        x = self._normed("model.norm.weight")
        self._round(["lm_head"], x, self._num_windows)
        self.tensors.replaced.clear()

    @property
    def _num_windows(self) -> int:
        return len(self._streams[0].states)

    def _attention(self, index: int, name: str, norm: str) -> None:
        qkv, o = [f"{name}.{part}_proj" for part in "qkv"], f"{name}.o_proj"
        x = self._normed(norm)
        self._round(qkv, x, self._num_windows, norm)
        attended = [s.attended(index, each) for s, each in zip(self._streams, x, strict=True)]
        self._round([o], [each.__getitem__ for each in attended], self._num_windows)
        for stream, each in zip(self._streams, attended, strict=True):
            stream.add(o, each)

    def _mlp(
        self, modules: Sequence[str], x: Sequence[Rows], count: int, norm: str | None
    ) -> list[list[Tensor]]:
        """Round gate, up and down for the inputs of each stream; what they give to down."""
        gate_up, down = list(modules[:2]), modules[2]
        self._round(gate_up, x, count, norm)
        inner = [s.inner(gate_up, each, count) for s, each in zip(self._streams, x, strict=True)]
        self._round([down], [each.__getitem__ for each in inner], count)
        return inner

    def _experts(self, index: int, norm: str) -> None:
        """The norm makes the router's inputs too, which stays as it is: no channel scales.

        An expert is rounded for the tokens that the rounded model sends it."""
        name = self._names.moe_block(index, self.tensors.__contains__)
        x = [[rows(i) for i in range(self._num_windows)] for rows in self._normed(norm)]
        mlp = self._streams[0].moe(index)
        ids = [mlp.choose(each)[1] for each in x[0]]
        has_shared = mlp.shared is not None
        del mlp
        for expert in range(self.config.num_experts):
            chosen = [(i == expert).any(1) for i in ids]
            rows = [torch.cat([y[c] for y, c in zip(each, chosen, strict=True)]) for each in x]
            modules = [f"{name}.experts.{expert}.{part}" for part in self._names.expert]
            self.experts.total += 1
            if len(rows[0]) < MIN_EXPERT_TOKENS:
                self.experts.without_text += 1
                self.rounder.round_all(modules[:2], None)
                self.rounder.round_all(modules[2:], None)
            else:
                self._mlp(modules, [[each].__getitem__ for each in rows], 1, None)
        if has_shared:
            prefix = f"{name}.{self._names.shared_expert}"
            shared = [f"{prefix}.{part}_proj" for part in ("gate", "up", "down")]
            self._mlp(shared, [each.__getitem__ for each in x], self._num_windows, None)
        for stream, each in zip(self._streams, x, strict=True):
            stream.add_routed(index, each)

    def _normed(self, norm: str) -> list[Rows]:
        return [stream.normed(norm) for stream in self._streams]

    def _round(
        self, modules: Sequence[str], x: Sequence[Rows], count: int, norm: str | None = None
    ) -> None:
        """`x`: of each stream, the rounded model's first."""
        inputs = None
        if self.rounder.needs_inputs(modules):
            inputs = moments(tuple(rows(i) for rows in x) for i in range(count))
        self.rounder.round_all(modules, inputs, norm=norm)
