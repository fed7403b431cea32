"""The way through the cluster at several commits in turn: time to first token, tokens/s, CPU.

A `penstock serve` of each commit runs all the time, and the client of this commit calls them one
after the other, so that what is compared lies seconds apart on a machine whose speed drifts; the
order changes from round to round. Reported are the medians of the rounds' ratios to the first one.
With a tiny model, where the way costs most.

    git worktree add --detach ../old COMMIT
    python -m benchmarks.cluster.two_commits old=../old/src new=src --rounds 9

A commit from before `src/penstock/` needs a folder with a folder `penstock` of links in its place.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.overhead import Meter, make_calls
from benchmarks.common import record
from benchmarks.common.server_process import served
from penstock.deployments.bench.figures import Outcome, Slo, figures_of
from penstock.deployments.bench.open_loop import BenchCall, run_load
from penstock.deployments.bench.targets import Target, target_of

FIGURES = ("ttft_ms", "tokens_per_s", "ingress_cpu_ms", "engine_cpu_ms")
PROMPT, ANSWER = 32, 64  # tokens


class Served:
    """The server of one commit: a target for each path, and its processes. Made on the loop."""

    def __init__(self, urls: dict[str, str], pids: list[int]):
        sampling = {"temperature": 0.0, "ignore_eos": True}
        self.pids = pids
        self.targets: dict[str, Target] = {
            path: target_of(
                url, model=None, api_key=None, is_chat=False, sampling=sampling, extra_body={}
            )
            for path, url in urls.items()
        }


def calls(num: int, rng: np.random.Generator) -> list[BenchCall]:
    return make_calls([(PROMPT, ANSWER)] * num, rng)


async def one_round(
    served_by: dict[str, Served], number: int, args: argparse.Namespace, rng: np.random.Generator
) -> dict[str, dict[str, Any]]:
    """Each commit's figures by path: one at a time, then with many under way."""
    names = list(served_by)
    first = number % len(names)
    names = names[first:] + names[:first]
    rows: dict[str, dict[str, Any]] = {name: {} for name in names}
    for path in served_by[names[0]].targets:
        ttfts: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(args.num_single):
            for name in names:
                done = await run_load(served_by[name].targets[path], calls(1, rng))
                ttfts[name].append((done[0].chunks[0].at_s - done[0].sent_s) * 1e3)
        for name in names:
            one = served_by[name]
            meter = Meter(one.pids)
            many = calls(args.num_many, rng)
            done = await run_load(one.targets[path], many, max_concurrency=args.concurrency)
            rows[name][path] = {
                "ttft_ms": statistics.median(ttfts[name]),
                **_figures(done, meter),
            }
    return rows


def _figures(done: list[Outcome], meter: Meter) -> dict[str, float]:
    figures, wanted = figures_of(done, Slo()), len(done) * ANSWER
    assert not figures["errors"], figures["errors"]
    assert figures["output_tokens"] == wanted, (figures["output_tokens"], wanted)
    _, _, ingress_s, engine_s = meter.used()
    return {
        "tokens_per_s": figures["output_tokens_per_s"],
        "ingress_cpu_ms": ingress_s * 1e3 / wanted,
        "engine_cpu_ms": engine_s * 1e3 / wanted,
    }


async def measure(
    servers: dict[str, tuple[dict[str, str], list[int]]], args: argparse.Namespace
) -> list[dict[str, dict[str, Any]]]:
    """The rounds, but for the first one, which warms up."""
    served_by = {name: Served(*each) for name, each in servers.items()}
    rng = np.random.default_rng(0)
    targets = [each for one in served_by.values() for each in one.targets.values()]
    for target in targets:
        await target.model()
    rounds = []
    for number in range(args.rounds + 1):
        rounds.append(await one_round(served_by, number, args, rng))
        print(f"round {number} of {args.rounds}", flush=True)
    for target in targets:
        await target.close()
    return rounds[1:]


def table(rounds: list[dict[str, dict[str, Any]]], names: list[str]) -> str:
    """Markdown: of each commit and path the medians, and the medians of the rounds' ratios."""
    lines = ["| commit | path | " + " | ".join(FIGURES) + " |", "|" + " --- |" * 6]
    for path in rounds[0][names[0]]:
        for name in names:
            cells = []
            for figure in FIGURES:
                values = [each[name][path][figure] for each in rounds]
                base = [each[names[0]][path][figure] for each in rounds]
                ratio = statistics.median(v / b for v, b in zip(values, base, strict=True))
                cells.append(f"{statistics.median(values):.4g} ({ratio:.3f})")
            lines.append(f"| {name} | {path} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commits", nargs="+", metavar="NAME=FOLDER", help="the first is the base")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-single", type=int, default=10, help="of a round, one at a time")
    parser.add_argument("--num-many", type=int, default=192, help="of a round, many under way")
    parser.add_argument("--rounds", type=int, default=9, help="after one that warms up")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    servers = {}
    with contextlib.ExitStack() as stack:
        for each in args.commits:
            name, _, folder = each.partition("=")
            flags = ["--threads", str(args.threads)]
            servers[name] = stack.enter_context(served(args.model, flags, Path(folder)))
        rounds = asyncio.run(measure(servers, args))
    print(table(rounds, list(servers)))
    if args.json:
        commits = dict(each.partition("=")[::2] for each in args.commits)
        names = {name: record.commit(Path(folder)) or name for name, folder in commits.items()}
        content = {"commits": names, "rounds": rounds}
        record.write(args.json, __file__, content, threads=args.threads)


if __name__ == "__main__":
    main()
