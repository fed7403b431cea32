"""Deferred commit: when a decoding sequence may continue without a block for its newest tokens.

Their K and V go to scratch blocks, which all layers share and which are valid for one step; the
tokens stay pending and are computed again with the next one. Ids of scratch blocks follow those of
the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from penstock.kernels.types import PagedKv
from penstock.workers.config import EngineConfig
from penstock.workers.memory.arena import BlockLayout
from penstock.workers.model_config import ModelConfig
from penstock.workers.planning.hardware import WEIGHT_FORMATS, device_named
from penstock.workers.planning.roofline import Roofline
from penstock.workers.scheduling.ridge import CommitRule, Decision, measure_ridge

log = logging.getLogger("penstock.engine")

RIDGE_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)  # rows whose step times are measured
MAX_DEFERRING = 8  # sequences that may defer as many tokens as allowed at the same time


class Rule(Protocol):
    """What a Deferral needs of `CommitRule`; tests have their own."""

    def decide(self, num_pending: int, *, num_scheduled: int) -> Decision: ...


@dataclass(frozen=True, slots=True)
class Deferral:
    """The settings of deferred commit. Mode `pressure`: only to avoid a preemption."""

    rule: Rule
    mode: str
    max_tokens: int  # most pending tokens of one sequence
    num_scratch_blocks: int

    def stored(
        self, *, length: int, fits: int, num_scheduled: int, num_at_stake: float
    ) -> int | None:
        """Of the `length` pending tokens of a sequence, how many are stored in this step.

        `fits` of them could be; `num_scheduled` rows of other sequences are in the same step. None:
        they cannot all be computed in this step, so a sequence with `num_at_stake` computed tokens
        is preempted.

        Beyond the ridge, continuing without a block costs time, but so does a preemption: the
        recomputation so far, m (m + 1) / 2 token-passes for m pending tokens, may grow up to what
        the preemption would compute again. So the total cost is at most twice that of the better
        choice (the ski-rental bound).
        """
        if self.mode == "always" and self._may_wait(length, num_scheduled):
            return 0
        if fits >= length:
            return length
        num_waiting = length - fits
        if self._may_wait(num_waiting, num_scheduled + fits):
            return fits
        passes = num_waiting * (num_waiting + 1) // 2
        if num_waiting > self.max_tokens or passes > num_at_stake:
            return None
        log.debug(
            "%d pending tokens stay uncommitted beyond the ridge: %d token-passes against a "
            "preemption of %d computed tokens",
            num_waiting,
            passes,
            num_at_stake,
        )
        return fits

    def _may_wait(self, num_pending: int, num_scheduled: int) -> bool:
        decision = self.rule.decide(num_pending, num_scheduled=num_scheduled)
        log.debug("%s", decision)
        return decision.stays and num_pending <= self.max_tokens


def most_pending(config: EngineConfig) -> int:
    """Most deferred tokens of one sequence: they and the new one must fit in one step."""
    return min(config.kv_defer_max_tokens, config.max_num_batched_tokens - 1)


def num_scratch_blocks(config: EngineConfig) -> int:
    """Enough for MAX_DEFERRING sequences at their limit: more would cost more than a preemption."""
    if config.kv_commit == "eager":
        return 0
    return MAX_DEFERRING * -(-most_pending(config) // config.block_size)


def deferral_of(config: EngineConfig, rule: Rule) -> Deferral:
    """As configured, where kv_commit is deferred."""
    return Deferral(rule, config.kv_defer_mode, most_pending(config), num_scratch_blocks(config))


def rule_of(
    config: EngineConfig,
    model: ModelConfig,
    run: Callable[[int], None],
    *,
    most_rows: int,
    is_cuda: bool,
    weights: str,
    layout: BlockLayout,
) -> CommitRule:
    """The rule with the configured ridge, or one measured by `run`, which computes `most_rows` rows
    at most; without a measurement, by the roofline of an assumed device. `weights`: their format;
    `layout`: of the KV blocks."""
    device = device_named("H200" if is_cuda else "cpu")
    kv = config.kv if config.kv != "auto" else "fp32" if model.dtype == "fp32" else "bf16"
    formula = Roofline(
        model,
        device,
        kv=kv,
        kv_group=layout.group or 0,
        weights=weights if weights in WEIGHT_FORMATS else "bf16",
    )
    ridge, compute_s = float(config.ridge_tokens or 0), formula.compute_s_per_token
    if config.ridge_tokens is None:
        sizes = [size for size in RIDGE_SIZES if size <= most_rows]
        measured = measure_ridge(run, sizes, fallback=formula.ridge_tokens)
        log.info("deferred commit: %s", measured)
        ridge = measured.ridge_tokens
        most = max(measured.seconds, default=1)
        if most > ridge:  # the time of a row beyond the ridge
            compute_s = (measured.seconds[most] - measured.seconds[1]) / (most - 1)
    return CommitRule(
        ridge,
        formula.read_s_per_token,
        max(compute_s, 1e-12),
        max_per_sequence=config.kv_defer_max_tokens,
    )


def scratch_bytes(config: EngineConfig, layout: BlockLayout) -> int:
    """Bytes of all scratch blocks. Each has one layer's size: all layers use the same memory."""
    return num_scratch_blocks(config) * _of_one_layer(layout).block_bytes


def scratch_views(config: EngineConfig, layout: BlockLayout, memory: torch.Tensor) -> PagedKv:
    """K and V of the scratch blocks, from the start of `memory`, uint8."""
    return _of_one_layer(layout).layer_views(memory, num_scratch_blocks(config))[0]


def _of_one_layer(layout: BlockLayout) -> BlockLayout:
    return replace(layout, num_layers=1)
