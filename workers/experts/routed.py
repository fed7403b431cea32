"""The routed experts of one model, served from a cache: lookups by layer, prefetching, counters.

Translates the routing of a layer into cache lookups (which experts, which of their neurons, whose
int8 copy), and prefetches what the next layer is likely to need while this one computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.kernels.moe.mlp import Visited
from penstock.workers.experts.cache import ExpertCache
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.experts.lookahead import ExpertPredictor, RoutedLayer
from penstock.workers.experts.lookups import NeededRows
from penstock.workers.experts.modes import StepRows
from penstock.workers.experts.neurons.scores import NeuronSelector
from penstock.workers.experts.neurons.selection import select_neurons
from penstock.workers.experts.prefetch_trial import PrefetchTrial
from penstock.workers.experts.routing import LayerRouting
from penstock.workers.experts.transfer_meter import TransferMeter
from penstock.workers.model_config import ModelConfig
from penstock.workers.stats import ExpertStats, LayerAccuracy

# Without prefetch the accuracy of predictions is counted in two steps, which follow one another, of
# so many: the baseline is the experts of the token before.
COUNTED_STEPS = 32

Watcher = Callable[[int, Tensor, Tensor], None]  # of layer, normed states [T, hidden], ids [T, k]


class RoutedExperts:
    """The routed experts of a decoder that has an expert cache."""

    def __init__(
        self,
        cache: ExpertCache,
        config: ModelConfig,
        *,
        prefetch: bool | None = False,
        selector: NeuronSelector | None = None,
    ):
        """`prefetch` None: where timed steps say that it pays. `selector`: selects the neurons of
        sparse rows, those that streamed rows take first, and those that are prefetched."""
        self.cache = cache
        self.trial = PrefetchTrial() if prefetch is None else None
        self.prefetch = bool(prefetch)
        # Of the first rank of a group, whose trial is that of all: called when it changes its mind.
        self.on_prefetch: Callable[[bool], None] | None = None
        self._num_small_steps = 0
        self.selector = selector
        self.rows: StepRows | None = None  # of the current step; None: all rows are exact
        self.watch: Watcher | None = None
        self.meter = TransferMeter(cache.copier.counts)
        self.num_sparse_neurons = self.num_skipped_neurons = 0
        self.num_withheld = 0  # prefetches withheld because the host link was saturated
        self.predictor: ExpertPredictor | None = None  # None until the layers are loaded
        self._config = config

    def use_experts(self, manifest: Manifest) -> None:
        """Read the same experts from another epoch of the store. Raises LoadError for others."""
        source, shares = self.cache.copier.source, self.cache.manifest.shares
        self.cache.use_source(source.at(manifest.part(shares)))

    def layer(self, layer: int) -> CachedExperts:
        return CachedExperts(self, layer)

    def look_ahead_by(self, layers: Sequence[RoutedLayer]) -> None:
        """Predict with the routers of these layers."""
        facts = self._config
        self.predictor = ExpertPredictor(
            layers, facts.num_experts, facts.num_experts_per_token, facts.rms_norm_eps
        )

    def look_ahead(self, layer: int, ids: Tensor, state: Callable[[], Tensor]) -> None:
        """Prefetch experts of the next layer, after the loads that `layer` waits for.

        A step with enough rows to need all experts streams whole layers (pooled rows do not count).
        For smaller steps the prefetch is a prediction, made only if `prefetch` is on and the host
        link is not saturated.
        """
        predictor = self.predictor
        if predictor is None:
            return
        following = predictor.next_of(layer)
        if predictor.needs_all_experts(len(ids) - self._num_pooled()):
            predictor.forget(layer, following)
            if following is not None:
                first = self._shift()
                self.cache.prefetch(following, range(first, first + predictor.num_experts))
            return
        if not self.prefetch and self._num_small_steps % COUNTED_STEPS > 1:
            predictor.forget_experts(layer)
            return
        predictor.observe(layer, ids)
        if following is None:
            return
        if not self.prefetch:  # only to know how right it would be
            predictor.predict_experts(state(), following)
            return
        if self.meter.is_saturated():
            self.num_withheld += 1
            return
        now, shift = state(), self._shift()
        if self._num_pooled() not in (0, len(ids)):  # for rows that need whole experts
            assert self.rows is not None and self.rows.pooled is not None
            self.cache.prefetch(
                following, predictor.predict_experts(now[~self.rows.pooled], following)
            )
            return
        experts = predictor.predict_experts(now, following)
        if shift:
            self.cache.prefetch(following, [expert + shift for expert in experts])
        elif self._num_pooled() and self.cache.pool is not None:
            foreseen = self._foreseen_neurons(now, following)
            wanted = [(expert, foreseen[expert]) for expert in experts if expert in foreseen]
            if self.rows is not None and self.rows.is_streamed:
                everything = np.arange(self.cache.manifest.inner)
                wanted += [(expert, everything) for expert in experts]
            self.cache.pool.prefetch(following, wanted)
        else:
            self.cache.prefetch(following, experts, self._foreseen_neurons(now, following))

    def observe_step(self, seconds: float, num_rows: int) -> None:
        """The model took `seconds` for a step of `num_rows` rows."""
        if self.predictor is None or self.predictor.needs_all_experts(num_rows):
            return
        self._num_small_steps += 1
        if self.trial is not None:
            self.trial.observe(seconds, num_rows)
            if self.on_prefetch is not None and self.prefetch != self.trial.is_on:
                self.on_prefetch(self.trial.is_on)
            self.prefetch = self.trial.is_on

    def _num_pooled(self) -> int:
        return 0 if self.rows is None or self.rows.pooled is None else int(self.rows.pooled.sum())

    def _shift(self) -> int:
        """The offset from an expert's id to its int8 copy's, if all rows of the step use copies."""
        if self.rows is None or self.rows.quantized is None or not bool(self.rows.quantized.all()):
            return 0
        return self.cache.manifest.num_experts

    def _foreseen_neurons(self, state: Tensor, layer: int) -> NeededRows:
        """The neurons that `layer` is likely to need of the predicted experts that are here; all,
        without a selector."""
        if self.selector is None or self.predictor is None:
            return {}
        return self.predictor.predict_neurons(state, layer, self.selector)

    def count_neurons(self, num_neurons: int, num_skipped: int) -> None:
        """Count for a step: neurons of the experts that sparse rows were routed to, and those left
        out."""
        self.num_sparse_neurons += num_neurons
        self.num_skipped_neurons += num_skipped

    def stats(self) -> ExpertStats:
        """A snapshot, from any thread; a step may be half-way."""
        cache, counts, link = self.cache, self.cache.counts, self.cache.copier.counts
        accuracy = {} if self.predictor is None else self.predictor.accuracy
        return ExpertStats(
            num_slots=cache.num_slots,
            num_experts=cache.manifest.num_all,
            slot_bytes=cache.layout.num_bytes,
            epoch=cache.manifest.epoch,
            num_hits=counts.num_hits,
            num_partial=counts.num_partial,
            num_misses=counts.num_misses,
            num_neurons_wanted=counts.num_rows_wanted,
            num_neurons_there=counts.num_rows_there,
            num_prefetched=counts.num_prefetched,
            num_prefetch_used=counts.num_prefetch_used,
            num_withheld=self.num_withheld,
            num_sparse_neurons=self.num_sparse_neurons,
            num_skipped_neurons=self.num_skipped_neurons,
            num_pooled_neurons=0 if cache.pool is None else cache.pool.num_places,
            pool_bytes=0 if cache.pool is None else cache.pool.rows.numel(),
            demand_bytes=link.demand_bytes,
            prefetch_bytes=link.prefetch_bytes,
            stall_s=counts.stall_s,
            link_busy_s=link.busy_s,
            num_corrupted=link.num_corrupted,
            by_layer=tuple(
                LayerAccuracy(
                    layer,
                    each.num_routed,
                    each.num_right,
                    each.num_repeated_routed,
                    each.num_repeated,
                    each.num_neurons,
                    each.num_neurons_right,
                )
                for layer, each in accuracy.items()
            ),
        )

    def hottest(self, at_most: int) -> list[tuple[int, int, int]]:
        """(layer, expert, steps that needed it), the most used first; from any thread."""
        uses = sorted(self.cache.counts.uses.copy().items(), key=lambda item: -item[1])
        return [(*key, count) for key, count in uses[:at_most]]

    def close(self) -> None:
        self.cache.close()


@dataclass(frozen=True, slots=True, eq=False)
class CachedExperts:
    """The experts of one layer, each in device memory while it is used."""

    routed: RoutedExperts
    layer: int

    def route(self, ids: Tensor, x: Tensor, state: Callable[[], Tensor]) -> LayerRouting:
        """The routing for `ids` int64 [T, k] of normed states `x` [T, hidden]; `state` returns the
        residual stream [T, hidden], including the part of this layer's output that is known."""
        routed, rows = self.routed, self.routed.rows
        if routed.watch is not None:
            routed.watch(self.layer, x, ids)
        facts = routed.cache.manifest
        if rows is not None and rows.pooled is not None:
            return self._route_pooled(ids, x, state, rows, rows.pooled)
        asked = ids
        if rows is not None and rows.quantized is not None:
            asked = ids + facts.num_experts * rows.quantized[:, None]

        def in_turn(needed: list[int]) -> Iterator[Visited]:
            return routed.cache.visit(
                self.layer, needed, lambda: routed.look_ahead(self.layer, ids, state)
            )

        return LayerRouting(asked, facts.num_known, in_turn)

    def _route_pooled(
        self, ids: Tensor, x: Tensor, state: Callable[[], Tensor], rows: StepRows, pooled: Tensor
    ) -> LayerRouting:
        """Some rows are `pooled` [T]: their neurons come from the pool; the other rows take whole
        experts from slots."""
        routed = self.routed
        cache, pool, selector = routed.cache, routed.cache.pool, routed.selector
        assert selector is not None and pool is not None, "pooled rows need thresholds and a pool"
        selected = select_neurons(selector, self.layer, ids, x, rows)
        parts = {expert: each.parts for expert, each in selected.items()}
        if routed.predictor is not None:
            for expert, (first_part, *_) in parts.items():
                routed.predictor.observe_neurons(self.layer, expert, first_part)
        first = cache.manifest.num_experts

        def in_turn(needed: list[int]) -> Iterator[Visited]:
            def ahead() -> None:
                routed.look_ahead(self.layer, ids, state)

            for expert, part, places in pool.visit(self.layer, parts, ahead):
                yield first + expert, selected[expert].pooled(part, places, pool)
            yield from cache.visit(self.layer, [each for each in needed if each < first])

        return LayerRouting(ids + first * pooled[:, None], 2 * first, in_turn)
