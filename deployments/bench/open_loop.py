"""`penstock bench serve`: sends a load to a server at the planned times, and watches the answers.

An open loop: a request goes out when its time has come, whether or not others were answered. Knows
nothing of protocols (bench_targets) or of how figures are shown (bench_report).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from penstock.deployments.bench.figures import Chunk, Outcome
from penstock.deployments.bench.load import Job, WordPrompts, words
from penstock.deployments.bench.targets import BenchPrompt, Target, TargetError, TargetModel
from penstock.workers.errors import ConfigError

CALIBRATION_WORDS = (16, 144)
UNSURE_TOKENS = 0.1  # of a prompt of words: how far its length may be from what was wanted


@dataclass(frozen=True, slots=True)
class BenchCall:
    """A request ready to send. `max_tokens` is sent; at `cut_at` received tokens the client closes
    the stream, without the server knowing that length in advance."""

    job: Job
    prompt: BenchPrompt
    max_tokens: int
    cut_at: int | None


@dataclass(slots=True)
class Progress:
    """Counts of a run in progress, for the progress bar."""

    num_sent: int = 0
    num_done: int = 0
    num_errors: int = 0
    num_chunks: int = 0


async def calibrate(target: Target, seed: int) -> WordPrompts:
    """How many tokens words make here, by two short requests, which also warm the server up."""
    rng = np.random.default_rng((seed, 3))
    seen = []
    for num_words in CALIBRATION_WORDS:
        tokens = None
        async with aclosing(target.answer(words(num_words, rng), 1)) as pieces:
            async for piece in pieces:
                tokens = piece.prompt_tokens if piece.prompt_tokens is not None else tokens
        if tokens is None:
            return WordPrompts()  # the server reports no usage: count a word as a token
        seen.append((num_words, tokens))
    return WordPrompts.calibrated(seen[0], seen[1])


def make_calls(
    jobs: Sequence[Job],
    make_prompt: Callable[[int, np.random.Generator], BenchPrompt],
    model: TargetModel,
    *,
    ending: str,
    max_tokens: int | None,
    is_exact: bool,
    seed: int,
) -> list[BenchCall]:
    """The calls for `jobs`. `ending` decides what ends an answer: "cut", the client at the
    wanted length; "known", the server, which receives that length; "free", the model.

    Otherwise all requests send the same limit, `max_tokens` or else the longest wanted answer; less
    where the prompt leaves less room. Raises ConfigError for jobs that do not fit the model's
    context.
    """
    rng = np.random.default_rng((seed, 2))
    limit = max_tokens or max(job.output_tokens for job in jobs)
    calls, num_too_long = [], 0
    for job in jobs:
        wanted = min(job.output_tokens, limit)
        room = _room(job, model, is_exact=is_exact)
        num_too_long += room < wanted
        sent = wanted if ending == "known" else min(limit, room)
        cut_at = wanted if ending == "cut" and wanted < sent else None
        calls.append(BenchCall(job, make_prompt(job.prompt_tokens, rng), int(sent), cut_at))
    if num_too_long:
        raise ConfigError(
            f"{num_too_long} of {len(jobs)} requests do not fit the {model.max_model_len} tokens "
            f"that {model.name!r} takes: clip them with --max-prompt-tokens and "
            "--max-output-tokens, or drop them with --skip-too-long"
        )
    return calls


def fitting(jobs: Sequence[Job], model: TargetModel, *, is_exact: bool) -> list[Job]:
    """The jobs that fit the model's context."""
    return [job for job in jobs if job.output_tokens <= _room(job, model, is_exact=is_exact)]


def _room(job: Job, model: TargetModel, *, is_exact: bool) -> float:
    """Tokens that an answer may have after the prompt of `job`."""
    if model.max_model_len is None:
        return math.inf
    unsure = 0 if is_exact else round(job.prompt_tokens * UNSURE_TOKENS) + 1
    return model.max_model_len - job.prompt_tokens - unsure


async def run_load(
    target: Target,
    calls: Sequence[BenchCall],
    *,
    max_concurrency: int | None = None,
    timeout_s: float | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Send every call at its time, and return what came of each, in the same order."""
    progress = progress or Progress()
    gate = asyncio.Semaphore(max_concurrency or len(calls) or 1)
    start_s = time.perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for call in calls:
            delay_s = start_s + call.job.at_s - time.perf_counter()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            due_s = start_s + call.job.at_s
            tasks.append(
                group.create_task(_run_one(target, call, due_s, gate, timeout_s, progress))
            )
    return [task.result() for task in tasks]


async def _run_one(
    target: Target,
    call: BenchCall,
    due_s: float,
    gate: asyncio.Semaphore,
    timeout_s: float | None,
    progress: Progress,
) -> Outcome:
    outcome = Outcome(call.job)
    ready_s = time.perf_counter()
    outcome.late_s = max(0.0, ready_s - due_s)
    async with gate:
        outcome.sent_s = time.perf_counter()
        outcome.held_s = outcome.sent_s - ready_s
        progress.num_sent += 1
        try:
            async with asyncio.timeout(timeout_s):
                await _watch(target, call, outcome, progress)
        except TargetError as error:
            outcome.error = error.kind
        except TimeoutError:
            outcome.error = "timeout"
        outcome.ended_s = time.perf_counter()
    progress.num_done += 1
    progress.num_errors += outcome.error is not None
    return outcome


async def _watch(target: Target, call: BenchCall, outcome: Outcome, progress: Progress) -> None:
    num_tokens = 0
    async with aclosing(target.answer(call.prompt, call.max_tokens)) as pieces:
        async for piece in pieces:
            now_s = time.perf_counter()
            if piece.num_chars or piece.num_tokens:
                outcome.chunks.append(Chunk(now_s, piece.num_chars, piece.num_tokens))
                num_tokens += 1 if piece.num_tokens is None else piece.num_tokens
                progress.num_chunks += 1
            if piece.prompt_tokens is not None:
                outcome.prompt_tokens = piece.prompt_tokens
                outcome.completion_tokens = piece.completion_tokens
                outcome.draft_tokens = piece.draft_tokens
                outcome.accepted_draft_tokens = piece.accepted_draft_tokens
            elif call.cut_at is not None and num_tokens >= call.cut_at:
                outcome.was_cut = True
                return
