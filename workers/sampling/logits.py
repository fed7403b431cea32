"""Logits processing of one request: bias, penalties, forbidden tokens.

Order: logit_bias, repetition penalty, presence and frequency penalties, allowed tokens, bad words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.workers.request import MAX_LOGPROBS, SamplingParams, TokenLogprob
from penstock.workers.sampling.device_copy import to_device, to_host

FIRST_PLACES = 64  # of an answer's tokens; then twice as many, and so on
MANY = 12  # tokens are many if they are more than this part of the vocabulary


class TokenCounts:
    """Distinct tokens, and how often each occurred: tensors on the device of the logits.

    A further token changes one place of them, however many there are. A few tokens are a list of
    ids with their counts, and many are the counts of the whole vocabulary: to gather and scatter
    most of a row takes longer than to go through it. Before the first use they are on the host.
    """

    def __init__(self, token_ids: Iterable[int] = ()):
        counts = Counter(token_ids)
        self._place = {token_id: i for i, token_id in enumerate(counts)}
        self._ids = torch.tensor(list(counts), dtype=torch.long)
        self._counts = torch.tensor(list(counts.values()), dtype=torch.float32)
        self._of_all: Tensor | None = None  # then the others are not kept up

    def __len__(self) -> int:
        return len(self._place)

    def add(self, token_id: int) -> None:
        """The token has occurred once more."""
        place = self._place.setdefault(token_id, len(self._place))
        if self._of_all is not None:
            self._of_all[token_id] += 1
            return
        if place == len(self._ids):
            self._ids, self._counts = _doubled(self._ids), _doubled(self._counts)
        self._ids[place] = token_id
        self._counts[place] += 1

    def remove_last(self, token_id: int) -> None:
        """Undo the last `add` that has not been undone."""
        if self._of_all is not None:
            self._of_all[token_id] -= 1
            is_gone = bool(self._of_all[token_id] == 0)
        else:
            place = self._place[token_id]
            self._counts[place] -= 1
            is_gone = bool(self._counts[place] == 0)
        if is_gone:  # it was new, so its place is the last one
            del self._place[token_id]

    def few(self, row: Tensor) -> tuple[Tensor, Tensor] | None:
        """The tokens, int64, and their counts, fp32, in one order; None: use `of_all`. `row`: of
        logits, [vocab]."""
        if self._of_all is not None:
            return None
        if self._ids.device != row.device:
            self._ids, self._counts = (
                to_device(each, row.device) for each in (self._ids, self._counts)
            )
        ids, counts = self._ids[: len(self)], self._counts[: len(self)]
        if len(ids) * MANY < len(row):
            return ids, counts
        self._of_all = torch.zeros_like(row).scatter_(0, ids, counts)
        self._ids, self._counts = ids[:0], counts[:0]
        return None

    @property
    def of_all(self) -> Tensor:
        """The count of each token of the vocabulary, fp32 [vocab], after `few` has given None."""
        assert self._of_all is not None
        return self._of_all


def _doubled(values: Tensor) -> Tensor:
    return torch.cat((values, values.new_zeros(max(len(values), FIRST_PLACES))))


class LogitsEditor:
    """Applies one request's parameters to its logits, with the token counts for penalties."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], emitted_ids: Sequence[int] = ()
    ):
        """`emitted_ids`: the answer so far."""
        self._params = params
        self._seen = self._counts = None
        if params.repetition_penalty != 1.0:
            self._seen = TokenCounts((*prompt_ids, *emitted_ids))
        if params.presence_penalty or params.frequency_penalty:
            self._counts = TokenCounts(emitted_ids)
        self._bias_ids = torch.tensor([each[0] for each in params.logit_bias], dtype=torch.long)
        self._bias = torch.tensor([each[1] for each in params.logit_bias])
        self._allowed = torch.tensor(params.allowed_token_ids, dtype=torch.long)
        self._longest_head = max((len(word) - 1 for word in params.bad_words_ids), default=0)
        self._drafts: list[int] = []  # counted for the last row that was edited

    @torch.inference_mode()  # `edit` may have made tensors in it
    def observe(self, token_id: int) -> None:
        """`token_id` is now part of the answer."""
        self._count_drafts(())
        for counts in self._counters:
            counts.add(token_id)

    @property
    def _counters(self) -> list[TokenCounts]:
        return [counts for counts in (self._seen, self._counts) if counts is not None]

    def _count_drafts(self, drafts: tuple[int, ...]) -> None:
        """Count `drafts` after the answer's tokens, and no others."""
        counted = self._drafts
        while tuple(counted) != drafts[: len(counted)]:
            for counts in self._counters:
                counts.remove_last(counted[-1])
            del counted[-1]
        for token_id in drafts[len(counted) :]:
            for counts in self._counters:
                counts.add(token_id)
            counted.append(token_id)

    def edit(self, row: Tensor, token_ids: Sequence[int], drafts: tuple[int, ...] = ()) -> None:
        """Change `row`, fp32 [vocab], in place. `token_ids`: prompt and answer so far; `drafts`:
        tokens after them, as if they were part of the answer."""
        params = self._params
        self._count_drafts(drafts)
        if self._bias.device != row.device:
            self._to(row.device)
        if len(self._bias_ids):
            row.index_add_(0, self._bias_ids, self._bias)
        if self._seen is not None:
            self._penalise_repetition(row, self._seen, params.repetition_penalty)
        if self._counts is not None and len(self._counts):
            self._penalise_answer(row, self._counts)
        if len(self._allowed):
            kept = row[self._allowed]
            row.fill_(-torch.inf)
            row[self._allowed] = kept
        newest = tuple(token_ids[-self._longest_head :] if self._longest_head else ()) + drafts
        for word in params.bad_words_ids:
            head = len(word) - 1
            if head == 0 or newest[-head:] == word[:-1]:
                row[word[-1]] = -torch.inf

    def _penalise_repetition(self, row: Tensor, seen: TokenCounts, penalty: float) -> None:
        few = seen.few(row)
        if few is None:
            # By the sign of a logit it is divided or multiplied: that is the lesser of the two.
            changed, other = row / penalty, row * penalty
            choose = torch.minimum if penalty >= 1 else torch.maximum
            choose(changed, other, out=changed)
            torch.where(seen.of_all > 0, changed, row, out=row)
        else:
            ids, held = few[0], row[few[0]]
            row.scatter_(0, ids, torch.where(held > 0, held / penalty, held * penalty))

    def _penalise_answer(self, row: Tensor, tokens: TokenCounts) -> None:
        presence, frequency = self._params.presence_penalty, self._params.frequency_penalty
        few = tokens.few(row)
        if few is None:
            counts = tokens.of_all
            row -= (presence + frequency * counts).mul_(counts > 0)
        else:
            ids, counts = few
            row.scatter_(0, ids, row[ids] - (presence + frequency * counts))

    def _to(self, device: torch.device) -> None:
        """What does not change from token to token is copied once."""
        self._bias_ids = to_device(self._bias_ids, device)
        self._bias = to_device(self._bias, device)
        self._allowed = to_device(self._allowed, device)


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
        return cls(token_ids, chosen.squeeze(1), ranks, *_likeliest(logprobs, num_top))

    def to_host(self) -> LogprobRows:
        """As `device_copy.to_host`."""
        return LogprobRows(*map(to_host, self))

    def listed(self) -> list[TokenLogprob]:
        """One TokenLogprob for each row; call once the rows are on the host."""
        return [
            TokenLogprob(token_id, logprob, rank, tuple(zip(best_ids, best)))
            for token_id, logprob, rank, best_ids, best in zip(*(each.tolist() for each in self))
        ]


def _likeliest(logprobs: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Ids and logprobs of the likeliest tokens of each row, of equal ones the lowest ids first.

    Logits in bf16 often have equal ones, and which of them `topk` finds depends on its k. So k is
    MAX_LOGPROBS whatever the step's largest `num_top` is: the tokens that one request lists must
    not depend on the other requests of its step.
    """
    if num_top == 0:
        return logprobs.new_empty((len(logprobs), 0), dtype=torch.int64), logprobs[:, :0]
    ids = torch.topk(logprobs, min(MAX_LOGPROBS, logprobs.shape[1]), dim=-1).indices
    ids = ids.sort(dim=-1).values
    best = logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, best.indices[:, :num_top]), best.values[:, :num_top]
