"""The expert MLP in plain PyTorch: the reference of `kernels/moe/mlp.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def moe_reference(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """The reference in fp32, token by token; `experts[e]` are plain gate_up and down weights."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, (row, ids, weights) in enumerate(zip(x.float(), topk_ids.tolist(), topk_weights)):
        for expert, weight in zip(ids, weights):
            gate_up, down = experts[expert]
            gate, up = (gate_up.float() @ row).chunk(2)
            out[token] += weight * (down.float() @ (torch.nn.functional.silu(gate) * up))
    return out.to(x.dtype)
