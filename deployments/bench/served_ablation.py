"""`penstock bench ablate --served`: what each part of the server recipe brings, through servers.

A `penstock serve` with all parts runs throughout; beside it, one after another, a server without
each part that is a setting. Both get the same load over HTTP in turns, streamed, and idle while it
is the other's turn. No prompt is sent twice, or the prefix cache would know it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.deployments.bench.ablation import LoadTime, Part, Recipe, config_of
from penstock.deployments.bench.figures import Slo, figures_of
from penstock.deployments.bench.open_loop import BenchCall, run_load
from penstock.deployments.bench.own_server import Server, started
from penstock.deployments.bench.targets import target_of
from penstock.workers.config import EngineConfig

SAMPLING = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "ignore_eos": True}
MakeCalls = Callable[[int], list[BenchCall]]  # those of a round: other texts, the same lengths


@dataclass(frozen=True, slots=True)
class ServedRun(LoadTime):
    """The result of one load."""

    ttft_p50_ms: float
    gap_p99_ms: float  # between the tokens of a request


def ablate_served(
    config: EngineConfig,
    calls_of: MakeCalls,
    *,
    full: Recipe,
    parts: Sequence[Part],
    rounds: int,
    longest_prompt: int,
) -> Iterator[tuple[str, ServedRun, ServedRun]]:
    """(name, run with everything, run without that part), `rounds` times for each of `parts`, which
    are settings. Every second round runs in reverse order. Raises RuntimeError where a server does
    not start, or fails a request."""

    def serve(recipe: Recipe) -> list[str]:
        return flags_of(config_of(config, recipe, longest_prompt), recipe)

    number = 0
    with started(config.model, serve(full)) as whole:
        _warm_up(whole, calls_of)
        for part in parts:
            with started(config.model, serve(part.without)) as without:
                _warm_up(without, calls_of)
                for _ in range(rounds):
                    number += 1
                    servers = [whole, without] if number % 2 else [without, whole]
                    runs = {each.pid: serve_once(each, calls_of(number)) for each in servers}
                    yield part.name, runs[whole.pid], runs[without.pid]


def flags_of(config: EngineConfig, recipe: Recipe) -> list[str]:
    """Those of a `penstock serve` that has `config`, and the admission of `recipe`."""
    flags = {
        "weights": config.weights,
        "kv": config.kv,
        "kv-cache-gb": config.kv_cache_gb,
        "max-num-seqs": config.max_num_seqs,
        "max-num-batched-tokens": config.max_num_batched_tokens,
        "async-scheduling": config.async_scheduling,
        "device": config.device,
        "threads": config.threads,
        "admission": recipe.admission,
    }
    switches = {
        "merge-steps": config.merge_steps,
        "fast-sampling": config.fast_sampling,
        "prefix-cache": config.prefix_cache,
    }
    found = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return found + [f"--{'' if is_on else 'no-'}{name}" for name, is_on in switches.items()]


def serve_once(server: Server, calls: Sequence[BenchCall]) -> ServedRun:
    """Send all `calls` at once; each is cut at the length that its job wants."""
    return asyncio.run(_serve_once(server, calls))


async def _serve_once(server: Server, calls: Sequence[BenchCall]) -> ServedRun:
    url = f"http://127.0.0.1:{server.ports[0]}"
    fields = {**SAMPLING, "return_token_ids": True}
    target = target_of(url, model=None, api_key=None, is_chat=False, sampling=fields, extra_body={})
    try:
        await target.model()
        outcomes = await run_load(target, calls)
    finally:
        await target.close()
    figures = figures_of(outcomes, Slo())
    if figures["errors"]:
        raise RuntimeError(f"requests failed: {figures['errors']}; the server printed:\n"
                           f"{server.output()}")  # fmt: skip
    gaps = figures["itl_ms"]
    return ServedRun(
        figures["wall_s"],
        sum(call.job.output_tokens for call in calls),
        figures["ttft_ms"]["p50"],
        0.0 if gaps is None else gaps["p99"],
    )


def _warm_up(server: Server, calls_of: MakeCalls) -> None:
    """A third of a load that is not measured: memory is touched, and the gate learns."""
    calls = calls_of(0)
    serve_once(server, calls[: max(1, len(calls) // 3)])
