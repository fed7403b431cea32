"""The length predictor: request features -> distribution of the answer's length, learnt online.

Counted hazards by group (hazards.py), shifted by the text's features (residual.py) as far as that
has improved predictions, calibrated to cover what they promise (conformal.py). It learns from each
finished request, and from running ones by their progress: ends alone come from short answers while
the first long ones still run (length bias). Before any observation it predicts a broad prior.

A predictor has one owner: nothing in it is locked, and a prediction and an observation must not
run at the same time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from penstock.deployments.prediction.conformal import (
    LEVELS,
    adapted,
    calibrate,
    surprise,
)
from penstock.deployments.prediction.distribution import (
    NUM_BINS,
    Floats,
    LengthDistribution,
    cumulative_hazard,
)
from penstock.deployments.prediction.features import NUM_FACTS, Features
from penstock.deployments.prediction.hazards import (
    Exposure,
    HazardTree,
    cancel_prior,
    exposure,
    exposures,
    length_prior,
)
from penstock.deployments.prediction.mixture import (
    MEMORY,
    Steps,
    Trust,
    gradient_of_mixture,
    log_likelihood,
)
from penstock.deployments.prediction.residual import LengthResidual, words_of

MAX_MODELS = 256
GROUPS = ("all", "model", "tenant", "template")


class Ended(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # by itself: end of sequence, a stop token, a stop string
    LENGTH = "length"  # cut at max_tokens or the context: it would have been longer
    CANCEL = "cancel"  # the client left


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a prediction came about. `weights` are of the hazard at the median, and sum up to 1."""

    weights: tuple[tuple[str, float], ...]  # ("prior", w), ("all", w), ("model", w) ...
    num_seen: tuple[tuple[str, float], ...]  # answers counted by group, faded
    text_weight: float  # 0..1: how far the residual is trusted, as it has earned
    size_weight: float  # 0..1: how far groups by the prompt's size are
    text_shift: float  # of the hazards' logits; below 0 longer than the groups say
    levels: tuple[tuple[float, float], ...]  # (promised, read at) of the calibration
    median: int
    p90: int

    @property
    def is_text_on(self) -> bool:
        return self.text_weight > 0.5


@dataclass(slots=True)
class Watch:
    """A running answer: up to which token it has been learnt from."""

    features: Features
    counted: int = 0  # by the groups
    learnt: int = 0  # by calibration, weights and text: ten times the cost

    COUNT_FROM, COUNT_GROWTH = 32, 1.08
    LEARN_FROM, LEARN_GROWTH = 64, 1.6

    def is_due(self, generated: int) -> bool:
        """Whether `progress` would learn anything."""
        return generated > max(Watch.COUNT_FROM, Watch.COUNT_GROWTH * self.counted)

    def is_costly(self, generated: int) -> bool:
        return generated > max(Watch.LEARN_FROM, Watch.LEARN_GROWTH * self.learnt)


class LengthPredictor:
    """Predicts, observes, explains itself. snapshot.py turns it into bytes and back."""

    def __init__(self) -> None:
        self.ends = HazardTree(length_prior())
        self.cancels = HazardTree(cancel_prior())
        self.residual = LengthResidual(NUM_FACTS)
        self.everyone = Trust()  # what a model starts from
        self.models: OrderedDict[str, Trust] = OrderedDict()
        # The last prediction: an answer is often learnt from just after it was predicted.
        self._last: tuple[Features, Steps] | None = None  # None: something was learnt since

    def predict(self, features: Features, *, with_cancels: bool = False) -> LengthDistribution:
        """Distribution of the answer's length; with cancels, of how long it holds its memory.

        The first is for ordering and charging, the second for occupancy: a client that leaves
        frees memory too, and is a competing risk with its own hazards.
        """
        if features.ignore_eos:
            cumulative = np.zeros(NUM_BINS + 1)
        else:
            cumulative = self._steps(features).cumulative
        if with_cancels:
            cumulative = cumulative + self.cancels.cumulative(features.path())
        return distribution_of(features, cumulative)

    def predict_both(self, features: Features) -> tuple[LengthDistribution, LengthDistribution]:
        """`predict` without and with cancels, for little more than the price of one."""
        distribution = self.predict(features)
        cancels = self.cancels.cumulative(features.path())
        return distribution, distribution_of(features, distribution.cumulative + cancels)

    def steps_of(self, requests: Sequence[Features]) -> list[Steps]:
        """The predictions of several requests: less at once than one by one.

        Raises ValueError for a text that `digest_text` cannot have made.
        """
        if not requests:
            return []
        counted = self.ends.hazards_of((each.path(), each.size_group()) for each in requests)
        rows = self.residual.rows([words_of(each) for each in requests])
        shifts = [self.residual.shift(row) for row in rows]
        odds = np.array([math.exp(-shift) for shift in shifts])[:, None, None]
        shifted = counted / (counted + (1.0 - counted) * odds)
        hazards = np.concatenate((counted, shifted), axis=1)  # [requests, experts, bins]
        trusts = [self.models.get(each.model, self.everyone) for each in requests]
        # A mixture of distributions mixes their survivals; in logarithms, to keep the tail.
        weights = np.array([each.log_weights for each in trusts])[..., None]
        mixed = -np.logaddexp.reduce(weights - cumulative_hazard(hazards), axis=1)
        mixed[:, 0] = 0.0
        return [
            Steps(row, shift, own, trust, calibrate(one, trust.levels))
            for row, shift, own, trust, one in zip(rows, shifts, hazards, trusts, mixed)
        ]

    def progress(self, watch: Watch, generated: int) -> None:
        """Learn from an answer that has `generated` tokens and goes on: it is censored there.

        May be called often; it learns when an answer has grown by a twelfth. `observe` leaves out
        what is learnt here if it gets the same watch. All that is learnt are sums over tokens whose
        expectation under the true distribution is zero wherever they stop, so that no answer
        weighs more because it was short.
        """
        self.progress_all([(watch, generated)])

    def progress_all(self, answers: Iterable[tuple[Watch, int]]) -> None:
        """`progress` of several answers at once, which costs much less than one by one."""
        due: list[tuple[Watch, int]] = []
        costly: list[tuple[Watch, int]] = []
        for watch, generated in answers:
            if not watch.is_due(generated):
                continue
            features, reached = watch.features, generated - 1  # the last token may be the end
            if features.max_tokens is not None:
                reached = min(reached, features.max_tokens)
            due.append((watch, reached))
            if not features.ignore_eos and watch.is_costly(generated):
                costly.append((watch, reached))
        if costly:
            all_steps = self.steps_of([watch.features for watch, _ in costly])
            for (watch, reached), steps in zip(costly, all_steps):
                features, start = watch.features, max(watch.features.min_tokens, watch.learnt)
                seen = exposure(start, reached, False, features.max_tokens)
                self._learn(features, steps, seen, watch.learnt, reached)
                watch.learnt = reached
        if due:
            self._last = None
            self._count(due)
        for watch, reached in due:
            watch.counted = reached

    def _count(self, due: Sequence[tuple[Watch, int]]) -> None:
        """Count in their groups that these answers go on."""
        plain = []
        for watch, reached in due:
            features = watch.features
            if features.ignore_eos or features.min_tokens > watch.counted:  # clients may leave
                limit = features.max_tokens
                left = exposure(watch.counted, reached, False, limit)
                self.cancels.watch(features.path(), left)
                if not features.ignore_eos:
                    seen = exposure(features.min_tokens, reached, False, limit)
                    self.ends.watch([*features.path(), features.size_group()], seen)
            else:
                plain.append((watch, reached))
        groups: dict[Hashable, list[int]] = {}
        sizes: dict[Hashable, list[int]] = {}
        for i, (watch, _) in enumerate(plain):
            for key in watch.features.path():
                groups.setdefault(key, []).append(i)
            sizes.setdefault(watch.features.size_group(), []).append(i)
        if not plain:
            return
        seen_all = exposures([watch.counted for watch, _ in plain], [end for _, end in plain])
        of_groups = _belonging(groups, len(plain)) @ seen_all
        self.cancels.watch_sums(groups, of_groups)
        self.ends.watch_sums(groups, of_groups)
        self.ends.watch_sums(sizes, _belonging(sizes, len(plain)) @ seen_all)

    def observe(
        self, features: Features, length: int, ended: Ended | str, watch: Watch | None = None
    ) -> None:
        """Learn from an answer that ended after `length` tokens. One pass, nothing is kept.

        `watch`: the one that `progress` was given, if any. Not for answers that were interrupted
        and will go on (preemption, a worker's death), nor for those that an error ended. Raises
        ValueError naming what does not fit.
        """
        self.observe_predicted(features, None, length, ended, watch)

    def observe_predicted(
        self,
        features: Features,
        steps: Steps | None,
        length: int,
        ended: Ended | str,
        watch: Watch | None = None,
    ) -> None:
        """`observe`, with its prediction from `steps_of`, if it was made."""
        ended = _ended(ended)
        if length < 0:
            raise ValueError(f"length must be 0 or more, not {length}")
        if features.max_tokens is not None and length > features.max_tokens:
            raise ValueError(
                f"length ({length}) exceeds max_tokens ({features.max_tokens}): "
                "give the limit that the worker was given"
            )
        path, limit = features.path(), features.max_tokens
        stopped, cancelled = ended is Ended.STOP, ended is Ended.CANCEL
        counted, learnt = (0, 0) if watch is None else (watch.counted, watch.learnt)
        if counted >= length and (stopped or cancelled):
            length = counted + 1  # the reports were ahead of the label: count the end
        self.cancels.add(path, exposure(counted, length, cancelled, limit))
        if features.ignore_eos:
            return  # it says nothing about its natural end
        seen = exposure(max(features.min_tokens, learnt), length, stopped, limit)
        if seen.event is None and not seen.at_risk.any() and not counted:
            return
        self._learn(features, steps or self._steps(features), seen, learnt, length, ended)
        counts = exposure(max(features.min_tokens, counted), length, stopped, limit)
        self.ends.add([*path, features.size_group()], counts)
        self._last = None

    def explain(self, features: Features) -> Explanation:
        """How the groups and the text contributed, and the resulting quantiles."""
        steps, path = self._steps(features), features.path()
        distribution = self.predict(features)
        median, p90 = distribution.quantile(0.5), distribution.quantile(0.9)
        place = int(np.searchsorted(steps.cumulative, math.log(2.0))) - 1
        names = GROUPS[: len(path)]
        shares = self.ends.weights(path, min(max(place, 0), NUM_BINS - 1))
        counts = [self.ends.groups.get(key) for key in path]
        return Explanation(
            weights=tuple(zip(("prior", *names), shares)),
            num_seen=tuple(
                (name, float(each.at_risk[0]) if each else 0.0) for name, each in zip(names, counts)
            ),
            text_weight=steps.trust.text_weight,
            size_weight=steps.trust.size_weight,
            text_shift=steps.shift,
            levels=tuple(zip(LEVELS, steps.trust.levels.tolist())),
            median=median,
            p90=p90,
        )

    def _steps(self, features: Features) -> Steps:
        if self._last is None or self._last[0] != features:
            self._last = features, self.steps_of([features])[0]
        return self._last[1]

    def _trust_of(self, model: str) -> Trust:
        if model not in self.models:
            self.models[model] = Trust(self.everyone.evidence.copy(), self.everyone.levels)
            while len(self.models) > MAX_MODELS:
                self.models.popitem(last=False)
        self.models.move_to_end(model)
        return self.models[model]

    def _learn(
        self,
        features: Features,
        steps: Steps,
        seen: Exposure,
        start: int,
        now: int,
        ended: Ended | None = None,
    ) -> None:
        """All but the counts, from tokens `start` to `now`; None: the answer goes on.

        `steps`: of its prediction.
        """
        own = self._trust_of(features.model)
        moves = surprise(
            distribution_of(features, steps.cumulative),
            start,
            now,
            is_end=ended is Ended.STOP,
            is_cut=ended is Ended.LENGTH,
        )
        likelihood = log_likelihood(steps.hazards, seen)
        likelihood -= likelihood[0]
        for trust in (own, self.everyone):
            trust.levels = adapted(trust.levels, moves)
            # Exponential weights: log-likelihood of this answer relative to the groups alone.
            kept = 1.0 if ended is None else MEMORY
            trust.evidence = kept * trust.evidence + likelihood
        gradient = gradient_of_mixture(steps, seen)
        self.residual.learn(steps.row, gradient, is_new=ended is not None)
        self._last = None


def _belonging(groups: Mapping[Hashable, Sequence[int]], num: int) -> Floats:
    """[groups, num] 1 where an answer is in the group."""
    belongs = np.zeros((len(groups), num))
    for row, members in zip(belongs, groups.values()):
        row[members] = 1.0
    return belongs


def distribution_of(features: Features, cumulative: Floats) -> LengthDistribution:
    return LengthDistribution(
        cumulative, max_tokens=features.max_tokens, min_tokens=features.min_tokens
    )


def _ended(ended: Ended | str) -> Ended:
    try:
        return Ended(ended)
    except ValueError:
        names = ", ".join(Ended)
        raise ValueError(f"ended must be one of {names}, not {ended!r}") from None
