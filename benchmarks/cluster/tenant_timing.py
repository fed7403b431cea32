"""Can a tenant tell by time what another tenant has sent? A statistical test on a live cluster.

    python -m benchmarks.cluster.tenant_timing --json out.json

Each trial draws a prompt. The victim sends it; then the observer, who has another API key, sends
that prompt and a new one, in random order, and measures the time to the first token of both. The
same is done with an observer who has the victim's own key: there the prefix cache has to show, or
the test has no power (the control). The probability that a random pair is ordered one way (AUC:
Mann-Whitney's U over the number of pairs) is 0.5 if the times have the same distribution. The run
passes if the whole 95 % interval of the other tenant's AUC is within [0.45, 0.55], that of the
control is beyond 0.95, and the other tenant's `cached_tokens` are 0 for all prompts.
`--streams`: streams of a third tenant that run meanwhile.

After "Auditing Prompt Caching in Language Model APIs" (arXiv 2502.07776), which tests providers so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.common import record
from benchmarks.common.priority import precedence
from benchmarks.faults import figures
from benchmarks.faults.cluster import ClusterSetup, live_cluster, write_keys
from penstock.deployments.client import AsyncClient

BETWEEN, POWER = (0.45, 0.55), 0.95
Z = 1.959964  # of a two-sided interval of 95 %
WARM_UP = 20  # trials that do not count
OBSERVERS = ("another tenant", "the same tenant")


@dataclass
class Times:
    """Seconds to the first token, of prompts that the victim had sent and of new ones."""

    sent: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    cached_tokens: Counter[str] = field(default_factory=Counter)


def area(times: Times) -> tuple[float, float, float]:
    """P(a sent prompt is faster than a new one), and its 95 % interval (Hanley and McNeil 1982)."""
    n, m = len(times.sent), len(times.new)
    auc = float(stats.mannwhitneyu(times.new, times.sent).statistic) / (n * m)
    q1, q2 = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    variance = auc * (1 - auc) + (n - 1) * (q1 - auc * auc) + (m - 1) * (q2 - auc * auc)
    half = Z * math.sqrt(max(variance, 0.0) / (n * m))
    return auc, auc - half, auc + half


async def first_token(client: AsyncClient, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds, and the cached tokens of its usage."""
    began_s = time.perf_counter()
    answer = await client.complete(list(prompt), max_tokens=1, temperature=0.0)
    assert answer.usage is not None
    return time.perf_counter() - began_s, answer.usage.cached_tokens


async def trial(victim: AsyncClient, observer: AsyncClient, times: Times, args: Any) -> None:
    rng: np.random.Generator = args.rng
    sent, new = rng.integers(3, 1500, size=(2, args.prompt_len)).tolist()
    await first_token(victim, sent)
    await asyncio.sleep(args.pause_s)
    probes = [(sent, times.sent, "sent"), (new, times.new, "new")]
    for place in rng.permutation(2):
        prompt, found, name = probes[place]
        took_s, cached = await first_token(observer, prompt)
        found.append(took_s)
        times.cached_tokens[f"{name}: {cached}"] += 1
        await asyncio.sleep(args.pause_s)


async def measure(target: str, keys: Sequence[str], args: Any) -> dict[str, Times]:
    async with contextlib.AsyncExitStack() as stack:
        victim, other, third = [
            await stack.enter_async_context(AsyncClient(target, api_key=key)) for key in keys
        ]

        async def stream(number: int) -> None:
            while True:
                await third.complete([5 + number] * 8, max_tokens=300, ignore_eos=True)

        streams = [asyncio.ensure_future(stream(number)) for number in range(args.streams)]
        found: dict[str, Times] = {}
        for number in range(-WARM_UP, args.trials):
            if number == 0 or not found:
                found = {name: Times() for name in OBSERVERS}
            for name, observer in zip(OBSERVERS, (other, victim), strict=True):
                await trial(victim, observer, found[name], args)
            if number % 100 == 0:
                print(f"trial {number} of {args.trials}", flush=True)
        for each in streams:
            each.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return found


def about(times: Times) -> dict[str, Any]:
    auc, low, high = area(times)
    return {
        "AUC": round(auc, 4),
        "95 % interval": [round(low, 4), round(high, 4)],
        "Kolmogorov-Smirnov p": round(float(stats.ks_2samp(times.sent, times.new).pvalue), 4),
        "sent prompts ms": figures.summary([1e3 * each for each in times.sent], 3),
        "new prompts ms": figures.summary([1e3 * each for each in times.new], 3),
        "cached tokens": dict(times.cached_tokens),
    }


def has_passed(found: dict[str, Times]) -> bool:
    other, own = (found[name] for name in OBSERVERS)
    _, low, high = area(other)
    tells_nothing = BETWEEN[0] <= low and high <= BETWEEN[1]
    is_uncached = set(other.cached_tokens) == {"sent: 0", "new: 0"}
    return tells_nothing and is_uncached and area(own)[1] > POWER


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--prompt-len", type=int, default=768, help="tokens: 48 blocks of 16")
    parser.add_argument("--pause-s", type=float, default=0.005, help="between two calls")
    parser.add_argument("--streams", type=int, default=0, help="of a third tenant, meanwhile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    args.rng = np.random.default_rng(args.seed)
    keys = [secrets.token_urlsafe(32) for _ in range(3)]
    with tempfile.TemporaryDirectory(prefix="pst-") as folder:
        flags = write_keys(Path(folder), keys)
        setup = ClusterSetup(num_workers=1, num_ingress=1, state="none", flags=flags, key=keys[0])
        with live_cluster(setup) as cluster, precedence():
            found = asyncio.run(measure(cluster.grpc_target, keys, args))
    results = {"passed": has_passed(found), **{name: about(each) for name, each in found.items()}}
    for name, value in results.items():
        print(f"{name}: {value}")
    if args.json:
        record.write(args.json, __file__, results, threads=1)


if __name__ == "__main__":
    main()
