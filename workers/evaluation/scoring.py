"""Scores of given texts and greedy continuations, by an engine.

The engine serves the texts as prompts with logprobs, and its executor shows the full logits of each
chunk (`Executor.watch_prompts`), from which the scores are taken where they are: no logits are
copied to Python. The baseline keeps its last hidden states and its LM head instead of its logits,
and multiplies them again for each combination: exact, and smaller by vocab / hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.matmul import linear
from penstock.kernels.types import PackedLinear
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.execution.step import PromptLogits
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import LogitScaling
from penstock.workers.request import Delta, Request, RequestError, SamplingParams

OnTokens = Callable[[int], object]  # told how many tokens were scored or generated


class BaseDistribution:
    """The baseline's distribution of every scored token, made again when it is asked for."""

    def __init__(self, hidden: Tensor, lm_head: PackedLinear, scaling: LogitScaling):
        """`hidden` [windows, tokens, hidden] as the baseline's decoder gave it."""
        self._hidden = hidden
        self._lm_head = lm_head
        self._scaling = scaling

    def logprobs(self, window: int, rows: slice) -> Tensor:
        """fp64 [R, vocab] of the tokens that follow `rows` of a window."""
        hidden = self._hidden[window, rows]
        logits = self._scaling.apply_(linear(hidden, self._lm_head).float())
        return logits.double().log_softmax(dim=-1)


class WindowScores:
    """Scores of each token of equally long windows but their first; a watcher of prompts.

    Arrays [windows, tokens - 1]: `nll` = -log p in fp64, `top1` the likeliest id, and with a `base`
    `kl` = KL(base || this) over the whole vocabulary, in fp64.
    """

    def __init__(
        self,
        windows: Sequence[Sequence[int]],
        decoder: Decoder,
        base: BaseDistribution | None,
        on_tokens: OnTokens = lambda _: None,
        *,
        keeps_hidden: bool = False,
    ):
        shape, device = (len(windows), len(windows[0]) - 1), decoder.device
        self._windows = windows
        self._nll = torch.full(shape, math.nan, dtype=torch.float64, device=device)
        self._top1 = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._kl = None if base is None else torch.full_like(self._nll, math.nan)
        self._hidden = None
        if keeps_hidden:
            size = (*shape, decoder.config.hidden_size)
            self._hidden = torch.empty(size, dtype=decoder.dtype, device=device)
        self._base = base
        self._lm_head = decoder.lm_head
        self._scaling = decoder.logit_scaling
        self._on_tokens = on_tokens

    def score(self, engine: Engine, context: dict[str, Any]) -> None:
        """Serve all windows with `engine` under a context policy. Raises ConfigError for windows
        that it cannot take, and RuntimeError for a model that gives no numbers."""
        params = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0, **context
        )
        engine.executor.watch_prompts = self._watch
        try:
            run_all(engine, self._windows, params, lambda _: None)
        finally:
            engine.executor.watch_prompts = None
        if self._nll.isnan().any() or (self._kl is not None and self._kl.isnan().any()):
            raise RuntimeError("the model's logits are not numbers: its weights are damaged")

    @torch.inference_mode()
    def _watch(self, seen: PromptLogits) -> None:
        window = int(seen.request_id)
        rows = slice(seen.start, seen.start + len(seen.following))
        logprobs = seen.logits.double().log_softmax(dim=-1)
        self._nll[window, rows] = -logprobs.gather(1, seen.following[:, None])[:, 0]
        self._top1[window, rows] = seen.logits.argmax(dim=-1)
        if self._hidden is not None:
            self._hidden[window, rows] = seen.hidden
        if self._base is not None and self._kl is not None:
            base = self._base.logprobs(window, rows)
            self._kl[window, rows] = (base.exp() * (base - logprobs)).sum(dim=-1)
        self._on_tokens(len(seen.following))

    @property
    def nll(self) -> NDArray[np.float64]:
        return self._nll.cpu().numpy()

    @property
    def top1(self) -> NDArray[np.int64]:
        return self._top1.cpu().numpy()

    @property
    def kl(self) -> NDArray[np.float64] | None:
        return None if self._kl is None else self._kl.cpu().numpy()

    @property
    def base(self) -> BaseDistribution:
        """These scores' distribution as the baseline of others; they have kept hidden states."""
        assert self._hidden is not None
        return BaseDistribution(self._hidden, self._lm_head, self._scaling)


def greedy(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    context: dict[str, Any] | None = None,
    on_tokens: OnTokens = lambda _: None,
) -> list[list[int]]:
    """The answers at temperature 0, of `num_new` tokens each; the end token ends none."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, **(context or {}))
    return run_all(engine, prompts, params, on_tokens)


def run_all(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, on_tokens: OnTokens
) -> list[list[int]]:
    """The answer's ids to each prompt. Requests are named by their place. Raises ConfigError for
    one that the engine refuses, and RuntimeError for one that fails."""
    answers: list[list[int]] = [[] for _ in prompts]
    try:
        for i, ids in enumerate(prompts):
            engine.add(Request(str(i), tuple(ids), params))
    except RequestError as error:
        for i in range(len(prompts)):
            engine.abort(str(i))
        raise ConfigError(error.message) from None
    while engine.has_work():
        for delta in engine.step():
            _check(delta)
            answers[int(delta.request_id)] += delta.token_ids
            on_tokens(len(delta.token_ids))
    return answers


def _check(delta: Delta) -> None:
    if delta.error is not None:
        raise RuntimeError(f"the engine failed: {delta.error_message or delta.error}")
