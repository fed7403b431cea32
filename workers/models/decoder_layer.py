"""One layer of the decoder: its norms, attention, and a dense or an expert MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.workers.errors import InvariantError
from penstock.workers.models.layers import Attention, Mlp
from penstock.workers.models.linear_attention import LinearAttention
from penstock.workers.models.moe import MoeMlp


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One layer; the norm weights are [hidden], None where the model has no such norm."""

    attention_norm: Tensor | None  # of the attention's input
    mixer: Attention | LinearAttention  # what makes the tokens see one another
    attention_out_norm: Tensor | None  # of its output
    mlp_norm: Tensor | None
    mlp: Mlp | MoeMlp
    mlp_out_norm: Tensor | None

    @property
    def attention(self) -> Attention:
        """Of a layer that has K and V."""
        if isinstance(self.mixer, LinearAttention):
            raise InvariantError("this layer has linear attention")
        return self.mixer

    @property
    def norms(self) -> list[Tensor]:
        own = (self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm)
        return [norm for norm in own if norm is not None]
