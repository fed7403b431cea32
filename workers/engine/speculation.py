"""Sets up speculation for one engine: whether it can be had, its proposer, and what rows cost."""

from __future__ import annotations

import logging
import time
from statistics import median

from penstock.kernels import text_match
from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError, InvariantError
from penstock.workers.execution.draft_model import DraftModel
from penstock.workers.execution.draft_progress import DraftProgress
from penstock.workers.execution.executor import Executor
from penstock.workers.models.decoder import Decoder
from penstock.workers.scheduling.drafting import Drafting
from penstock.workers.scheduling.kv_cache import KVCache
from penstock.workers.scheduling.ridge import measure_ridge
from penstock.workers.speculation.draft import DraftSteps, Proposer, Widths
from penstock.workers.speculation.draft_steps import MeasuredSteps
from penstock.workers.speculation.proposers import Lookup, Suffix
from penstock.workers.speculation.widths import MeasuredWidths, StepCosts

log = logging.getLogger("penstock.engine")

ROWS = (2, 4, 8, 16, 32)  # whose step times are measured
MEASURE_S = 0.8  # at the start, at most
LONG_KEYS = 1024  # that each of a few rows sees, to measure what a key costs
LONG_ROWS = 4
LONG_ROUNDS = 3
# Where there was no time to measure: of int8 and bf16 weights on a CPU, T(rows) / T(1).
ASSUMED = {1: 1.0, 4: 1.3, 8: 1.8, 16: 2.8}


def unsupported_reason(model: Decoder) -> str | None:
    """Why drafts cannot be verified with `model`, or proposed, or None."""
    if model.has_expert_caches:
        return "its experts come out of a cache (expert_cache_gb), and rejected rows would evict"
    if model.whole_config.has_states:
        return "its linear attention has a state, which rejected tokens would have changed"
    if not model.generates:
        return "this checkpoint generates no text"
    if not text_match.is_available():
        return "the native CPU library, which searches the text, could not be built: install g++"
    return None


def draft_problem(model: Decoder, draft: Decoder) -> str | None:
    """Why `draft` cannot propose tokens of `model`, or None."""
    if draft.routed is not None or draft.config.has_states or not draft.generates:
        return f"as a draft model: {unsupported_reason(draft)}"
    theirs, ours = draft.config.vocab_size, model.config.vocab_size
    if theirs != ours:
        return (
            f"the draft model has {theirs} tokens and the model {ours}: it must be of the same "
            "family, with the same vocabulary"
        )
    return None


def proposer_of(config: EngineConfig, model: Decoder) -> Proposer | None:
    """The configured one. Raises ConfigError where it is asked for and cannot be had."""
    if config.speculate == "off" or (config.speculate == "auto" and model.device.type != "cpu"):
        return None
    problem = unsupported_reason(model)
    if problem is None:
        return Lookup() if config.speculate == "lookup" else Suffix()
    if config.speculate != "auto":
        raise ConfigError(f"speculate {config.speculate} is not possible: {problem}; leave it out")
    return None


def widths_of(executor: Executor, max_model_len: int) -> Widths:
    """By the time that rows take, which is measured now."""
    most = executor.memory.logits.shape[0]
    measured = measure_ridge(
        executor.run_rows, [rows for rows in ROWS if rows <= most], fallback=1, limit_s=MEASURE_S
    )
    if len(measured.seconds) < 2:
        log.info("speculation: steps took too long to be measured; usual costs are assumed")
        return MeasuredWidths(StepCosts(ASSUMED))
    keys = min(LONG_KEYS, max_model_len)
    seconds = measured.seconds
    if LONG_ROWS in seconds and keys > 1:
        long_s = median(_timed(executor, keys) for _ in range(LONG_ROUNDS))
        key_s = max(0.0, long_s - seconds[LONG_ROWS]) / (LONG_ROWS * (keys - 1))
    else:
        key_s = 0.0
    log.info("speculation: %s; %.2f microseconds for 1,000 keys of a row", measured, key_s * 1e9)
    return MeasuredWidths(StepCosts(seconds, key_s))


def _timed(executor: Executor, num_keys: int, num_rows: int = LONG_ROWS) -> float:
    began_s = time.perf_counter()
    executor.run_rows(num_rows, num_keys)
    return time.perf_counter() - began_s


def drafting_of(
    config: EngineConfig,
    model: Decoder,
    cache: KVCache,
    executor: Executor,
    max_model_len: int,
    given: tuple[Proposer, Widths] | None,
    draft: Executor | None = None,
    draft_steps: DraftSteps | None = None,
) -> Drafting | None:
    """None: no drafts. `given`, `draft_steps`: instead of what `config` says. `draft`: of the draft
    model."""
    if given is None:
        proposer = proposer_of(config, model)
        widths = None if proposer is None else widths_of(executor, max_model_len)
    else:
        proposer, widths = given
    if proposer is None or widths is None:
        return None
    if draft is None and config.speculate == "draft":
        raise InvariantError("speculate draft without a draft model: engine/draft.py loads it")
    if draft is not None and draft_steps is None:
        draft_steps = steps_of(draft, widths)
    drafts = None
    if draft is not None and draft_steps is not None:
        progress = None if config.draft_model is None else DraftProgress(config.block_size)
        drafts = DraftModel(draft, draft_steps, progress)
    return Drafting(
        cache,
        proposer,
        widths,
        vocab_size=model.config.vocab_size,
        max_tokens=config.speculate_tokens,
        max_rows=executor.memory.logits.shape[0],
        max_num_batched_tokens=config.max_num_batched_tokens,
        free_rows=executor.memory.free_rows,
        model=drafts,
    )


def steps_of(draft: Executor, widths: Widths) -> DraftSteps:
    """By the time that rows of the draft model take, which is measured now."""
    assert isinstance(widths, MeasuredWidths), "others come with steps of their own"
    most = draft.memory.logits.shape[0]
    measured = measure_ridge(
        draft.run_rows, [rows for rows in ROWS if rows <= most], fallback=1, limit_s=MEASURE_S
    )
    log.info("speculation: the draft model: %s", measured)
    if len(measured.seconds) < 2:
        one_s = _timed(draft, 1, num_rows=1)
        return MeasuredSteps(widths, StepCosts({n: one_s * x for n, x in ASSUMED.items()}))
    return MeasuredSteps(widths, StepCosts(measured.seconds, widths.costs.key_s))
