"""An engine on a device that is made up: the real scheduler, with step times of the roofline.

Deferred commit is decided by the scheduler, its KV cache and its rule as in a server; only tensors
and the clock are missing. A preempted sequence is computed again, or its K and V come back over a
link of a given speed while other sequences go on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import cast

from penstock.workers.memory.block_pool import BlockPool
from penstock.workers.planning.roofline import Roofline
from penstock.workers.request import Request, SamplingParams
from penstock.workers.scheduling.commit_rule import CommitRule
from penstock.workers.scheduling.deferral import MAX_DEFERRING, Deferral
from penstock.workers.scheduling.kv_cache import KVCache
from penstock.workers.scheduling.plan import Plan
from penstock.workers.scheduling.scheduler import Scheduler
from penstock.workers.scheduling.sequence import Sequence
from penstock.workers.scheduling.swap import HostSwap, Swapped

BLOCK_SIZE = 16
MAX_DEFERRED = 64  # tokens of one sequence, the default of kv_defer_max_tokens
STEP_TOKENS = 2048  # most of one step
ANSWER = (64, 448)  # tokens


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences of about `context` tokens, in a pool for `pool_share` of them."""

    bound: Roofline
    batch: int
    context: int
    link_bytes_per_s: float | None  # to host memory; None: there is none
    pool_share: float = 0.85


@dataclass(slots=True)
class Outcome:
    """What one run took."""

    seconds: float
    num_tokens: int
    gaps_s: list[float] = field(default_factory=list)  # between tokens of one answer
    num_preemptions: int = 0
    num_avoided: int = 0
    num_steps: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class SimulatedLink:
    """In the place of HostSwap: a preempted sequence's K and V come back after the link's time."""

    def __init__(self, bytes_per_s: float, token_bytes: float, again_s: float):
        self.bytes_per_s, self._token_bytes, self._again_s = bytes_per_s, token_bytes, again_s
        self.now_s = self._free_at_s = 0.0
        self._out: dict[int, Swapped] = {}
        self._loads: dict[int, tuple[float, int]] = {}  # when it is done, and tokens

    def restore_s(self, num_tokens: int) -> float:
        return min(num_tokens * self._token_bytes / self.bytes_per_s, num_tokens * self._again_s)

    def swap_out(self, seq: Sequence) -> None:
        if seq.num_computed_tokens and seq.order not in self._loads:
            self._out[seq.order] = Swapped(seq.num_computed_tokens, 0, [])

    def swapped(self, seq: Sequence) -> Swapped | None:
        found = self._out.get(seq.order)
        load_s = 0.0 if found is None else found.num_computed_tokens * self._token_bytes
        if found is None or load_s / self.bytes_per_s > found.num_computed_tokens * self._again_s:
            self._out.pop(seq.order, None)
            return None
        return found

    def hold(self, seq: Sequence) -> None:
        """Nothing is evicted from this host memory."""

    def swap_in(self, seq: Sequence, found: Swapped, held: None) -> None:
        load_s = found.num_computed_tokens * self._token_bytes / self.bytes_per_s
        self._free_at_s = max(self._free_at_s, self.now_s) + load_s
        self._loads[seq.order] = (self._free_at_s, found.num_computed_tokens)
        del self._out[seq.order]

    def limit(self, seq: Sequence) -> int | None:
        return 0 if seq.order in self._loads else None

    def advance(self, seq: Sequence) -> None:
        if seq.order in self._loads and self._loads[seq.order][0] <= self.now_s:
            seq.num_computed_tokens = self._loads.pop(seq.order)[1]

    def plan(self, chain: object) -> None:
        """No prefix is cached, so none was evicted."""

    def stop(self, seq: Sequence) -> None:
        self._loads.pop(seq.order, None)

    def forget(self, seq: Sequence) -> None:
        self._out.pop(seq.order, None)

    def next_done_s(self) -> float:
        return min(done_s for done_s, _ in self._loads.values())


def run(case: Case, mode: str, seed: int, rounds: int = 8) -> Outcome:
    """`mode`: eager, pressure or always. All requests come at once, `rounds` for each place."""
    bound = case.bound
    num_blocks = int(case.pool_share * case.batch * (-(-case.context // BLOCK_SIZE)))
    pool = BlockPool(num_blocks)
    cache = KVCache(pool, BLOCK_SIZE, prefix_cache=False, salt=b"")
    scheduler = Scheduler(
        cache, max_num_seqs=case.batch, max_num_batched_tokens=max(STEP_TOKENS, 2 * case.batch)
    )
    link = None
    if case.link_bytes_per_s is not None:
        token_bytes, again_s = bound.kv_bytes_per_token, bound.compute_s_per_token
        link = SimulatedLink(case.link_bytes_per_s, token_bytes, again_s)
        cache.swap = cast(HostSwap, link)  # it has all that the cache and the scheduler call
    if mode != "eager":
        rule = CommitRule(
            max(bound.ridge_tokens, 1.0),
            bound.read_s_per_token,
            bound.compute_s_per_token,
            MAX_DEFERRED,
        )
        num_scratch = MAX_DEFERRING * -(-MAX_DEFERRED // BLOCK_SIZE)
        scheduler.deferral = Deferral(rule, mode, MAX_DEFERRED, num_scratch)
    for seq in _sequences(case, seed, rounds):
        scheduler.add(seq)
    outcome = Outcome(0.0, 0)
    last_s: dict[int, float] = {}
    while scheduler.running or scheduler.waiting:
        plan = scheduler.schedule()
        if not plan.chunks:
            assert link is not None, "nothing runs, and nothing is loaded"
            outcome.seconds = max(outcome.seconds, link.next_done_s())
        else:
            outcome.seconds += step_s(bound, plan)
            outcome.num_steps += 1
            _finish(scheduler, plan, outcome, last_s)
        if link is not None:
            link.now_s = outcome.seconds
    pool.check([])
    outcome.num_preemptions = scheduler.num_preemptions
    outcome.num_avoided = scheduler.num_preemptions_avoided
    return outcome


def step_s(bound: Roofline, plan: Plan) -> float:
    """Seconds of that step on the device."""
    cached = pairs = sampled = 0
    for chunk in plan.chunks:
        end = chunk.start + chunk.length
        cached += end
        pairs += chunk.length * (chunk.start + end + 1) // 2
        sampled += chunk.samples
    return bound.mixed(plan.num_tokens, sampled, cached, pairs).seconds


def _finish(scheduler: Scheduler, plan: Plan, outcome: Outcome, last_s: dict[int, float]) -> None:
    """As the engine does once a step was computed."""
    sampling = [chunk.samples for chunk in plan.chunks]
    for chunk, samples in zip(plan.chunks, sampling, strict=True):
        seq = chunk.seq
        if seq.started_s is None:
            seq.started_s = 0.0
        seq.mark_launched(chunk.length, chunk.num_deferred, samples)
        scheduler.mark_read(seq)
        scheduler.cache.commit(seq, chunk.start + chunk.length - chunk.num_deferred)
        if samples:
            delta = seq.append(7)
            outcome.num_tokens += 1
            if seq.order in last_s:
                outcome.gaps_s.append(outcome.seconds - last_s[seq.order])
            last_s[seq.order] = outcome.seconds
            if delta.finish_reason is not None:
                scheduler.remove(seq)


def _sequences(case: Case, seed: int, rounds: int) -> list[Sequence]:
    """Answers of ANSWER tokens, prompts that make `context` of them on average."""
    rng, found = random.Random(seed), []
    mean = sum(ANSWER) // 2
    for i in range(rounds * case.batch):
        answer = rng.randint(*ANSWER)
        least = max(case.context - mean, 16)
        prompt = rng.randint(least - least // 4, least + least // 4)
        params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
        found.append(
            Sequence(
                Request(f"{i}", (7,) * prompt, params),
                order=i,
                seed=0,
                stop_ids=frozenset(),
                max_total_tokens=prompt + answer,
            )
        )
    return found
