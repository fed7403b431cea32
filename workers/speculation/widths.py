"""How many draft tokens a step verifies: as many as make tokens faster, by what was measured.

A step of n rows takes T(n) and gives G tokens; a draft token whose whole draft up to it is right
with probability s adds s to G, and T(n + 1) - T(n) to the time. The number with the largest G / T
is chosen. The goodput argument is that of SmartSpec (arXiv 2406.14066).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from penstock.workers.speculation.draft import Draft, Offer, StepSize

GAIN = 1.05  # that drafts must promise: times and probabilities are estimates
DECAY = 0.98  # of what was seen before, with each draft of the same kind
MATCH_BOUNDS = (2, 3, 4, 6, 9, 17)  # tokens that matched, from which a draft is of the next kind
PLACE_BOUNDS = (1, 2, 4)  # the same for a token's place in its draft, from 0
# Shares of right tokens by kind, as if PRIOR_COUNT tokens had been seen: short matches say little.
PRIOR_COUNT = 6.0
FADE = 1 / 256  # of what was seen, with each draft of its kind that is not verified
PRIOR_SHARES = (0.15, 0.3, 0.4, 0.55, 0.7, 0.8, 0.9)
PACE = 1.04  # by which a step moves a running median
LEAST_ADDED = 0.005  # of a step, which a row is measured to add at least
PLAIN_STEPS = 64  # with drafts of a model, after which one without any is due
LEAST_SCALE, MOST_SCALE = 0.1, 100.0
CERTAIN = 0.95  # of tokens that a grammar forces: another spelling of the text is possible
# Of a draft model: its tokens' probabilities, from which a token is of the next kind, and as if
# PRIOR_COUNT had been seen, the shares of right ones.
PROBABILITY_BOUNDS = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
PROBABILITY_SHARES = (0.2, 0.4, 0.55, 0.7, 0.85, 0.93, 0.97)
DRAFT_SHARE = 0.85  # of its tokens, before any was seen: it is tried, and soon known
FIRST_SAMPLED_KIND = len(PROBABILITY_SHARES)  # of tokens that it drew; their shares are others


_FIRST_TOTAL = (DRAFT_SHARE * PRIOR_COUNT, PRIOR_COUNT)


class StepCosts:
    """T(rows, keys) in seconds: straight lines between measured numbers of rows, and beyond them,
    and `key_s` for each key that a row sees."""

    def __init__(self, seconds: Mapping[int, float], key_s: float = 0.0):
        """`seconds` by number of rows, of at least two numbers. Where more rows took less, by
        chance, these and those before take their mean (isotonic regression)."""
        self.key_s = key_s
        self._rows = sorted(seconds)
        pools: list[tuple[float, int]] = []  # mean and size, ascending
        for rows in self._rows:
            mean, size = seconds[rows], 1
            while pools and pools[-1][0] > mean:
                other, num = pools.pop()
                mean, size = (mean * size + other * num) / (size + num), size + num
            pools.append((mean, size))
        self._seconds = [mean for mean, size in pools for _ in range(size)]

    def seconds(self, num_rows: int, num_keys: int) -> float:
        last = len(self._rows) - 1
        right = min(max(bisect_right(self._rows, num_rows), 1), last)
        left = right - 1
        slope = (self._seconds[right] - self._seconds[left]) / (
            self._rows[right] - self._rows[left]
        )
        rows_s = self._seconds[left] + slope * (num_rows - self._rows[left])
        return rows_s + self.key_s * num_keys


class Acceptance:
    """How often tokens of drafts were right: by source, matched tokens and place in the draft; of a
    draft model, by the probability that it gave them."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, int], tuple[float, float]] = {}  # right, seen
        self._totals: dict[str, tuple[float, float]] = {}  # the same by source

    def survival(self, draft: Draft) -> list[float]:
        """For each token of `draft`: the probability that it and all before it are right."""
        found, product = [], draft.trust
        for kind in _kinds(draft):
            right, seen = self._count(*kind)
            product *= right / seen
            found.append(product)
        return found

    def share(self, source: str) -> float:
        """Of the tokens from `source` after right ones, those that were right."""
        right, seen = self._totals.get(source, _FIRST_TOTAL)
        return right / seen

    def observe(self, draft: Draft, num_accepted: int) -> None:
        """The first `num_accepted` tokens of `draft` were right; then one was wrong, if any."""
        for i, kind in enumerate(_kinds(draft)[: num_accepted + 1]):
            self._counts[kind] = _counted(self._count(*kind), i < num_accepted)
            known = self._totals.get(draft.source, _FIRST_TOTAL)
            self._totals[draft.source] = _counted(known, i < num_accepted)

    def fade(self, draft: Draft) -> None:
        """`draft` did not pay. What made it look so is forgotten in time: others may be better."""
        kind = _kinds(draft)[0]
        known = self._counts.get(kind)
        if known is not None:
            prior = self._prior(*kind)
            self._counts[kind] = (
                known[0] + FADE * (prior[0] - known[0]),
                known[1] + FADE * (prior[1] - known[1]),
            )

    def _count(self, source: str, kind: int, place: int) -> tuple[float, float]:
        known = self._counts.get((source, kind, place))
        return self._prior(source, kind, place) if known is None else known

    def _prior(self, source: str, kind: int, place: int) -> tuple[float, float]:
        """Before any was seen."""
        if source == "draft":
            share = PROBABILITY_SHARES[kind % FIRST_SAMPLED_KIND]
        else:
            share = CERTAIN if source == "grammar" else PRIOR_SHARES[kind]
        if place:  # a draft that was right so far goes on being right more often
            share = (1 + share) / 2
        return share * PRIOR_COUNT, PRIOR_COUNT


def _kinds(draft: Draft) -> list[tuple[str, int, int]]:
    """Of each token of `draft`: what is counted as the same."""
    if draft.probabilities:
        first = FIRST_SAMPLED_KIND if draft.is_sampled else 0
        found = [first + bisect_right(PROBABILITY_BOUNDS, each) for each in draft.probabilities]
        return [(draft.source, kind, 0) for kind in found]
    kind = bisect_right(MATCH_BOUNDS, draft.match_length)
    return [
        (draft.source, kind, bisect_right(PLACE_BOUNDS, i)) for i in range(len(draft.token_ids))
    ]


def _counted(known: tuple[float, float], is_right: bool) -> tuple[float, float]:
    """A count of right and seen tokens after one more."""
    right, seen = known
    return DECAY * right + is_right, DECAY * seen + 1


class StepWatch:
    """By how much the rows of drafts take more or less than StepCosts says, from real steps.

    A machine under load measures wrong at the start, and its pace changes. So steps with drafts are
    compared with those of as many sequences without; medians, as some steps are held up by others.
    """

    def __init__(self, costs: StepCosts):
        self._costs = costs
        self._pace: dict[int, float] = {}  # seconds of a step without drafts, by T; by its rows
        self.scale = 1.0  # of the time that rows of drafts add
        self._num_drafted: dict[int, int] = {}  # steps since one without drafts, by its rows

    def observe(self, step: StepSize, num_drafts: int, num_draft_keys: int, seconds: float) -> None:
        """As Widths.observe_step."""
        plain_s = self._costs.seconds(step.num_rows, step.num_keys)
        pace = self._pace.get(step.num_rows)
        if not num_drafts:
            found = seconds / plain_s
            self._pace[step.num_rows] = found if pace is None else _towards(found, pace)
            self._num_drafted[step.num_rows] = 0
            return
        if pace is None:
            return
        self._num_drafted[step.num_rows] += 1
        added_s = self.unscaled_s(step, num_drafts, step.num_keys + num_draft_keys)
        found = (seconds / pace - plain_s) / added_s
        self.scale = min(max(_towards(found, self.scale), LEAST_SCALE), MOST_SCALE)

    def wants_plain(self, num_rows: int) -> bool:
        """Whether it is time for a step of `num_rows` without drafts, to compare others with."""
        return self._num_drafted.get(num_rows, PLAIN_STEPS) >= PLAIN_STEPS

    def pace_of(self, num_rows: int) -> float:
        """By how much steps of `num_rows` take longer than was measured at the start."""
        return self._pace.get(num_rows, 1.0)

    def added_s(self, step: StepSize, num_drafts: int, num_keys: int) -> float:
        """By how much `num_drafts` rows make `step` longer, which then sees `num_keys` keys."""
        if not num_drafts:
            return 0.0
        return self.scale * self.unscaled_s(step, num_drafts, num_keys)

    def unscaled_s(self, step: StepSize, num_drafts: int, num_keys: int) -> float:
        """As it was measured at the start."""
        plain_s = self._costs.seconds(step.num_rows, step.num_keys)
        whole_s = self._costs.seconds(step.num_rows + num_drafts, num_keys)
        return max(whole_s - plain_s, LEAST_ADDED * num_drafts * plain_s)


def _towards(found: float, median: float) -> float:
    """A running median after one more value."""
    return median * PACE if found > median else median / PACE


class MeasuredWidths:
    """As many draft tokens as pay by the measured costs and what was accepted so far."""

    def __init__(self, costs: StepCosts):
        self.costs = costs
        self.acceptance = Acceptance()
        self.watch = StepWatch(costs)

    def choose(self, offers: list[Offer], step: StepSize, room: int) -> list[int]:
        """As Widths."""
        survival = [self.acceptance.survival(offer.draft) for offer in offers]
        # Within a draft they never rise, so the likeliest tokens are leading parts of drafts.
        order = sorted(((-s, i) for i, each in enumerate(survival) for s in each))[:room]
        keys, tokens = step.num_keys, float(step.num_sampled)
        plain_s = self.costs.seconds(step.num_rows, keys)
        best, best_num = GAIN * tokens / plain_s, 0
        for num, (negative, i) in enumerate(order, 1):
            tokens -= negative
            keys += offers[i].num_keys
            rate = tokens / (plain_s + self.watch.added_s(step, num, keys))
            if rate > best:
                best, best_num = rate, num
        widths = [0] * len(offers)
        for _, i in order[:best_num]:
            widths[i] += 1
        for offer, width in zip(offers, widths, strict=True):
            if not width:
                self.acceptance.fade(offer.draft)
        return widths

    def observe(self, draft: Draft, num_accepted: int) -> None:
        """As Widths."""
        self.acceptance.observe(draft, num_accepted)

    def observe_step(
        self, step: StepSize, num_drafts: int, num_draft_keys: int, seconds: float
    ) -> None:
        """As Widths."""
        self.watch.observe(step, num_drafts, num_draft_keys, seconds)
