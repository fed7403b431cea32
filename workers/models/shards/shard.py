"""What one rank of a group holds of a model: spans of heads, columns and tokens.

Every linear is cut by its outputs, and its whole input is gathered: each output is then the same
dot product over the whole input by the same kernel, so a group has the bits of one process, in
every number format. Shares are as even as whole KV heads and blocks of columns allow; where there
are more ranks than KV heads, some have the same one, and share its query heads. Of routed experts
each rank has some columns of all, or all columns of some.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels.quant import QuantizedWeight
from penstock.workers.errors import ConfigError, InvariantError
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
        config, wanted = self.config, f"tensor_parallel_size {self.num_ranks}"
        config.check_divisible()
        if self.num_ranks > config.num_heads:
            raise ConfigError(
                f"{wanted} is more than the {config.num_heads} attention heads of this model, and "
                f"each rank needs one; set it to {config.num_heads} at most"
            )

    @property
    def kv_heads(self) -> Span:
        """With more ranks than KV heads, one that other ranks have, too."""
        if self.num_ranks <= self.config.num_kv_heads:
            return self._share(self.config.num_kv_heads, 1)
        head, _, _ = self._shared_head
        return Span(head, head + 1, self.config.num_kv_heads)

    @property
    def heads(self) -> Span:
        """The query heads of the KV heads, or this rank's of those of a KV head that it shares."""
        group = self.config.num_heads // self.config.num_kv_heads
        if self.num_ranks <= self.config.num_kv_heads:
            return self.kv_heads.of(group)
        head, place, num_ranks = self._shared_head
        first, end = _even(group, place, num_ranks)
        return Span(head * group + first, head * group + end, self.config.num_heads)

    @property
    def _shared_head(self) -> tuple[int, int, int]:
        """With more ranks than KV heads, the one of this rank; its place among the ranks that have
        it; and their number."""
        for head in range(self.config.num_kv_heads):
            first, end = self._ranks_of(head)
            if first <= self.rank < end:
                return head, self.rank - first, end - first
        raise InvariantError("every rank has a KV head")

    def _ranks_of(self, head: int) -> tuple[int, int]:
        return _even(self.num_ranks, head, self.config.num_kv_heads)

    @property
    def attended(self) -> Span:
        """Columns of the attention's output."""
        return self.heads.of(self.config.head_dim)

    @property
    def key_columns(self) -> Span:
        """Columns of the projections to K and to V."""
        return self.kv_heads.of(self.config.head_dim)

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
        """Of a model that has this rank's heads only: for its KV cache."""
        return replace(self.config, num_heads=self.heads.size, num_kv_heads=self.kv_heads.size)

    def rows_of(self, module: str) -> Span | None:
        """Which outputs of a linear this rank has; None: all of them."""
        parent, _, kind = module.rpartition(".")
        names = FAMILIES[self.config.architecture].names
        if ".experts." in module:
            gate, up, down = names.expert
            cuts = {gate: self.expert_inner, up: self.expert_inner, down: self.hidden}
            return cuts.get(kind) if self.cuts_experts else None
        shared = names.shared_expert
        inner = self.shared_inner if parent.endswith(f".{shared}") else self.inner
        return {
            "q_proj": self.attended,
            "k_proj": self.key_columns,
            "v_proj": self.key_columns,
            "o_proj": self.hidden,
            "gate_proj": inner,
            "up_proj": inner,
            "down_proj": self.hidden,
            "lm_head": None if self.config.tie_word_embeddings else self.vocab,
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
