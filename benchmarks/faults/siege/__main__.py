"""A million hostile requests beside honest streams, on a live cluster: who is hurt by them?

    python -m benchmarks.faults.siege --json out.json

1. `--calm-s` of `--streams` honest streams alone.
2. The same streams, with hostile clients until they have sent `--requests`: wrong keys, bad and
   mutated bodies, heads and messages, gzip bombs, slow heads and bodies, streams that nobody reads,
   rapid resets; beside them, `--silent` connections that say nothing, which count as no request.
   They are held to `--rate` requests a second together, since they share the machine with the
   server; a faster flood is a matter of the network before it.
3. A calm after it: what is left of connections, blocks, memory.

The run passes if every process is the one that it was, no honest answer differs, no hostile request
hangs or is answered 500, and no block is held at the end. Printed besides: p50 and p99 between two
tokens of the honest streams, alone and besieged; memory of each process over time, and its growth
in the second half of the siege. Hostile clients run at `--hostile-nice`, honest
ones at -10 (as root): on one machine they would else measure each other.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import secrets
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import record
from benchmarks.common.priority import precedence
from benchmarks.faults import figures
from benchmarks.faults.cluster import ClusterSetup, LiveCluster, live_cluster, write_keys
from benchmarks.faults.siege.besiegers import SILENT, Counts, Plan, besieging, num_requests
from benchmarks.faults.siege.honest import Record, Streams
from benchmarks.faults.watch import CLUSTER, Sampler, cores_used, largest

SETTLE_S = 75.0  # after the siege: idle and half-sent connections time out
SHOWN_S = 30.0  # memory in the results: one sample in that time
BAD_OUTCOMES = ("HANGS", "500", "501", "502", "504", "UNKNOWN", "INTERNAL", "DEADLINE_EXCEEDED")


async def load(
    cluster: LiveCluster, key: str, args: argparse.Namespace
) -> tuple[Record, Record, Counts]:
    """The honest streams alone, then besieged; and what the hostile clients counted."""
    streams = Streams(cluster.http_url, cluster.grpc_target, key)
    await streams.learn()
    tasks = [asyncio.ensure_future(streams.run(number)) for number in range(args.streams)]
    await asyncio.sleep(5.0)
    calm = streams.record = Record()
    await asyncio.sleep(args.calm_s)
    counts: Counts = Counter()
    ports = cluster.ports
    plan = Plan(ports["http"], ports["grpc"], key, args.rate, args.silent, args.hostile_nice)
    with besieging(plan) as pipe:
        besieged: Record | None = None
        while num_requests(counts) < args.requests:
            counts = await asyncio.to_thread(pipe.recv)
            if besieged is None:  # the first counts: all hostile clients run
                besieged = streams.record = Record()
                said_s = time.monotonic()
            if time.monotonic() - said_s > 30.0:
                said_s = time.monotonic()
                print(f"{num_requests(counts)} hostile requests", flush=True)
    assert besieged is not None
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await streams.close()
    return calm, besieged, counts


def about(seen: Record, ended_s: float) -> dict[str, Any]:
    """The figures of the honest streams of one part."""
    return {
        "seconds": round(ended_s - seen.began_s, 1),
        "answers": seen.num_answers,
        "between tokens ms": figures.summary([1e3 * gap for gap in seen.gaps_s], 2),
        "to the first token ms": figures.summary([1e3 * each for each in seen.firsts_s], 1),
        "wrong or failed": len(seen.wrong),
        "first of them": seen.wrong[:3],
    }


def memory_over_time(samples: Sequence[figures.Sample]) -> dict[str, Any]:
    """By role: RSS in MiB over the whole run, as [seconds since its start, MiB]."""
    began_s = min(each.at_s for each in samples)
    shown: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for each in samples:
        if each.role != CLUSTER:
            at_s = each.at_s - began_s
            value = [round(at_s, 1), round(each.values["rss_mib"], 1)]
            shown[f"{each.role} {each.pid}"].setdefault(int(at_s / SHOWN_S), value)
    return {name: list(values.values()) for name, values in shown.items()}


def memory_growth(samples: Sequence[figures.Sample]) -> dict[str, Any]:
    """By role: the slope of RSS in MiB an hour, with its confidence interval."""
    roles = sorted({each.role for each in samples} - {CLUSTER})
    slopes = {role: figures.growth(samples, role, "rss_mib", warm_up_s=0.0)[0] for role in roles}
    return {role: each.as_dict() for role, each in slopes.items() if each is not None}


def run(cluster: LiveCluster, key: str, args: argparse.Namespace) -> dict[str, Any]:
    before = {role: pids for role, pids in cluster.by_role().items() if role != "redis"}
    with Sampler(cluster, 2.0, with_blocks=False) as sampler:
        calm, besieged, counts = asyncio.run(load(cluster, key, args))
        ended_s = time.monotonic()
        time.sleep(SETTLE_S)
    samples = {
        "calm": [s for s in sampler.samples if s.at_s < besieged.began_s],
        "siege": [s for s in sampler.samples if besieged.began_s <= s.at_s < ended_s],
        "after": [s for s in sampler.samples if s.at_s > ended_s + SETTLE_S - 10],
    }
    half_s = (besieged.began_s + ended_s) / 2
    samples["second half of it"] = [s for s in samples["siege"] if s.at_s > half_s]
    alone, beside = about(calm, besieged.began_s), about(besieged, ended_s)
    after = {role: pids for role, pids in cluster.by_role().items() if role != "redis"}
    ratio = beside["between tokens ms"]["p99"] / alone["between tokens ms"]["p99"]
    bad = {f"{name}: {out}": n for (name, out), n in counts.items() if out in BAD_OUTCOMES}
    held = cluster.held_blocks()
    return {
        "passed": before == after and not bad and not held and not beside["wrong or failed"],
        "hostile requests": num_requests(counts),
        "silent connections, each closed by the server": counts[SILENT, "closed"],
        "outcomes": {
            name: {out: n for (of, out), n in sorted(counts.items()) if of == name}
            for name in sorted({name for name, _ in counts})
        },
        "outcomes that fail the run": bad,
        "honest streams alone": alone,
        "honest streams besieged": beside,
        "p99 between tokens, besieged over alone": round(ratio, 3),
        "same processes": before == after,
        "largest RSS by role MiB": {name: largest(s, "rss_mib") for name, s in samples.items()},
        "RSS by process over time, [s, MiB]": memory_over_time(sampler.samples),
        "RSS growth in the second half of the siege, MiB an hour": memory_growth(
            samples["second half of it"]
        ),
        "largest descriptors by role": {
            name: largest(s, "descriptors") for name, s in samples.items()
        },
        "cores used by role": cores_used(samples["siege"]),
        "blocks held at the end": held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=1500.0, help="hostile requests a second")
    parser.add_argument("--silent", type=int, default=10_000, help="connections that say nothing")
    parser.add_argument(
        "--hostile-nice", type=int, default=19, help="of hostile clients; less beside other work"
    )
    parser.add_argument("--streams", type=int, default=20, help="honest streams at a time")
    parser.add_argument("--calm-s", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(prefix="pst-") as folder:
        key = secrets.token_urlsafe(32)
        setup = ClusterSetup(
            num_workers=1,
            num_ingress=1,
            state="none",
            flags=(*write_keys(Path(folder), [key]), "--max-num-seqs", "32"),
            key=key,
        )
        with live_cluster(setup) as cluster, precedence():
            results = run(cluster, key, args)
    for name, value in results.items():
        print(f"{name}: {value}")
    if args.json:
        record.write(args.json, __file__, results, threads=1)


if __name__ == "__main__":
    main()
