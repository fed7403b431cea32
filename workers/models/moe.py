"""The routed MLP of a mixture-of-experts layer: router, experts, and the shared expert if any.

Knows packed weights; nothing of where experts are kept or how they came into memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.matmul import PackedLinear, linear
from penstock.kernels.moe import moe_mlp
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.layers import Mlp


class MoeMlp:
    """Each token through its top experts, weighted by their softmax probabilities.

    `router` has one row an expert, and after them the shared expert's gate if `shared` is given:
    one product instead of two.
    """

    def __init__(
        self,
        config: ModelConfig,
        router: PackedLinear,
        experts: Sequence[tuple[PackedLinear, PackedLinear]],
        shared: Mlp | None,
    ):
        self.router = router
        self.experts = experts
        self.shared = shared
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_token
        self.norm_topk_prob = config.norm_topk_prob

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [T, hidden] -> [T, hidden]."""
        scores = linear(x, self.router)  # [T, experts (+ 1)]
        weights, ids = self.route(scores[:, : self.num_experts])
        y = moe_mlp(x, ids, weights, self.experts)
        if self.shared is not None:
            y = torch.addcmul(y, scores[:, self.num_experts :].sigmoid(), self.shared(x))
        return y

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Router scores [T, experts] -> weights fp32 [T, top_k] and expert ids int64 [T, top_k]."""
        weights, ids = scores.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, ids
