"""Deferred commit: when a decoding sequence may continue without a block for its newest tokens.

Their K and V go to scratch blocks, which all layers share and which are valid for one step; the
tokens stay pending and are computed again with the next one. Ids of scratch blocks follow those of
the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from penstock.kernels.types import PagedKv
from penstock.workers.config import EngineConfig
from penstock.workers.memory.arena import BlockLayout
from penstock.workers.model_config import ModelConfig
from penstock.workers.planning.hardware import WEIGHT_FORMATS, device_like, device_named
from penstock.workers.planning.roofline import Roofline
from penstock.workers.scheduling.commit_rule import BRANCHES, CommitRule, Decision
from penstock.workers.scheduling.ridge import measure_ridge

log = logging.getLogger("penstock.engine")

RIDGE_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)  # rows whose step times are measured
MAX_DEFERRING = 8  # sequences that may defer as many tokens as allowed at the same time


class Rule(Protocol):
    """What a Deferral needs of `CommitRule`; tests have their own."""

    @property
    def ridge_tokens(self) -> float: ...
    @property
    def read_s_per_token(self) -> float: ...
    @property
    def compute_s_per_token(self) -> float: ...
    def always(self, num_pending: int, *, num_scheduled: int, num_cached: int) -> Decision: ...
    def instead(
        self,
        num_pending: int,
        *,
        num_scheduled: int,
        num_steps: float,
        spent_s: float,
        restore_s: float,
    ) -> Decision: ...
    def with_costs(self, read_s_per_token: float, compute_s_per_token: float) -> Rule: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many of a sequence's pending tokens are stored in this step, and the decision behind it.

    `num_stored` None: it has no block for them, and may not go on without. `decision` None: there
    was nothing to decide.
    """

    num_stored: int | None
    decision: Decision | None = None


@dataclass(slots=True)
class DecisionCounts:
    """Decisions since the start by branch, and the seconds that were compared."""

    by_branch: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BRANCHES, 0))
    compute_s: float = 0.0  # td, summed
    load_s: float = 0.0  # tl, summed

    def count(self, decision: Decision) -> None:
        self.by_branch[decision.branch] += 1
        self.compute_s += decision.compute_s
        self.load_s += decision.load_s


@dataclass(slots=True)
class Deferral:
    """The settings of deferred commit. Mode `pressure`: only to avoid a preemption."""

    rule: Rule
    mode: str
    max_tokens: int  # most pending tokens of one sequence
    num_scratch_blocks: int
    counts: DecisionCounts = field(default_factory=DecisionCounts)
    spent_s: float = 0.0  # by repetition since blocks ran out
    _foreseen_s: float = 0.0  # to be spent after this step by those that go on without a block
    _is_pressed: bool = False  # a sequence has gone on without a block in this step

    def begin_step(self) -> None:
        """Once no sequence lacks a block, what was spent is forgotten."""
        if not self._is_pressed:
            self.spent_s = 0.0
        self._is_pressed = False
        self._foreseen_s = 0.0

    def preempted(self) -> None:
        """A sequence was preempted: its blocks are a new beginning."""
        self.spent_s = self._foreseen_s = 0.0

    def stored(
        self,
        *,
        length: int,
        fits: int,
        num_scheduled: int,
        num_cached: int,
        num_steps: float,
        restore_s: Callable[[], float],
    ) -> Verdict:
        """Of the `length` pending tokens of a sequence, how many are stored in this step.

        `fits` of them could be; `num_scheduled` rows of other sequences are in the same step, which
        reads `num_cached` tokens. `num_steps`: until a sequence ends, as of late. `restore_s`:
        seconds to bring back the sequence that would be preempted. None: they cannot all be
        computed in this step, so a sequence is preempted.
        """
        decision = None
        if self.mode == "always":
            decision = self._decided(
                self.rule.always(length, num_scheduled=num_scheduled, num_cached=num_cached)
            )
            if decision.stays:
                return Verdict(0, decision)
        if fits >= length:
            return Verdict(length, decision)
        known_s = self.spent_s + self._foreseen_s
        decision = self._decided(
            self.rule.instead(
                length - fits,
                num_scheduled=num_scheduled + fits,
                num_steps=num_steps,
                spent_s=known_s,
                restore_s=restore_s(),
            )
        )
        if decision.stays:
            self._is_pressed = True
            self.spent_s += decision.step_s
            self._foreseen_s += decision.compute_s - known_s - decision.step_s
        return Verdict(fits if decision.stays else None, decision)

    def _decided(self, decision: Decision) -> Decision:
        if decision.num_pending > self.max_tokens:
            decision = replace(decision, branch="limit")
        self.counts.count(decision)
        log.debug("%s", decision)
        return decision

    def renew(self, read_s_per_token: float, compute_s_per_token: float) -> None:
        """Decide by these times from now on: the step model has learnt them from what ran."""
        self.rule = self.rule.with_costs(read_s_per_token, compute_s_per_token)


def most_pending(config: EngineConfig) -> int:
    """Most deferred tokens of one sequence: they and the new one must fit in one step."""
    return min(config.kv_defer_max_tokens, config.max_num_batched_tokens - 1)


def num_scratch_blocks(config: EngineConfig) -> int:
    """Enough for MAX_DEFERRING sequences at their limit: more would cost more than a preemption."""
    if config.kv_commit == "eager":
        return 0
    return MAX_DEFERRING * -(-most_pending(config) // config.block_size)


def deferral_of(config: EngineConfig, rule: Rule) -> Deferral:
    """As configured, where kv_commit is not eager."""
    mode = config.kv_defer_mode if config.kv_commit == "deferred" else "pressure"
    return Deferral(rule, mode, most_pending(config), num_scratch_blocks(config))


def rule_of(
    config: EngineConfig,
    model: ModelConfig,
    run: Callable[[int], None],
    *,
    most_rows: int,
    device: str | None,
    weights: str,
    layout: BlockLayout,
) -> CommitRule:
    """The rule with the configured ridge, or one measured by `run`, which computes `most_rows` rows
    at most; without a measurement, by the roofline of the device. `device`: the name of a graphics
    card; None: a CPU. `weights`: their format; `layout`: of the KV blocks.

    With kv_commit auto a CPU is not measured: each row takes time there, and a second at each start
    is worth more than the few that do not.
    """
    kv = config.kv if config.kv != "auto" else "fp32" if model.dtype == "fp32" else "bf16"
    formula = Roofline(
        model,
        device_named("cpu") if device is None else device_like(device),
        kv=kv,
        kv_group=layout.group or 0,
        weights=weights if weights in WEIGHT_FORMATS else "bf16",
    )
    ridge, compute_s = float(config.ridge_tokens or 0), formula.compute_s_per_token
    if config.ridge_tokens is None and config.kv_commit == "auto" and device is None:
        ridge = 1.0
    elif config.ridge_tokens is None:
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
