"""Judges combinations: loads each model once, scores the same tokens with each, and compares.

The baseline comes first. One model is in memory at a time, beside the baseline's LM head and last
hidden states.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.workers.config import EngineConfig
from penstock.workers.context_policy import ContextSettings, unsupported_reason
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.load import load_configured
from penstock.workers.errors import ConfigError
from penstock.workers.evaluation.combination import Combination
from penstock.workers.evaluation.eval_set import EvalSet
from penstock.workers.evaluation.figures import Figures, Scores, figures_of
from penstock.workers.evaluation.scoring import BaseDistribution, WindowScores, greedy
from penstock.workers.memory.kv_format import kv_format
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import open_model
from penstock.workers.models.weight_summary import linears_of
from penstock.workers.quantization import weight_plan
from penstock.workers.request import RequestError, SamplingParams
from penstock.workers.weights.sources import DTYPES

# Told of a combination and of tokens that it has scored or generated.
Progress = Callable[[Combination, int], object]


@dataclass(frozen=True, slots=True)
class WeightSize:
    """`num_bytes`: of all weights in memory. `bits_per_weight`: of the linear layers without the
    head, scales and zero points included."""

    num_bytes: int
    bits_per_weight: float
    format: str  # of most weights in linear layers

    @classmethod
    def of(cls, decoder: Decoder) -> WeightSize:
        linears = list(linears_of(decoder.layers))
        num_bytes = sum(packed.num_bytes for packed in linears)
        num = sum(packed.in_features * packed.out_features for packed in linears)
        return cls(decoder.weights.num_bytes, 8 * num_bytes / num, decoder.weights.format)


@dataclass(frozen=True, slots=True)
class Seconds:
    """To load the model, to score the windows, and to generate the greedy answers."""

    load: float
    score: float
    generate: float

    @property
    def total(self) -> float:
        return self.load + self.score + self.generate


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What came of one combination. `kv`, `activations`: the formats that it had in the end."""

    combination: Combination
    figures: Figures
    scores: Scores
    size: WeightSize
    kv: str
    activations: str
    kv_bytes_per_token: float
    seconds: Seconds


def check_all(
    config: EngineConfig, folder: Path, combinations: Sequence[Combination], window_tokens: int
) -> None:
    """Raise ConfigError for a combination that this model cannot have, before anything is loaded.

    `config`: of the engine, without what a combination sets. Raises LoadError as loading does.
    """
    for each in combinations:
        asked = each.weights if each.activations == "auto" else each.activations
        _, model, _ = open_model(str(folder), asked, config.device)
        weight_plan(model.stored_scheme, each.weights, each.quantize_o, each.quantize_lm_head)
        kv_format(each.kv, each.kv_group, model.head_dim, DTYPES[model.dtype])
        limit = config.max_model_len or model.max_position_embeddings
        settings = ContextSettings.of(each.config(config), limit, unsupported_reason(model))
        try:
            context = settings.context(SamplingParams(**each.context.request))
        except RequestError as error:
            raise ConfigError(f"context policy {each.context}: {error.message}") from None
        if context.full_tokens is None and window_tokens + 1 > limit:
            raise ConfigError(
                f"windows of {window_tokens:,} tokens and one more exceed the {limit:,} that this "
                f"model takes; give --window-tokens {limit - 1} or fewer"
            )
        if context.full_tokens is not None and context.full_tokens >= window_tokens:
            raise ConfigError(
                f"context policy {each.context} sees all of a window of {window_tokens:,} tokens, "
                "so it costs nothing there: give longer windows, or a smaller sink window"
            )


def judge(
    config: EngineConfig,
    folder: Path,
    baseline: Combination,
    others: Sequence[Combination],
    eval_set: EvalSet,
    progress: Progress = lambda *_: None,
) -> Iterator[Judged]:
    """The baseline, and then each of the others, as they are done. `baseline` may be among them.

    `config`: of the engine, without what a combination sets; its `device` is cpu or cuda. Raises
    ConfigError and LoadError as loading does.
    """
    config = dataclasses.replace(
        config, prefix_cache=False, max_waiting=max(len(eval_set.windows), len(eval_set.prompts))
    )
    base: Base | None = None
    for group in _by_model([baseline, *(each for each in others if each != baseline)]):
        began_s = time.perf_counter()
        decoder = load_configured(
            group[0].config(config),
            folder,
            config.device,
            dtype=group[0].activations,
            progress=False,
        )
        load_s = time.perf_counter() - began_s
        for combination in group:
            engine = Engine(combination.config(config), decoder)
            judged, base = _judged(engine, combination, eval_set, base, load_s, progress)
            engine.close()
            yield judged
        del decoder, engine
        gc.collect()  # an engine is a ring of references


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """The baseline's scores, and its distributions."""

    scores: Scores
    distribution: BaseDistribution


def _judged(
    engine: Engine,
    combination: Combination,
    eval_set: EvalSet,
    base: Base | None,
    load_s: float,
    progress: Progress,
) -> tuple[Judged, Base]:
    """One combination beside `base`; without one, it is the baseline."""

    def on_tokens(num: int) -> None:
        progress(combination, num)

    context, began_s = combination.context.request, time.perf_counter()
    found = WindowScores(
        eval_set.windows,
        engine.model,
        None if base is None else base.distribution,
        on_tokens,
        keeps_hidden=base is None,
    )
    found.score(engine, context)
    scored_s = time.perf_counter()
    answers: list[list[int]] = []
    if eval_set.num_new:
        answers = greedy(engine, eval_set.prompts, eval_set.num_new, context, on_tokens)
    done_s = time.perf_counter()
    kl = np.zeros_like(found.nll) if found.kl is None else found.kl
    scores = Scores(found.nll, found.top1, kl, answers)
    base = base or Base(scores, found.base)
    layout = engine.arena.layout
    judged = Judged(
        combination,
        figures_of(scores, base.scores),
        scores,
        WeightSize.of(engine.model),
        engine.facts.kv,
        engine.facts.dtype,
        layout.block_bytes / layout.block_size,
        Seconds(load_s, scored_s - began_s, done_s - scored_s),
    )
    return judged, base


def _by_model(combinations: Sequence[Combination]) -> list[list[Combination]]:
    """Those with the same model together, in the order of their first ones."""
    found: dict[tuple[object, ...], list[Combination]] = {}
    for each in combinations:
        found.setdefault(each.model_key, []).append(each)
    return list(found.values())
