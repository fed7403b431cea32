"""One layer of the decoder: two norms, attention, and a dense or an expert MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.workers.models.layers import Attention, Mlp
from penstock.workers.models.moe import MoeMlp


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One layer; the norm weights are [hidden]."""

    attention_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: Mlp | MoeMlp
