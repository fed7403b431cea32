"""The routed MLP of a mixture-of-experts layer: router, experts, and the shared expert if any."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.delta import sigmoid
from penstock.kernels.matmul import linear
from penstock.kernels.moe.mlp import Complete, Expert, gated_mlp, moe_mlp, pack_experts
from penstock.kernels.quant import Int8Rows
from penstock.kernels.types import PackedLinear
from penstock.workers.experts.routing import ExpertSource, LayerRouting
from penstock.workers.memory.workspace import Workspace
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.layers import Mlp


class MoeMlp:
    """Sends each token through its top experts, weighted by the router's scores.

    `router` has one row for each expert, followed by the shared expert's gate if there is one: one
    product instead of two. `choice_bias` fp32 [experts]: only chooses.
    """

    def __init__(
        self,
        config: ModelConfig,
        router: PackedLinear,
        experts: Sequence[Expert] | ExpertSource,
        shared: Mlp | None,
        choice_bias: Tensor | None = None,
    ):
        self.router = router
        self.experts = pack_experts(experts) if isinstance(experts, Sequence) else experts
        self.shared = shared
        self.num_experts = config.num_experts
        self.inner_size = config.moe_intermediate_size
        self.top_k = config.num_experts_per_token
        self.norm_topk_prob = config.norm_topk_prob
        self.rule = config.router
        self.clamp = config.swiglu_clamp
        self.choice_bias = choice_bias
        self.has_gate = shared is not None and config.shared_expert_gate
        self.takes_fp32 = config.router.in_fp32
        self.chooses_by_weight = choice_bias is None and config.router.num_groups == 1

    row_form = None  # the router reads plain rows
    complete: Complete | None = None  # of one rank of a group, which has some of the experts

    @property
    def held(self) -> Sequence[Expert]:
        """The experts that this layer itself holds in device memory."""
        return self.experts if isinstance(self.experts, Sequence) else ()

    def __call__(self, x: Tensor | Int8Rows, workspace: Workspace) -> Tensor:
        """`x` [T, hidden] -> [T, hidden], written over `x`."""
        assert isinstance(x, Tensor)
        ws, num_tokens = workspace, x.shape[0]
        is_widened = self.takes_fp32 and x.dtype != torch.float32
        wide = ws.router_input.copy_(x) if is_widened else x
        scores = linear(wide, self.router, out=ws.scores)  # [T, experts (+ 1)]
        logits = ws.router_logits.copy_(scores[:, : self.num_experts])
        weights, ids = self.route(logits, ws.probabilities)
        if self.shared is not None:
            self._run_shared(self.shared, x, ws)
        grouped = ws.grouped.view(num_tokens * self.top_k, -1)
        routing = self._routing(ids, x, scores, ws)
        self._run_experts(x, routing, weights, grouped, ws)
        if self.has_gate:
            x.addcmul_(sigmoid(scores[:, self.num_experts :]), ws.shared)
        elif self.shared is not None:
            x.add_(ws.shared)
        return x

    def _run_experts(
        self, x: Tensor, routing: LayerRouting, weights: Tensor, grouped: Tensor, ws: Workspace
    ) -> None:
        """Write the weighted sums of the experts' outputs over `x`; `grouped` [T * k, hidden]."""
        moe_mlp(
            x,
            routing.ids,
            weights,
            routing.experts,
            num_experts=routing.num_experts,
            grouped=grouped,
            inner=narrowed(ws.inner, 2 * self.inner_size),
            out=x,
            clamp=self.clamp,
            complete=self.complete,
        )

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`route` for normed states `x` [T, hidden], in new memory: for expert prediction."""
        wide = x.float() if self.takes_fp32 else x
        return self.route(linear(wide, self.router)[:, : self.num_experts].float())

    def _run_shared(self, shared: Mlp, x: Tensor, ws: Workspace) -> None:
        inner = narrowed(ws.inner, shared.gate_up.out_features)
        gated_mlp(x, shared.gate_up, shared.down, inner, ws.shared, scales=ws.row_scales)

    def _routing(
        self, ids: Tensor, x: Tensor, scores: Tensor, workspace: Workspace
    ) -> LayerRouting:
        if isinstance(self.experts, Sequence):
            return LayerRouting(ids, self.num_experts, self.experts)

        def state() -> Tensor:
            if self.shared is None:
                return workspace.residual
            if not self.has_gate:
                return workspace.residual + workspace.shared
            gate = sigmoid(scores[:, self.num_experts :])
            return torch.addcmul(workspace.residual, gate, workspace.shared)

        return self.experts.route(ids, x, state)

    def route(self, scores: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Router scores [T, experts] -> weights fp32 [T, top_k] and expert ids int64 [T, top_k].

        `out` fp32 [T, experts], if given, receives the probabilities.
        """
        if self.rule.scoring == "softmax":
            probabilities = torch.softmax(scores, -1, dtype=torch.float32, out=out)
        else:
            probabilities = sigmoid(scores.float(), out)
        if self.chooses_by_weight:
            weights, ids = probabilities.topk(self.top_k, dim=-1)
        else:
            ids = self._for_choice(probabilities).topk(self.top_k, dim=-1).indices
            weights = probabilities.gather(-1, ids)
        if self.norm_topk_prob:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + self.rule.eps if self.rule.eps else total)
        return (weights if self.rule.scale == 1.0 else weights * self.rule.scale), ids

    def _for_choice(self, probabilities: Tensor) -> Tensor:
        """What experts are chosen by: with the bias, and -inf outside the best groups."""
        scores = probabilities
        if self.choice_bias is not None:
            scores = scores + self.choice_bias
        if self.rule.num_groups == 1:
            return scores
        groups = scores.unflatten(-1, (self.rule.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.rule.num_kept_groups, dim=-1).indices
        is_left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        return groups.masked_fill(is_left_out[..., None], float("-inf")).flatten(-2)


def narrowed(rows: Tensor, columns: int) -> Tensor:
    """The memory of `rows` [T, at least columns] as dense [T, columns]."""
    num_rows = rows.shape[0]
    return rows.view(-1)[: num_rows * columns].view(num_rows, columns)
