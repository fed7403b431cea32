"""Random kills of all roles of a live cluster, under mixed load by real clients.

    python -m benchmarks.faults.random_kills --cluster --kills 80 \\
        --targets worker,ingress,gate,expert-store

Two ingresses share a Redis, so that the journal of a cut stream is there for the other one. The
guard: another worker is connected with all ingresses before one is killed, another ingress serves
before one is killed, and gate and expert store are back from their last kill. A replica takes
several seconds to come back, so a run has a kill each few seconds and not each half.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.faults import figures
from benchmarks.faults.callers import Callers, Seen, callers_of
from benchmarks.faults.cluster import FORGOTTEN_S, ClusterSetup, LiveCluster, live_cluster

STOPPED_S = 7.0  # longest stop before the kill: longer than a silence is tolerated
CLUSTER_MODEL, EXPERT_CACHE_GB = "builtin-moe", 0.02
WHOLE_S = 240.0
LOG_SHOWN = 4000  # characters of the log of `penstock serve`
PAIRED = ("worker", "ingress")  # roles of several processes, of which one must live


@dataclass
class Killer:
    """Kills at random until it has made `num_kills`, or `seconds` have passed."""

    cluster: LiveCluster
    targets: tuple[str, ...]
    num_kills: int
    seconds: float
    every_s: float
    stop_share: float
    seed: int
    faults: list[tuple[float, str]] = field(default_factory=list)
    num_stops: int = 0
    back_s: dict[str, list[float]] = field(default_factory=dict)
    stuck: str = ""  # what did not come back, and ended the run
    _last_s: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Until the end, or until a role does not come back: `stuck` then says so."""
        try:
            await self._run()
        except TimeoutError as error:
            self.stuck = str(error)
            print(self.stuck, flush=True)
            print(self.cluster.log[-LOG_SHOWN:], *self.cluster.warnings(), sep="\n", flush=True)

    async def _run(self) -> None:
        rng, began_s = random.Random(self.seed), time.monotonic()
        while len(self.faults) < self.num_kills and time.monotonic() - began_s < self.seconds:
            await asyncio.sleep(rng.expovariate(1.0 / self.every_s))
            role = rng.choice(self.targets)
            victim = await self._await_victim(role, rng)
            at_s = time.monotonic()
            if rng.random() < self.stop_share:  # silent first, as a partition is
                self.num_stops += 1
                self.cluster.kill(victim, signal.SIGSTOP)
                await asyncio.sleep(rng.uniform(0.0, STOPPED_S))
            self.cluster.kill(victim)
            self._last_s[role] = time.monotonic()
            self.faults.append((at_s, role))
            if len(self.faults) % 10 == 0:
                print(f"{len(self.faults)} kills", dict(self.by_role()), flush=True)

    def by_role(self) -> Counter[str]:
        return Counter(role for _, role in self.faults)

    async def _await_victim(self, role: str, rng: random.Random) -> int:
        """A process of the role, as soon as the guard permits to kill it."""
        began_s = time.monotonic()
        while not (pids := await asyncio.to_thread(self._mortal, role)):
            if time.monotonic() - began_s > WHOLE_S:
                why = await asyncio.to_thread(self.cluster.why_not_whole)
                raise TimeoutError(f"no {role} may be killed for {WHOLE_S:g} s: {why}")
            await asyncio.sleep(0.5)
        if role in self._last_s:  # at most so long: the next kill may have waited for other reasons
            taken_s = time.monotonic() - self._last_s[role]
            if time.monotonic() - began_s > 1.0:  # it has waited for the replacement
                self.back_s.setdefault(role, []).append(taken_s)
        return rng.choice(pids)

    def _mortal(self, role: str) -> list[int]:
        """The processes of the role, if one of them may be killed now."""
        pids = self.cluster.pids(role)
        if len(pids) != self.cluster.setup.expected[role]:
            return []
        if role not in PAIRED:
            return pids
        # Until the registry has forgotten the last victim, its view proves nothing.
        if time.monotonic() - self._last_s.get(role, -FORGOTTEN_S) < FORGOTTEN_S:
            return []
        status = self.cluster.status()
        if status is None:
            return []
        setup = self.cluster.setup
        if role == "worker":
            reach = [each["num_workers"] for each in status["ingresses"]]
            return pids if reach and min(reach) == setup.num_workers else []
        return pids if len(status["ingresses"]) == setup.num_ingress else []


async def kill_and_call(cluster: LiveCluster, options: argparse.Namespace) -> dict[str, Any]:
    async with callers_of(cluster, options.calls) as callers:
        await callers.learn(options.callers)
        quiet = figures.gaps(heard.arrivals for heard in callers.undisturbed)
        print(f"{len(callers.undisturbed)} undisturbed answers; now kills", flush=True)
        killer = Killer(
            cluster,
            tuple(options.targets.split(",")),
            options.kills,
            60.0 * options.minutes,
            options.every_s,
            options.stop_share,
            options.seed,
        )
        seen, began_s = await under_kills(callers, killer, options.callers)
        seconds = time.monotonic() - began_s
        held = await asyncio.to_thread(settled, killer)
        await callers.check_unseeded(seen, options.callers)
    least_s = figures.quantile(quiet, 0.999) or 0.0
    pauses = figures.pauses(seen.arrivals, killer.faults, least_s)
    return {
        "kills": len(killer.faults),
        "kills by role": dict(killer.by_role()),
        "of these stopped first": killer.num_stops,
        "seconds": round(seconds, 1),
        **seen.results(),
        "blocks held at the end": held,
        "did not come back": killer.stuck,
        "undisturbed gaps between tokens s": figures.summary(quiet),
        "pauses s, by role": {role: figures.summary(each) for role, each in pauses.items()},
        "pauses s, of all kills": figures.summary(
            [each for role, many in pauses.items() if role != figures.NO_FAULT for each in many]
        ),
        "a pause is a gap of at least s": round(least_s, 3),
        "until the next may be killed s": {
            role: figures.summary(each, 1) for role, each in killer.back_s.items()
        },
    }


def settled(killer: Killer) -> int:
    """KV blocks that are held once the cluster is whole again; `stuck` if it does not get there."""
    try:
        killer.cluster.await_whole(WHOLE_S)
    except TimeoutError as error:
        killer.stuck = killer.stuck or str(error)
    return killer.cluster.held_blocks()


async def under_kills(callers: Callers, killer: Killer, num_callers: int) -> tuple[Seen, float]:
    """Call while the killer runs, until all calls have ended; what was seen, and the beginning."""
    seen, stopping, began_s = Seen(), asyncio.Event(), time.monotonic()
    calling = [
        asyncio.ensure_future(callers.call_until(stopping, seed, seen))
        for seed in range(num_callers)
    ]
    try:
        await killer.run()
    finally:
        stopping.set()
        await asyncio.gather(*calling)
    return seen, began_s


def failed(results: Mapping[str, Any]) -> bool:
    """Whether anything was lost, differs, leaked, or did not come back."""
    names = ("differing answers", "lost requests", "blocks held at the end", "did not come back")
    return any(results.get(name) for name in names)


def run_on_cluster(options: argparse.Namespace) -> dict[str, Any]:
    """The results of `random_kills --cluster`."""
    has_store = "expert-store" in options.targets
    setup = ClusterSetup(
        model=CLUSTER_MODEL if has_store else "builtin",
        num_workers=options.workers,
        expert_cache_gb=EXPERT_CACHE_GB if has_store else None,
    )
    with live_cluster(setup) as cluster:
        return asyncio.run(kill_and_call(cluster, options))
