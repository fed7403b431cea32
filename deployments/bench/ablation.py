"""`penstock bench ablate`: the server recipe, and what each of its parts brings.

The same load is served with all parts and with each one left out, in turns and in one process, on
the engine alone. Prompts are tokenized and answers detokenized, as in a server; served_ablation.py
does it through servers.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.deployments.bench.admission import Admission, Held, admission_of
from penstock.deployments.bench.load import Job
from penstock.workers.config import EngineConfig, KvFormat, WeightFormat
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.thread import EngineThread
from penstock.workers.errors import ConfigError
from penstock.workers.models.decoder import Decoder
from penstock.workers.request import Delta, Request, SamplingParams
from penstock.workers.text.detokenizer import Detokenizer
from penstock.workers.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which parts are on."""

    weights: WeightFormat = "int8"
    kv: KvFormat = "int8"
    merges: bool = True  # prompts and decodes share a step
    is_continuous: bool = True  # requests join and leave at any step
    is_pipelined: bool = True  # text is made in parallel with the steps
    is_chunked: bool = True  # a step takes a part of a long prompt
    plans_ahead: bool = True  # the next step is planned while one runs (async scheduling)
    samples_fast: bool = True  # without a sort; else plain PyTorch
    caches_prefixes: bool = True
    admission: str = "predicted"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the recipe: its names, the recipe without it, and what was published for it."""

    key: str  # on the command line
    name: str
    without: Recipe
    published: str
    is_setting: bool = True  # of `penstock serve`; else it can be left out in one process only


def parts_of(full: Recipe) -> list[Part]:
    """Each part of `full` left out. The published gains are those of the talk on PPL.LLM."""
    without = dataclasses.replace
    pipeline = "10-20 %, pipeline"
    return [
        Part("continuous", "continuous batching", without(full, is_continuous=False),
             "+100 %, with merge step", is_setting=False),
        Part("merge", "merge step", without(full, merges=False),
             "+100 %, with continuous batching"),
        Part("kv", f"KV {full.kv}", without(full, kv="auto"), "2x requests"),
        Part("weights", f"weights {full.weights}", without(full, weights="auto"), "about +100 %"),
        Part("text", "text beside the steps", without(full, is_pipelined=False), pipeline,
             is_setting=False),
        Part("async", "async scheduling", without(full, plans_ahead=False), pipeline),
        Part("chunked", "chunked prefill", without(full, is_chunked=False),
             "shorter gaps, no rate"),
        Part("sampling", "fast sampling", without(full, samples_fast=False), "about +10 %"),
        Part("prefix", "prefix cache", without(full, caches_prefixes=False), "none"),
        Part("admission", "predicted admission", without(full, admission="reserve_max"), "none"),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadTime:
    """How long one load took. `tokens_per_s` counts generated tokens up to the wanted lengths."""

    wall_s: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


@dataclass(frozen=True, slots=True)
class Run(LoadTime):
    """The result of one load."""

    most_running: int
    num_preemptions: int
    num_steps: int
    gap_p99_ms: float  # between the tokens of a request


@dataclass(frozen=True, slots=True)
class Call:
    """One request of the load: its prompt as text, and the job with its lengths."""

    text: str
    job: Job


class InlineEngine:
    """Runs the engine on the caller's thread, so that steps and text take turns."""

    def __init__(self, engine: Engine) -> None:
        self.submit, self.cancel, self.deltas = engine.add, engine.abort, engine.step

    def close(self) -> None:
        pass


class ThreadedEngine:
    """Runs the engine on its own thread, as workers do."""

    def __init__(self, engine: Engine) -> None:
        self._outbox: queue.SimpleQueue[list[Delta]] = queue.SimpleQueue()
        self._thread = EngineThread(engine, self._outbox.put)
        self.submit, self.cancel = self._thread.submit, self._thread.cancel
        self.deltas = self._outbox.get
        self._thread.start()

    def close(self) -> None:
        self._thread.stop()


@dataclass(slots=True)
class _Answer:
    """A running answer and its text."""

    held: Held
    detokenizer: Detokenizer
    num_tokens: int = 0
    last_s: float = 0.0  # when the newest token came
    text: list[str] = field(default_factory=list)


def serve_once(
    engine: Engine, tokenizer: Tokenizer, calls: Sequence[Call], recipe: Recipe, max_tokens: int
) -> Run:
    """Serve all `calls`, submitted at once. Each request has the limit `max_tokens`, as from a
    client that does not know the length, and is cancelled at the length that its job wants."""
    driver = ThreadedEngine(engine) if recipe.is_pipelined else InlineEngine(engine)
    rule = admission_of(recipe.admission, engine, max_tokens)
    before = engine.stats()
    gaps: list[float] = []
    began_s = time.perf_counter()
    try:
        most_running = _serve(driver, rule, tokenizer, calls, recipe, max_tokens, gaps)
    finally:
        driver.close()
    wall_s, after = time.perf_counter() - began_s, engine.stats()
    return Run(
        wall_s,
        sum(call.job.output_tokens for call in calls),
        most_running,
        after.num_preemptions - before.num_preemptions,
        after.num_steps - before.num_steps,
        1e3 * float(np.quantile(gaps, 0.99)) if gaps else 0.0,
    )


def _serve(
    driver: Any,
    rule: Admission,
    tokenizer: Tokenizer,
    calls: Sequence[Call],
    recipe: Recipe,
    max_tokens: int,
    gaps: list[float],
) -> int:
    """Run until every call has its tokens; the maximum number of concurrent answers. Seconds
    between the tokens of each are added to `gaps`."""
    wanted = {f"ablate-{i}": call for i, call in enumerate(calls)}
    prompts: dict[str, list[int]] = {}
    for request_id, call in wanted.items():
        prompts[request_id] = tokenizer.encode(call.text)[: call.job.prompt_tokens]
        rule.offer(Held(request_id, len(prompts[request_id])))
    answers: dict[str, _Answer] = {}
    most = num_done = 0
    while num_done < len(wanted):
        if recipe.is_continuous or not answers:
            for held in rule.take():
                answers[held.request_id] = _Answer(held, tokenizer.detokenizer())
                params = SamplingParams(
                    temperature=1.0, top_p=0.9, top_k=50, seed=len(answers),
                    max_tokens=max_tokens, ignore_eos=True,
                )  # fmt: skip
                driver.submit(Request(held.request_id, tuple(prompts[held.request_id]), params))
        most = max(most, len(answers))
        for delta in driver.deltas():
            answer = answers.get(delta.request_id)
            if answer is None:  # sampled by a step in flight when the request was cancelled
                continue
            if delta.error is not None:
                raise RuntimeError(f"{delta.request_id}: {delta.error_message or delta.error}")
            now_s = time.perf_counter()
            if answer.num_tokens and delta.token_ids:
                gaps.append(now_s - answer.last_s)
            answer.last_s = now_s
            answer.num_tokens += len(delta.token_ids)
            answer.text.append(answer.detokenizer.feed(delta.token_ids))
            rule.progressed(delta.request_id, answer.num_tokens)
            target = wanted[delta.request_id].job.output_tokens
            if answer.num_tokens >= target or delta.finish_reason is not None:
                if delta.finish_reason is None:
                    driver.cancel(delta.request_id)
                del answers[delta.request_id]
                rule.ended(delta.request_id, answer.num_tokens)
                num_done += 1
    return most


def engine_for(model: Decoder, config: EngineConfig, recipe: Recipe, longest_prompt: int) -> Engine:
    """A new engine with those parts of `recipe` that are engine settings."""
    return Engine(config_of(config, recipe, longest_prompt), model)


def config_of(config: EngineConfig, recipe: Recipe, longest_prompt: int) -> EngineConfig:
    """`config` with those parts of `recipe` that are engine settings."""
    step_tokens = config.max_num_batched_tokens
    if not recipe.is_chunked:  # room for a whole prompt beside all that decode
        step_tokens = max(step_tokens, longest_prompt + config.max_num_seqs)
    return dataclasses.replace(
        config,
        weights=recipe.weights,
        kv=recipe.kv,
        merge_steps=recipe.merges,
        fast_sampling=recipe.samples_fast,
        max_num_batched_tokens=step_tokens,
        async_scheduling="on" if recipe.plans_ahead else "off",
        prefix_cache=recipe.caches_prefixes,
    )


def pool_gb(model: Decoder, config: EngineConfig, calls: Sequence[Call], share: float) -> float:
    """GiB of a pool that holds `share` of all tokens of `calls` in the model's own KV format."""
    probe = Engine(dataclasses.replace(config, kv="auto", num_blocks=1, kv_cache_gb=None), model)
    tokens = sum(call.job.prompt_tokens + call.job.output_tokens for call in calls)
    blocks = max(1, round(share * tokens / config.block_size))
    num_bytes = probe.arena.reserve_bytes + blocks * probe.arena.layout.block_bytes
    probe.close()
    return num_bytes / 2**30


def ablate(
    models: Callable[[str], Decoder],
    tokenizer: Tokenizer,
    config: EngineConfig,
    calls: Sequence[Call],
    *,
    full: Recipe,
    parts: Sequence[Part],
    rounds: int,
    max_tokens: int,
) -> Iterator[tuple[str, Run]]:
    """(name, run) of the full recipe ("everything") and without each of `parts`, `rounds` times.

    `models(weights)`: the model in a number format. Every second round runs in reverse
    order, so that a machine that slows down favours no recipe.
    """
    rows = [("everything", full), *((part.name, part.without) for part in parts)]
    longest_prompt = max(call.job.prompt_tokens for call in calls)
    longest = longest_prompt + max_tokens
    for number in range(rounds):
        for name, recipe in rows if number % 2 == 0 else reversed(rows):
            engine = engine_for(models(recipe.weights), config, recipe, longest_prompt)
            if engine.max_model_len < longest:
                raise ConfigError(
                    f"the KV pool or the model takes {engine.max_model_len} tokens, and a request "
                    f"of this load may need {longest}: raise --pool-share or lower --max-tokens"
                )
            yield name, serve_once(engine, tokenizer, calls, recipe, max_tokens)
            engine.close()
