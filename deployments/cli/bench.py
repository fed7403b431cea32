"""`penstock bench serve` and `bench offline`: from flags to a load, its run, and the report.

Load, targets, figures and report are in deployments/bench/.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import time
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from penstock.deployments.bench import open_loop, report
from penstock.deployments.bench.figures import Outcome, Slo, figures_of
from penstock.deployments.bench.load import Job, Lengths, make_jobs, read_trace
from penstock.deployments.bench.targets import Target, TargetError, target_of
from penstock.deployments.cli.flags.bench import LEAST_VOCABULARY
from penstock.deployments.client.tls import ClientTls
from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError
from penstock.workers.option_groups.device import Device

PROGRESS_S = 0.25
DEFAULT_NUM_REQUESTS = 100


def run_serve(args: argparse.Namespace, api_key: str | None, tls: ClientTls | None = None) -> int:
    """`penstock bench serve`; the exit status. Raises ConfigError, or RuntimeError."""
    if args.chat and args.prompts == "ids":
        raise ConfigError("--prompts ids works with completions only; drop it, or --chat")
    _extra_body(args)
    report.check_plot(args.plot)
    jobs = jobs_of(args)
    began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    try:
        model, outcomes = asyncio.run(_serve_jobs(args, jobs, api_key, tls))
    except TargetError as error:
        raise RuntimeError(f"{args.url}: {error}") from None
    figures = figures_of(outcomes, Slo(args.slo_ttft_ms, args.slo_tpot_ms))
    print(report.table(figures))
    if args.json is not None:
        content = {"began": began, "model": model, "args": plain(args), "figures": figures}
        rows = report.request_rows(outcomes)
        report.write_json(args.json, {**content, "requests": rows})
    if args.plot is not None:
        report.plot(args.plot, outcomes, f"{model} at {args.url}")
    return 1 if figures["num_completed"] == 0 else 0


async def _serve_jobs(
    args: argparse.Namespace, jobs: list[Job], api_key: str | None, tls: ClientTls | None
) -> tuple[str, list[Outcome]]:
    """The model's name, and the outcome of each request."""
    ignore_eos = not args.until_eos if args.ignore_eos is None else args.ignore_eos
    target = target_of(
        args.url,
        model=args.model,
        api_key=api_key,
        is_chat=args.chat,
        sampling={"temperature": args.temperature} | ({"ignore_eos": True} if ignore_eos else {}),
        extra_body=_extra_body(args),
        tls=tls,
    )
    try:
        model = await target.model()
        is_exact = args.prompts == "ids"
        if args.skip_too_long:
            jobs = open_loop.fitting(jobs, model, is_exact=is_exact)
        if not jobs:
            raise ConfigError("no request is left to send")
        calls = open_loop.make_calls(
            jobs,
            await _prompt_maker(args, target, model.vocab_size),
            model,
            ending="known" if args.max_tokens_from_trace else "free" if args.until_eos else "cut",
            max_tokens=args.max_tokens,
            is_exact=is_exact,
            seed=args.seed,
        )
        return model.name, await _run_calls(args, target, calls)
    finally:
        await target.close()


async def _run_calls(
    args: argparse.Namespace, target: Target, calls: list[open_loop.BenchCall]
) -> list[Outcome]:
    progress = open_loop.Progress()
    showing = asyncio.ensure_future(_show(progress, len(calls), hidden=args.no_progress))
    try:
        return await open_loop.run_load(
            target,
            calls,
            max_concurrency=args.max_concurrency,
            timeout_s=args.timeout_s,
            progress=progress,
        )
    finally:
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing


async def _prompt_maker(args: argparse.Namespace, target: Target, vocab_size: int | None) -> Any:
    if args.prompts == "words":
        return (await open_loop.calibrate(target, args.seed)).make
    limit = args.vocab_size or vocab_size or LEAST_VOCABULARY
    return lambda num_tokens, rng: [int(n) for n in rng.integers(limit, size=num_tokens)]


async def _show(progress: open_loop.Progress, total: int, *, hidden: bool) -> None:
    """Draw the bar a few times a second; once per chunk would cost the client CPU time."""
    with tqdm(total=total, unit="req", disable=hidden or None, dynamic_ncols=True) as bar:
        try:
            while True:
                await asyncio.sleep(PROGRESS_S)
                _draw(bar, progress)
        finally:
            _draw(bar, progress)


def _draw(bar: Any, progress: open_loop.Progress) -> None:
    under_way = progress.num_sent - progress.num_done
    bar.set_postfix(
        under_way=under_way,
        chunks=progress.num_chunks,
        errors=progress.num_errors,
        refresh=False,
    )
    bar.n = progress.num_done
    bar.refresh()


def run_offline(args: argparse.Namespace) -> int:
    """`penstock bench offline`; the exit status. Raises ConfigError, or LoadError."""
    from penstock.deployments.bench.offline import drain_all
    from penstock.workers.engine.draft import load_draft
    from penstock.workers.engine.engine import Engine
    from penstock.workers.engine.load import load_configured
    from penstock.workers.weights.hub import resolve_model

    jobs = jobs_of(args)
    device, threads = compute_of(args)
    config = EngineConfig(
        model=args.model_path,
        weights=args.weights,
        device=device,
        threads=threads,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_gb=args.kv_cache_gb,
        speculate=args.speculate,
        draft_model=args.draft_model,
        max_waiting=max(len(jobs), 1),
        prefix_cache=False,  # random prompts share no prefix
    )
    folder = resolve_model(args.model_path)
    model = load_configured(config, folder, device, progress=not args.no_progress)
    engine = Engine(config, model, draft=load_draft(config, folder, device, model))
    limit = engine.max_model_len
    too_long = [job for job in jobs if job.prompt_tokens + job.output_tokens > limit]
    if too_long and not args.skip_too_long:
        raise ConfigError(
            f"{len(too_long)} of {len(jobs)} requests do not fit the {limit} tokens that this "
            "model takes: clip them with --max-prompt-tokens and --max-output-tokens, or leave "
            "them out with --skip-too-long"
        )
    jobs = [job for job in jobs if job.prompt_tokens + job.output_tokens <= limit]
    if not jobs:
        raise ConfigError("no request is left to serve")
    total = sum(job.output_tokens for job in jobs)
    with tqdm(total=total, unit="tok", disable=args.no_progress or None) as bar:
        outcomes, figures = drain_all(engine, jobs, seed=args.seed, on_step=bar.update)
    print(report.table(figures))
    if args.json is not None:
        content = {"args": plain(args), "threads": threads, "figures": figures}
        rows = report.request_rows(outcomes)
        report.write_json(args.json, {**content, "requests": rows})
    return 0


def compute_of(args: argparse.Namespace) -> tuple[Device, int]:
    """The device and CPU threads that the flags name, or the machine has; sets torch's threads."""
    import torch  # takes seconds, and `serve` does without

    from penstock.workers.engine.load import device_of

    threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return device_of(args.device), threads


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """The load that the flags describe, clipped as they say."""
    duration_s = getattr(args, "duration", None)
    arrivals = getattr(args, "arrivals", "at-once")
    num_requests = args.num_requests
    if num_requests is None and (duration_s is None or arrivals == "at-once"):
        num_requests = DEFAULT_NUM_REQUESTS
    jobs = make_jobs(
        arrivals=arrivals,
        rate=getattr(args, "rate", 1.0),
        cv=getattr(args, "cv", 1.0),
        speed=getattr(args, "speed", 1.0),
        prompt=Lengths.parse(args.input_len),
        output=Lengths.parse(args.output_len),
        trace=None if args.trace is None else read_trace(args.trace),
        num_requests=num_requests,
        duration_s=duration_s,
        seed=args.seed,
    )
    most_prompt = args.max_prompt_tokens or math.inf
    most_output = args.max_output_tokens or math.inf
    return [
        replace(
            job,
            prompt_tokens=int(min(job.prompt_tokens, most_prompt)),
            output_tokens=int(min(job.output_tokens, most_output)),
        )
        for job in jobs
    ]


def _extra_body(args: argparse.Namespace) -> dict[str, Any]:
    if args.extra_body is None:
        return {}
    try:
        body = json.loads(args.extra_body)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError("--extra-body must be a JSON object")
    return body


def plain(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name != "run"}
