"""What `penstock bench ablate` does with its flags: models, load, table, JSON.

Ties the pieces together; measures nothing itself.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from penstock.deployments.bench import report
from penstock.deployments.bench.ablation import (
    Call,
    LoadTime,
    Part,
    Recipe,
    Run,
    ablate,
    parts_of,
    pool_gb,
)
from penstock.deployments.bench.load import WORDS, Job
from penstock.deployments.bench.open_loop import BenchCall
from penstock.deployments.bench.served_ablation import ServedRun, ablate_served
from penstock.deployments.cli.bench import compute_of, jobs_of, plain
from penstock.deployments.cli.tables import aligned
from penstock.workers.config import EngineConfig, WeightFormat
from penstock.workers.errors import ConfigError

LONGER = 4  # times the longest answer: what a client that does not know the length asks for


def run_ablate(args: argparse.Namespace) -> int:
    """`penstock bench ablate`; the exit status. Raises ConfigError, or LoadError."""
    from penstock.workers.engine.load import load_configured
    from penstock.workers.text.tokenizer import Tokenizer
    from penstock.workers.weights.hub import resolve_model

    jobs = jobs_of(args)
    device, threads = compute_of(args)
    folder = resolve_model(args.model_path)

    @functools.cache
    def model(weights: str) -> Any:
        formats = EngineConfig(weights=cast(WeightFormat, weights))  # which checks it
        return load_configured(formats, folder, device, progress=not args.no_progress)

    calls = _calls(jobs, args.seed, args.shared_prefix)
    longest = max(job.output_tokens for job in jobs)
    max_tokens = args.max_tokens or LONGER * longest
    if max_tokens < longest:
        raise ConfigError(f"--max-tokens {max_tokens} is below the longest answer, {longest}")
    config = EngineConfig(
        model=args.model_path,
        device=device,
        threads=threads,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_waiting=len(jobs),
    )
    share = args.pool_share
    config = replace(config, kv_cache_gb=pool_gb(model("auto"), config, calls, share))
    full = Recipe(weights=args.weights, kv=args.kv)
    parts = _chosen(parts_of(full), args.parts, is_served=args.served)
    if args.served:
        return _run_served(args, config, full, parts, jobs, Tokenizer.load(folder), max_tokens)
    num_runs = args.rounds * (1 + len(parts))
    runs: dict[str, list[Run]] = {}
    with tqdm(total=num_runs, unit="run", disable=args.no_progress or None) as bar:
        for name, run in ablate(
            model,
            Tokenizer.load(folder),
            config,
            calls,
            full=full,
            parts=parts,
            rounds=args.rounds,
            max_tokens=max_tokens,
        ):
            runs.setdefault(name, []).append(run)
            bar.update()
    print(table(parts, runs))
    if args.json is not None:
        content = {"args": plain(args), "threads": threads, "max_tokens": max_tokens}
        found = {name: [asdict(run) for run in each] for name, each in runs.items()}
        report.write_json(args.json, {**content, "runs": found})
    return 0


def _chosen(parts: Sequence[Part], keys: Sequence[str] | None, *, is_served: bool) -> list[Part]:
    """Those of `parts` that are asked for; None: all that can be left out. Raises ConfigError."""
    known = [part for part in parts if part.is_setting or not is_served]
    if keys is None:
        return known
    for key in keys:
        if key not in [part.key for part in known]:
            where = " of a server" if is_served else ""
            raise ConfigError(
                f"--parts {key}: no part{where} has that name; they are: "
                f"{', '.join(part.key for part in known)}"
            )
    return [part for part in known if part.key in keys]


def _run_served(
    args: argparse.Namespace,
    config: EngineConfig,
    full: Recipe,
    parts: Sequence[Part],
    jobs: Sequence[Job],
    tokenizer: Any,
    max_tokens: int,
) -> int:
    if Path(config.model).exists():  # servers run in folders of their own
        config = replace(config, model=str(Path(config.model).absolute()))

    def calls_of(number: int) -> list[BenchCall]:
        found = []
        for call in _calls(jobs, args.seed + 1000 * number, args.shared_prefix):
            wanted = call.job.output_tokens
            ids = tokenizer.encode(call.text)[: call.job.prompt_tokens]
            cut_at = wanted if wanted < max_tokens else None
            found.append(BenchCall(call.job, ids, max_tokens, cut_at))
        return found

    longest_prompt = max(job.prompt_tokens for job in jobs)
    pairs: dict[str, list[tuple[ServedRun, ServedRun]]] = {}
    num_pairs = args.rounds * len(parts)
    with tqdm(total=num_pairs, unit="pair", disable=args.no_progress or None) as bar:
        for name, whole, without in ablate_served(
            config,
            calls_of,
            full=full,
            parts=parts,
            rounds=args.rounds,
            longest_prompt=longest_prompt,
        ):
            pairs.setdefault(name, []).append((whole, without))
            bar.update()
    print(served_table(parts, pairs))
    if args.json is not None:
        content = {"args": plain(args), "threads": config.threads, "max_tokens": max_tokens}
        found = {name: [[asdict(run) for run in pair] for pair in p] for name, p in pairs.items()}
        report.write_json(args.json, {**content, "pairs": found})
    return 0


def served_table(
    parts: Sequence[Part], pairs: Mapping[str, Sequence[tuple[ServedRun, ServedRun]]]
) -> str:
    """As `table`: each part against the server with everything that took turns with it."""
    published = {part.name: part.published for part in parts}
    head = ["without", "tokens/s", "with all", "gain of the part", "gap p99 ms", "with all"]
    rows: list[Sequence[str]] = [[*head, "TTFT p50 ms", "with all", "published"]]
    for name, each in pairs.items():
        whole, without = zip(*each, strict=True)
        gain, low, high = gain_of(whole, without)
        figures = [
            f"{_median(runs, column):{form}}"
            for column, form in (
                *(("tokens_per_s", ".1f"), ("gap_p99_ms", ".0f"), ("ttft_p50_ms", ".0f")),
            )
            for runs in (without, whole)
        ]
        rate = f"{gain:+.0%} ({low:+.0%} to {high:+.0%})"
        rows.append((name, *figures[:2], rate, *figures[2:], published[name]))
    return "\n".join(aligned(rows))


def table(parts: Sequence[Part], runs: Mapping[str, Sequence[Run]]) -> str:
    """Lines for the terminal: medians, and the gain of each part, with the 95 % confidence
    interval of its mean over the rounds, next to the published gain."""
    published = {part.name: part.published for part in parts}
    rows = [
        (
            *("without", "tokens/s", "gain of the part", "gap p99 ms", "at once", "preempted"),
            *("steps", "published"),
        )
    ]
    for name, each in runs.items():
        rate = _median(each, "tokens_per_s")
        is_full = name == "everything"
        gain, low, high = gain_of(runs["everything"], each)
        rows.append(
            (
                "nothing" if is_full else name,
                f"{rate:.1f}",
                "" if is_full else f"{gain:+.0%} ({low:+.0%} to {high:+.0%})",
                f"{_median(each, 'gap_p99_ms'):.0f}",
                f"{_median(each, 'most_running'):.0f}",
                f"{_median(each, 'num_preemptions'):.0f}",
                f"{_median(each, 'num_steps'):.0f}",
                published.get(name, ""),
            )
        )
    return "\n".join(aligned(rows))


def gain_of(full: Sequence[LoadTime], without: Sequence[LoadTime]) -> tuple[float, float, float]:
    """How much faster `full` is than the runs `without` a part, as a share, and the bounds of the
    95 % confidence interval: of the mean logarithm of the rounds' ratios, by Student's t. The
    bounds are those of the rounds themselves where there are fewer than three."""
    logs = [math.log(a.tokens_per_s / b.tokens_per_s) for a, b in zip(full, without)]
    mean, bounds = statistics.fmean(logs), (min(logs), max(logs))
    if len(logs) > 2:
        half = t_975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        bounds = mean - half, mean + half
    gain, low, high = (math.expm1(each) for each in (mean, *bounds))
    return gain, low, high


def t_975(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, for 2 degrees of freedom or more: within 1 % by the
    expansion around the normal distribution (Abramowitz and Stegun 26.7.5)."""
    if freedom < 3:
        return 4.303
    z, n = statistics.NormalDist().inv_cdf(0.975), freedom
    terms = (
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
    )
    return z + sum(terms)


def _median(runs: Sequence[LoadTime], name: str) -> float:
    return statistics.median(getattr(run, name) for run in runs)


def _calls(jobs: Sequence[Job], seed: int, num_shared: int) -> list[Call]:
    """A text for each job, of at least as many tokens as its prompt wants; the first `num_shared`
    words are the same in all."""
    rng = np.random.default_rng((seed, 3))
    shared = rng.choice(WORDS, size=num_shared)

    def text(job: Job) -> str:
        return " ".join([*shared, *rng.choice(WORDS, size=job.prompt_tokens)])

    return [Call(text(job), job) for job in jobs]
