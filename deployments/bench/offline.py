"""`penstock bench offline`: the engine alone, in this process. No Ray, no network, no text.

All requests are submitted at the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.deployments.bench.figures import Chunk, Outcome, Slo, figures_of, spread_of
from penstock.deployments.bench.load import Job
from penstock.workers.engine.engine import Engine
from penstock.workers.request import Request, SamplingParams

WARM_UP = (Job(0.0, 40, 4), Job(0.0, 40, 4))


def drain_all(
    engine: Engine, jobs: Sequence[Job], *, seed: int, on_step: Callable[[int], object]
) -> tuple[list[Outcome], dict[str, Any]]:
    """Serve all `jobs` greedily, and give what came of each, and the figures. The end-of-sequence
    token is ignored. `on_step` gets the number of tokens of each step. Raises RequestError."""
    rng = np.random.default_rng((seed, 2))
    _drain(engine, WARM_UP, rng, lambda _: None)
    outcomes, steps = _drain(engine, jobs, rng, on_step)
    figures = figures_of(outcomes, Slo())
    prefill = [step_s for step_s, has_prefill in steps if has_prefill]
    decode = [step_s for step_s, has_prefill in steps if not has_prefill]
    figures["num_steps"] = len(steps)
    figures["step_ms"] = spread_of([step_s for step_s, _ in steps], 1e3)
    figures["step_prefill_ms"] = spread_of(prefill, 1e3)
    figures["step_decode_ms"] = spread_of(decode, 1e3)
    figures["num_preemptions"] = engine.stats().num_preemptions
    for name in ("client_late_ms", "client_held_ms", "token_counts"):
        del figures[name]  # there is no client here
    return outcomes, figures


def _drain(
    engine: Engine,
    jobs: Sequence[Job],
    rng: np.random.Generator,
    on_step: Callable[[int], object],
) -> tuple[list[Outcome], list[tuple[float, bool]]]:
    """What came of each job, and of each step its seconds and whether it computed prompts."""
    vocab_size = engine.model.config.vocab_size
    outcomes = {}
    for i, job in enumerate(jobs):
        prompt = tuple(int(n) for n in rng.integers(vocab_size, size=job.prompt_tokens))
        params = SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True)
        engine.add(Request(f"bench-{i}", prompt, params))
        outcomes[f"bench-{i}"] = Outcome(job, prompt_tokens=len(prompt))
    start_s = time.perf_counter()
    for outcome in outcomes.values():
        outcome.sent_s = start_s
    steps = []
    num_prompt = engine.stats().num_prompt_tokens
    while engine.has_work():
        before_s = time.perf_counter()
        deltas = engine.step()
        now_s = time.perf_counter()
        num_prompt_now = engine.stats().num_prompt_tokens
        steps.append((now_s - before_s, num_prompt_now > num_prompt))
        num_prompt = num_prompt_now
        for delta in deltas:
            outcome = outcomes[delta.request_id]
            outcome.chunks.append(Chunk(now_s, 0, len(delta.token_ids)))
            outcome.draft_tokens = delta.num_draft_tokens
            outcome.accepted_draft_tokens = delta.num_accepted_tokens
            if delta.finish_reason is not None:
                outcome.ended_s = now_s
                outcome.error = delta.error
        on_step(sum(len(delta.token_ids) for delta in deltas))
    return list(outcomes.values()), steps
