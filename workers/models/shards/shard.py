"""What one rank of a group holds of a model: spans of heads, columns and tokens.

Every linear is cut by its outputs, and its whole input is gathered: each output is then the same
dot product over the whole input by the same kernel, so a group has the bits of one process, in
every number format. Shares are as even as whole KV heads and blocks of columns allow. Routed
experts stay whole: each rank has some of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import Tensor

from penstock.kernels.quant import QuantizedWeight
from penstock.workers.errors import ConfigError
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

    def __post_init__(self) -> None:
        config, wanted = self.config, f"tensor_parallel_size {self.num_ranks}"
        config.check_divisible()
        if self.num_ranks > config.num_kv_heads:
            raise ConfigError(
                f"{wanted} is more than the {config.num_kv_heads} KV heads of this model, and each "
                f"rank needs one; set it to {config.num_kv_heads} at most"
            )

    @property
    def kv_heads(self) -> Span:
        return self._share(self.config.num_kv_heads, 1)

    @property
    def heads(self) -> Span:
        """The query heads of the KV heads."""
        return self.kv_heads.of(self.config.num_heads // self.config.num_kv_heads)

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
        if ".experts." in module:
            return None
        shared = FAMILIES[self.config.architecture].names.shared_expert
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
        found = _EXPERT.search(name)
        return found is not None and not self.experts.first <= int(found[1]) < self.experts.end

    def _share(self, whole: int, unit: int) -> Span:
        """The first ranks have the larger shares, of whole units; the last one what is left."""
        units = -(-whole // unit)
        each, more = divmod(units, self.num_ranks)
        first = self.rank * each + min(self.rank, more)
        end = first + each + (self.rank < more)
        return Span(min(first * unit, whole), min(end * unit, whole), whole)


def cut(weight: Tensor | QuantizedWeight, rows: Span) -> Tensor | QuantizedWeight:
    """These rows of a weight [out, in]."""
    return selected(weight, slice(rows.first, rows.end))
