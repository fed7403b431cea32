"""What one rank of a group holds of a model: spans of heads, columns and tokens.

Every linear is cut by its outputs, and its whole input is gathered: each output is then the same
dot product over the whole input by the same kernel, so a group has the bits of one process, in
every number format. Shares are as even as whole KV heads and blocks of columns allow; where there
are more ranks than KV heads, some have the same one, and share its query heads. The value heads of
linear attention go with their key heads likewise. Of routed experts each rank has some columns of
all, or all columns of some.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels.quant import QuantizedWeight
from penstock.workers.errors import ConfigError, InvariantError
from penstock.workers.families.linear_attention import LinearAttentionConfig
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig
from penstock.workers.weights.joined import selected

COLUMNS = 16  # of a hidden or inner width that stay together
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Span:
    """Columns [first, end) of `whole`."""

    first: int
    end: int
    whole: int

    @property
    def size(self) -> int:
        return self.end - self.first

    def of(self, unit: int) -> Span:
        """The same span where each of its parts has `unit` columns."""
        return Span(self.first * unit, self.end * unit, self.whole * unit)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model of `config`, which is the whole model's."""

    config: ModelConfig
    rank: int
    num_ranks: int
    whole_experts: bool = False

    def __post_init__(self) -> None:
        most = self.config.most_ranks
        if self.num_ranks > most:
            kind = "attention" if most == self.config.num_heads else "value"
            raise ConfigError(
                f"tensor_parallel_size {self.num_ranks} is more than the {most} {kind} heads of "
                f"this model, and each rank needs one; set it to {most} at most"
            )

    @property
    def kv_heads(self) -> Span:
        """With more ranks than KV heads, one that other ranks have, too."""
        return self._grouped(self.config.num_kv_heads, self.config.num_heads)[0]

    @property
    def heads(self) -> Span:
        """The query heads of the KV heads, or this rank's of those of a KV head that it shares."""
        return self._grouped(self.config.num_kv_heads, self.config.num_heads)[1]

    @property
    def key_heads(self) -> Span:
        """Of linear attention; with more ranks than key heads, one that other ranks have, too."""
        return self._grouped(self._linear.num_key_heads, self._linear.num_value_heads)[0]

    @property
    def value_heads(self) -> Span:
        """The value heads of the key heads, or this rank's of those of one that it shares."""
        return self._grouped(self._linear.num_key_heads, self._linear.num_value_heads)[1]

    def _grouped(self, num_groups: int, num_heads: int) -> tuple[Span, Span]:
        """Of `num_groups` equal groups of heads: this rank's groups, and its heads of them."""
        each = num_heads // num_groups
        if self.num_ranks <= num_groups:
            own = self._share(num_groups, 1)
            return own, own.of(each)
        for group in range(num_groups):
            first, end = _even(self.num_ranks, group, num_groups)  # the ranks that have it
            if first <= self.rank < end:
                place, num_ranks = self.rank - first, end - first
                head, last = (group * each + i for i in _even(each, place, num_ranks))
                return Span(group, group + 1, num_groups), Span(head, last, num_heads)
        raise InvariantError("every rank has a head")

    @property
    def _linear(self) -> LinearAttentionConfig:
        shape = self.config.linear_attention
        if shape is None:
            raise InvariantError("this model has no linear attention")
        return shape

    @property
    def attended(self) -> Span:
        """Columns of the attention's output."""
        return self.heads.of(self.config.head_dim)

    @property
    def key_columns(self) -> Span:
        """Columns of the projections to K and to V."""
        return self.kv_heads.of(self.config.head_dim)

    @property
    def delta_values(self) -> Span:
        """Columns of the output of linear attention, before its projection."""
        return self.value_heads.of(self._linear.value_dim)

    @property
    def inner(self) -> Span:
        return self._share(self.config.intermediate_size, COLUMNS)

    @property
    def shared_inner(self) -> Span:
        """Of a shared expert."""
        return self._share(self.config.shared_expert_intermediate_size, COLUMNS)

    @property
    def experts(self) -> Span:
        """Whole routed experts."""
        return self._share(self.config.num_experts, 1)

    @property
    def cuts_experts(self) -> bool:
        """Whether this rank has some columns of all routed experts. Where a rank would have none,
        they stay whole."""
        num_blocks = -(-self.config.moe_intermediate_size // COLUMNS)
        return not self.whole_experts and self.num_ranks <= num_blocks

    @property
    def expert_inner(self) -> Span:
        """Inner columns of every routed expert."""
        return self._share(self.config.moe_intermediate_size, COLUMNS)

    @property
    def expert_rows(self) -> tuple[Tensor, Tensor] | None:
        """Of an expert's fused gate_up [2I, d] and down [d, I], those of this rank's columns; None:
        all."""
        if not self.cuts_experts:
            return None
        inner = torch.arange(self.expert_inner.first, self.expert_inner.end)
        both = torch.cat((inner, inner + self.expert_inner.whole))
        return both, torch.arange(self.hidden.first, self.hidden.end)

    @property
    def hidden(self) -> Span:
        return self._share(self.config.hidden_size, COLUMNS)

    @property
    def vocab(self) -> Span:
        return self._share(self.config.vocab_size, COLUMNS)

    def spans(self, name: str) -> tuple[Span, ...]:
        """One of these spans, as each rank has it."""
        return tuple(getattr(replace(self, rank=rank), name) for rank in range(self.num_ranks))

    @property
    def own_config(self) -> ModelConfig:
        """Of a model that has this rank's heads only: for its KV cache and its states."""
        shape = self.config.linear_attention
        if shape is not None:
            keys, values = self.key_heads.size, self.value_heads.size
            shape = replace(shape, num_key_heads=keys, num_value_heads=values)
        return replace(
            self.config,
            num_heads=self.heads.size,
            num_kv_heads=self.kv_heads.size,
            linear_attention=shape,
        )

    def rows_of(self, module: str) -> Span | None:
        """Which outputs of a linear this rank takes, one after another; None: all of them."""
        parent, _, kind = module.rpartition(".")
        names = FAMILIES[self.config.architecture].names
        if ".experts." in module:
            gate, up, down = names.expert
            cuts = {gate: self.expert_inner, up: self.expert_inner, down: self.hidden}
            return cuts.get(kind) if self.cuts_experts else None
        if parent.endswith(".linear_attn"):
            return self._linear_rows_of(kind)
        shared = names.shared_expert
        inner = self.shared_inner if parent.endswith(f".{shared}") else self.inner
        return {
            "q_proj": self.attended.of(1 + self.config.attention_gate),  # beside each head's q
            "k_proj": self.key_columns,
            "v_proj": self.key_columns,
            "o_proj": self.hidden,
            "gate_proj": inner,
            "up_proj": inner,
            "down_proj": self.hidden,
            "lm_head": None if self.config.tie_word_embeddings else self.vocab,
        }.get(kind)

    def _linear_rows_of(self, kind: str) -> Span | None:
        """Where rows lie by key head, whole ones: models/linear_build.py chooses among them."""
        shape = self._linear
        shared = shape.num_value_heads // shape.num_key_heads
        return {
            "in_proj_qkvz": self.key_heads.of(2 * (shape.key_dim + shared * shape.value_dim)),
            "in_proj_ba": self.key_heads.of(2 * shared),
            "in_proj_z": self.delta_values,
            "in_proj_b": self.value_heads,
            "in_proj_a": self.value_heads,
            "out_proj": self.hidden,
        }.get(kind)

    def lacks(self, name: str) -> bool:
        """Whether a tensor is of an expert that another rank has."""
        found = None if self.cuts_experts else _EXPERT.search(name)
        return found is not None and not self.experts.first <= int(found[1]) < self.experts.end

    def _share(self, whole: int, unit: int) -> Span:
        """The first ranks have the larger shares, of whole units; the last one what is left."""
        first, end = _even(-(-whole // unit), self.rank, self.num_ranks)
        return Span(min(first * unit, whole), min(end * unit, whole), whole)


def _even(num: int, place: int, num_shares: int) -> tuple[int, int]:
    """Where the share at `place` of `num` things begins and ends; the first ones are larger."""
    each, more = divmod(num, num_shares)
    first = place * each + min(place, more)
    return first, first + each + (place < more)


def cut(weight: Tensor | QuantizedWeight, rows: Span) -> Tensor | QuantizedWeight:
    """These rows of a weight [out, in]."""
    return selected(weight, slice(rows.first, rows.end))
