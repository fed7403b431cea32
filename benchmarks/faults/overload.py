"""Ten times the load that a live cluster can carry: memory, health, goodput, and the time after it.

    python -m benchmarks.faults.overload --json out.json

1. The sustainable rate: as many callers as the workers have places, one request after the other.
2. `--calm-s` of half that rate, open loop: what TTFT, health latency and RSS are in peace.
3. `--overload-s` of `--factor` times the rate, open loop: clients do not wait for each other.
4. `--after-s` of half the rate again, at once: how long refusals and slow first tokens go on.

Goodput is whole answers a second of those whose TTFT was within `--slo-ttft-s`. Recovery is the
time from the end of the overload until the last request was sent that was refused, failed, or had a
first token later than twice the p99 of peace. Health is asked by a process of its own over kept
connections. The clients run on the machine that they load, over loopback, with precedence on the
CPUs (as root) and at most `--max-connections`; a request takes at most `--timeout-s`. Where answers
are short, clients and refusals take the CPU that the workers need: hence `--output-len`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import record
from benchmarks.common.priority import precedence
from benchmarks.faults import figures
from benchmarks.faults.cluster import ClusterSetup, LiveCluster, live_cluster
from benchmarks.faults.watch import Probe, Sampler, cores_used, health_probe, largest
from penstock.deployments.bench.figures import Outcome
from penstock.deployments.bench.load import Job
from penstock.deployments.bench.open_loop import BenchCall, run_load
from penstock.deployments.bench.targets import Target, target_of

PLACES = 16  # of a worker: its max_num_seqs
VOCABULARY = 1000
SETTLED_S = 5.0
METRICS_PORT = "metrics port "
PHASES = ("calm", "overload", "after")


@dataclass(frozen=True)
class Phase:
    """One part of the run: from `began_s` to `ended_s` requests were sent, at `rate` a second."""

    name: str
    rate: float
    began_s: float
    ended_s: float
    outcomes: Sequence[Outcome]


def arrivals(rate: float, seconds: float, rng: np.random.Generator) -> list[float]:
    """Times of a Poisson process, in seconds from the beginning of the phase."""
    times = np.cumsum(rng.exponential(1.0 / rate, size=int(2 * rate * seconds) + 100))
    return [float(each) for each in times[times < seconds]]


def is_good(outcome: Outcome, slo_ttft_s: float) -> bool:
    return outcome.error is None and bool(outcome.chunks) and outcome.ttft_s <= slo_ttft_s


def recovery_s(outcomes: Sequence[Outcome], ended_s: float, limit_s: float) -> float | None:
    """From `ended_s` until the last request was sent that failed, or had to wait beyond the limit.

    0.0: there was none. None: the last request of all was one, so it took longer than was measured.
    """
    bad = [each.sent_s for each in outcomes if not is_good(each, limit_s)]
    if not bad:
        return 0.0
    return None if max(bad) == max(each.sent_s for each in outcomes) else max(bad) - ended_s


def about(phase: Phase, slo_ttft_s: float) -> dict[str, Any]:
    """The figures of a phase. Goodput counts answers that ended within it."""
    good = [each for each in phase.outcomes if is_good(each, slo_ttft_s)]
    seconds = phase.ended_s - phase.began_s
    in_time = [each for each in good if each.ended_s <= phase.ended_s]
    refused = [each for each in phase.outcomes if (each.error or "").startswith(("429", "503"))]
    return {
        "offered a second": round(len(phase.outcomes) / seconds, 2),
        "sent": len(phase.outcomes),
        "goodput a second": round(len(in_time) / seconds, 2),
        "TTFT of whole answers s": figures.summary(
            [each.ttft_s for each in phase.outcomes if each.error is None and each.chunks]
        ),
        "a refusal took s": figures.summary([each.e2e_s for each in refused]),
        "ends": dict(Counter(each.error or "whole" for each in phase.outcomes)),
        "held back by the client": sum(each.held_s > 0.1 for each in phase.outcomes),
        "client late s": figures.summary([each.late_s for each in phase.outcomes]),
    }


def health(probes: Sequence[Probe], phase: Phase) -> dict[str, Any]:
    """By path: milliseconds, and statuses."""
    found = {}
    for path in dict.fromkeys(each.path for each in probes):
        mine = [
            each
            for each in probes
            if each.path == path and phase.began_s <= each.at_s < phase.ended_s
        ]
        took_ms = figures.summary([1e3 * each.took_s for each in mine], 1)
        found[path] = {"ms": took_ms, "statuses": dict(Counter(each.status for each in mine))}
    return found


async def sustainable(target: Target, args: argparse.Namespace) -> float:
    """Answers a second of a closed loop that keeps all places of all workers busy."""
    rng = np.random.default_rng(1)
    num_whole, began_s = 0, time.perf_counter()
    until_s = began_s + args.measure_s

    async def work() -> None:
        nonlocal num_whole
        while time.perf_counter() < until_s:
            call = _call(0.0, args, rng)
            (outcome,) = await run_load(target, [call], timeout_s=args.timeout_s)
            num_whole += outcome.error is None and time.perf_counter() <= until_s

    await asyncio.gather(*(work() for _ in range(PLACES * args.workers)))
    return num_whole / args.measure_s


def _call(at_s: float, args: argparse.Namespace, rng: np.random.Generator) -> BenchCall:
    ids = [int(n) for n in rng.integers(VOCABULARY, size=args.input_len)]
    return BenchCall(Job(at_s, args.input_len, args.output_len), ids, args.output_len, None)


async def load(cluster: LiveCluster, args: argparse.Namespace) -> tuple[float, list[Phase]]:
    target = target_of(
        cluster.http_url,
        model=cluster.setup.model,
        api_key=None,
        is_chat=False,
        sampling={"temperature": 0.0, "ignore_eos": True},
        extra_body={},
    )
    rate = await sustainable(target, args)
    print(f"sustainable: {rate:.2f} answers a second", flush=True)
    if rate == 0.0:
        raise RuntimeError("no answer ended while the sustainable rate was measured")
    await asyncio.sleep(SETTLED_S)
    rng, phases, running = np.random.default_rng(2), [], []
    factors, lengths = (0.5, args.factor, 0.5), (args.calm_s, args.overload_s, args.after_s)
    for name, factor, seconds in zip(PHASES, factors, lengths):
        calls = [_call(at_s, args, rng) for at_s in arrivals(factor * rate, seconds, rng)]
        began_s = time.perf_counter()
        # Not awaited: requests of the overload still run when the phase after it begins.
        task = asyncio.ensure_future(
            run_load(target, calls, max_concurrency=args.max_connections, timeout_s=args.timeout_s)
        )
        await asyncio.sleep(seconds)
        running.append((name, factor * rate, began_s, time.perf_counter(), task))
        print(f"{name}: {len(calls)} requests sent", flush=True)
    for name, offered, began_s, ended_s, task in running:
        phases.append(Phase(name, offered, began_s, ended_s, await task))
    await target.close()
    return rate, phases


def run(cluster: LiveCluster, args: argparse.Namespace) -> dict[str, Any]:
    with (
        Sampler(cluster, 2.0, with_blocks=False) as sampler,
        health_probe(
            {"": cluster.ports["http"], METRICS_PORT: cluster.ports["metrics"]}, 0.1
        ) as probes,
    ):
        rate, phases = asyncio.run(load(cluster, args))
    calm, overload, after = phases
    # The parts of a run by one clock: on Linux perf_counter and monotonic are the same.
    samples = {
        phase.name: [s for s in sampler.samples if phase.began_s <= s.at_s < phase.ended_s]
        for phase in phases
    }
    memory = {name: largest(each, "rss_mib") for name, each in samples.items()}
    calm_ttft = [each.ttft_s for each in calm.outcomes if each.error is None and each.chunks]
    limit_s = 2.0 * (figures.quantile(calm_ttft, 0.99) or args.slo_ttft_s)
    during = about(overload, args.slo_ttft_s)
    recovered_s = recovery_s(after.outcomes, overload.ended_s, limit_s)
    return {
        "sustainable answers a second": round(rate, 2),
        "goodput under overload, share of it": round(during["goodput a second"] / rate, 3),
        "recovery s": None if recovered_s is None else round(recovered_s, 1),
        "recovered: TTFT within s": round(limit_s, 3),
        "loads": {each.name: about(each, args.slo_ttft_s) for each in phases},
        "health": {each.name: health(probes, each) for each in phases},
        "largest RSS by role MiB": memory,
        "cores used by role": {name: cores_used(each) for name, each in samples.items()},
        "blocks held at the end": cluster.held_blocks(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--factor", type=float, default=10.0, help="times the sustainable rate")
    parser.add_argument("--measure-s", type=float, default=30.0)
    parser.add_argument("--calm-s", type=float, default=30.0)
    parser.add_argument("--overload-s", type=float, default=60.0)
    parser.add_argument("--after-s", type=float, default=60.0)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of a request")
    parser.add_argument("--slo-ttft-s", type=float, default=10.0)
    parser.add_argument("--longest-wait-s", type=float, help="the server's setting; none: unset")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--max-connections", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ingresses", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    flags: tuple[str, ...] = ()
    if args.longest_wait_s is not None:
        flags = ("--longest-wait-s", str(args.longest_wait_s))
    setup = ClusterSetup(num_workers=args.workers, num_ingress=args.ingresses, flags=flags)
    with live_cluster(setup) as cluster, precedence():
        results = run(cluster, args)
    for name, value in results.items():
        print(f"{name}: {value}")
    if args.json:
        record.write(args.json, __file__, results, threads=1)


if __name__ == "__main__":
    main()
