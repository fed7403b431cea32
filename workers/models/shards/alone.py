"""The only rank of a stage: what others would gather is whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.workers.errors import InvariantError
from penstock.workers.models.shards.exchange import Exchange, Spans


class LoneExchange(Exchange):
    """What lies in the memory of the result, beside other columns perhaps, is the result."""

    def gather(self, own: Tensor, spans: Spans, out: Tensor) -> Tensor:
        if own.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            return own
        return out.copy_(own)

    def gather_logits(self, own: Tensor, spans: Spans, out: Tensor | None) -> None:
        assert out is not None
        out.copy_(own)

    def offer(self, rows: Tensor, announce: Callable[[], None]) -> None:
        return

    def offered(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        raise InvariantError("a lone rank is offered no rows")
