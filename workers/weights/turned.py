"""The order of the outputs of q and k in families whose rotary embedding turns neighbours."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_in_halves(rows: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """`rows` [heads * head_dim], of stored outputs, in the order that rotary embedding has here:
    of each head the first of all pairs, the second of all pairs, then what does not turn."""
    heads = rows.view(-1, head_dim)
    turning, rest = heads.tensor_split([rotary_dim], dim=1)
    return torch.cat([turning[:, 0::2], turning[:, 1::2], rest], dim=1).flatten()
