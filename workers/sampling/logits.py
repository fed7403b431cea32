"""Logits processing of one request: bias, penalties, forbidden tokens.

Order: logit_bias, repetition penalty, presence and frequency penalties, allowed tokens, bad words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.workers.device_copy import to_device, to_host
from penstock.workers.request import SamplingParams, TokenLogprob


class LogitsEditor:
    """Applies one request's parameters to its logits, with the token counts for penalties."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]):
        self._params = params
        self._seen = set(prompt_ids) if params.repetition_penalty != 1.0 else set()
        self._counts: Counter[int] = Counter()
        self._bias_ids = torch.tensor([each[0] for each in params.logit_bias], dtype=torch.long)
        self._bias = torch.tensor([each[1] for each in params.logit_bias])
        self._allowed = torch.tensor(params.allowed_token_ids, dtype=torch.long)

    def observe(self, token_id: int) -> None:
        """`token_id` is now part of the answer."""
        self._seen.add(token_id)
        self._counts[token_id] += 1

    def edit(self, row: Tensor, token_ids: Sequence[int]) -> None:
        """Change `row`, fp32 [vocab], in place. `token_ids`: prompt and answer so far."""
        params = self._params
        device = row.device
        if len(self._bias_ids):
            row.index_add_(0, to_device(self._bias_ids, device), to_device(self._bias, device))
        if params.repetition_penalty != 1.0 and self._seen:
            ids = torch.tensor(list(self._seen), device=row.device)
            held = row[ids]
            penalty = params.repetition_penalty
            row[ids] = torch.where(held > 0, held / penalty, held * penalty)
        if (params.presence_penalty or params.frequency_penalty) and self._counts:
            ids = torch.tensor(list(self._counts), device=row.device)
            counts = torch.tensor(list(self._counts.values()), device=row.device)
            row[ids] -= params.presence_penalty + params.frequency_penalty * counts
        if len(self._allowed):
            allowed = to_device(self._allowed, device)
            kept = row[allowed]
            row.fill_(-torch.inf)
            row[allowed] = kept
        for word in params.bad_words_ids:
            head = len(word) - 1
            if head == 0 or tuple(token_ids[-head:]) == word[:-1]:
                row[word[-1]] = -torch.inf


class LogprobRows(NamedTuple):
    """Logprobs of chosen tokens and of the likeliest ones, a row a token; on the device until
    `to_host`."""

    token_ids: Tensor  # int64 [R]
    logprobs: Tensor  # [R]
    ranks: Tensor  # int64 [R], from 1
    top_ids: Tensor  # int64 [R, num_top]
    top: Tensor  # [R, num_top]

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobRows:
        """Logprobs of `token_ids` int64 [R] under `logits` fp32 [R, vocab]."""
        logprobs = logits.log_softmax(dim=-1)
        chosen = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs > chosen).sum(dim=-1) + 1
        top = torch.topk(logprobs, num_top, dim=-1)
        return cls(token_ids, chosen.squeeze(1), ranks, top.indices, top.values)

    def to_host(self) -> LogprobRows:
        """As `device_copy.to_host`."""
        return LogprobRows(*map(to_host, self))

    def listed(self) -> list[TokenLogprob]:
        """One TokenLogprob for each row; call once the rows are on the host."""
        return [
            TokenLogprob(token_id, logprob, rank, tuple(zip(best_ids, best)))
            for token_id, logprob, rank, best_ids, best in zip(*(each.tolist() for each in self))
        ]
