"""A soak: half of the load that a live cluster can carry, with kills, and whether anything grows.

    python -m benchmarks.faults.soak --minutes 60 --json out.json

Each 10 s it samples RSS, descriptors and threads of every process, live KV blocks and /dev/shm, and
fits lines. A process that is killed takes its memory with it, so a line through a role's samples
would be flat however much each process grows. "Flat" therefore means two things, each with a 95 %
interval:

- growth while a process lives: one common slope for all processes of a role, each with a level of
  its own and counted from the age of `--warm-up-s` on, since a process grows while its caches and
  its allocator fill;
- growth from process to process: each process's value at that same age, over the time of the run:
  a replacement that begins larger than the one before shows a leak outside of it (in the registry,
  the journal, /dev/shm, or descriptors that are inherited).

Processes that are not killed (serve, gcs, raylet, registry, redis) have the first kind only. The
interval counts neighbouring samples for less than independent ones; with an age of minutes it still
calls a curve that flattens "growth", so look at the rate, too. Blocks and /dev/shm belong to no
process; blocks rise and fall with the load, and must be 0 when it has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.common import record
from benchmarks.faults import figures
from benchmarks.faults.callers import Seen, callers_of
from benchmarks.faults.cluster import ClusterSetup, LiveCluster, live_cluster
from benchmarks.faults.cluster_kills import CLUSTER_MODEL, EXPERT_CACHE_GB, Killer, failed, settled
from benchmarks.faults.watch import CLUSTER, Sampler

OF_PROCESSES = ("rss_mib", "descriptors", "threads")
OF_CLUSTER = ("live_blocks", "shm_mib", "shm_files")


async def soak(cluster: LiveCluster, options: argparse.Namespace) -> dict[str, Any]:
    async with callers_of(cluster, options.calls) as callers:
        await callers.learn(options.callers)
        began_s, warm = time.monotonic(), Seen()
        stopping = asyncio.Event()
        working = [
            asyncio.ensure_future(callers.call_until(stopping, 1000 + seed, warm))
            for seed in range(options.callers)
        ]
        await asyncio.sleep(options.measure_s)
        rate = len(warm.finished_s) / (time.monotonic() - began_s)  # answers a second, closed loop
        stopping.set()
        await asyncio.gather(*working)
        print(f"{rate:.2f} calls a second with {options.callers} callers; now half", flush=True)
        killer = Killer(
            cluster,
            tuple(options.targets.split(",")),
            10**6,
            60.0 * options.minutes,
            options.every_s,
            options.stop_share,
            options.seed,
        )
        seen, stopping, began_s = Seen(), asyncio.Event(), time.monotonic()
        every_s = options.callers / (rate / 2)  # of one caller
        with Sampler(cluster, options.sample_s) as sampler:
            working = [
                asyncio.ensure_future(callers.call_until(stopping, seed, seen, every_s=every_s))
                for seed in range(options.callers)
            ]
            try:
                await killer.run()
            finally:
                stopping.set()
                await asyncio.gather(*working)
        seconds = time.monotonic() - began_s
        held = await asyncio.to_thread(settled, killer)
        await callers.check_unseeded(seen, options.callers)
    quiet = figures.gaps(heard.arrivals for heard in callers.undisturbed)
    least_s = figures.quantile(quiet, 0.999) or 0.0
    pauses = figures.pauses(seen.arrivals, killer.faults, least_s)
    return {
        "seconds": round(seconds, 1),
        "calls a second, closed loop": round(rate, 3),
        "calls a second, in the soak": round(seen.num_calls / seconds, 3),
        "kills by role": dict(killer.by_role()),
        **seen.results(),
        "blocks held at the end": held,
        "did not come back": killer.stuck,
        "pauses s, by role": {role: figures.summary(each) for role, each in pauses.items()},
        "samples": len(sampler.samples),
        "slopes": slopes(sampler.samples, options.warm_up_s),
    }


def slopes(samples: list[figures.Sample], warm_up_s: float) -> list[dict[str, Any]]:
    """A row for each role and figure: its median, and both kinds of growth in units an hour."""
    rows = []
    for role in sorted({sample.role for sample in samples}):
        for name in OF_CLUSTER if role == CLUSTER else OF_PROCESSES:
            alive, renewed = figures.growth(samples, role, name, warm_up_s=warm_up_s)
            mine = {s.pid for s in samples if s.role == role and s.age_s >= warm_up_s}
            rows.append(
                {
                    "role": role,
                    "figure": name,
                    "processes": len(mine),
                    "median": figures.level(samples, role, name),
                    "while it lives": None if alive is None else alive.as_dict(),
                    "from process to process": None if renewed is None else renewed.as_dict(),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    head = "| role | figure | processes | median | while it lives, an hour | from one to the next |"
    lines = [head, "|" + " --- |" * 6]
    for row in rows:
        shown = [_shown(row[name]) for name in ("while it lives", "from process to process")]
        median = "-" if row["median"] is None else f"{row['median']:.1f}"
        cells = [row["role"], row["figure"], str(row["processes"]), median, *shown]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(slope: dict[str, Any] | None) -> str:
    if slope is None:
        return "-"
    flat = "" if slope["is_flat"] else " *"
    return f"{slope['per_hour']:+.2f} ({slope['low']:+.2f} to {slope['high']:+.2f}){flat}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every-s", type=float, default=30.0, help="mean time between kills")
    parser.add_argument("--targets", default="worker,ingress,gate,expert-store")
    parser.add_argument("--stop-share", type=float, default=0.02, help="stopped before the kill")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--calls", type=int, default=66, help="different calls")
    parser.add_argument("--measure-s", type=float, default=60.0, help="closed loop before the soak")
    parser.add_argument("--sample-s", type=float, default=10.0)
    parser.add_argument(
        "--warm-up-s", type=float, default=60.0, help="age of a process that counts"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the schedule of kills")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    has_store = "expert-store" in options.targets
    setup = ClusterSetup(
        model=CLUSTER_MODEL if has_store else "builtin",
        num_workers=options.workers,
        expert_cache_gb=EXPERT_CACHE_GB if has_store else None,
    )
    with live_cluster(setup) as cluster:
        results = asyncio.run(soak(cluster, options))
    for name, value in results.items():
        if name != "slopes":
            print(f"{name}: {value}")
    print(table(results["slopes"]))
    if options.json:
        record.write(options.json, __file__, results, threads=1)
    if failed(results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
