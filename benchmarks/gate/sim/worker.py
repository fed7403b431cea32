"""One simulated worker: continuous batching over a pool of blocks, in steps of modelled time.

A step decodes one token of every running answer, fills the rest of its token budget with prefill
chunks, and takes c0 + c1 * rows + c2 * KV tokens + c3 * prefill tokens seconds. An answer comes in
when all its known tokens fit; when blocks run out, one gives its blocks back and is computed again
later, as in our engine (workers/scheduling/scheduler.py) and in vLLM. Between two events in which
anything changes, many equal decode steps are one leap in closed form.

A beginning that prompts share stays cached after its prefill, in blocks that are free otherwise:
the least recently used one is dropped when blocks are needed. It saves prefill, not memory: each
running answer has all its own blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

# Whom a worker preempts. youngest: vLLM's first come, first served. largest: our engine's rule,
# most tokens; it spares the oldest, and an answer that was preempted MAX_PREEMPTIONS times, while
# others are left.
VICTIMS = ("youngest", "largest")
MAX_PREEMPTIONS = 2


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of one step."""

    base: float  # c0: launches, and reading the weights
    row: float  # c1: of each row that decodes
    kv: float  # c2: of each token of KV that decoding rows read
    prefill: float  # c3: of each token of a prefill chunk

    def seconds(self, rows: int, kv_tokens: int, prefill_tokens: int) -> float:
        return self.base + self.row * rows + self.kv * kv_tokens + self.prefill * prefill_tokens


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What every worker of a run has."""

    steps: StepModel
    num_blocks: int
    block_size: int = 16  # tokens
    slots: int = 256  # answers at once
    budget: int = 2048  # tokens of one step
    watermark: float = 0.01  # of the blocks, that an admission leaves free

    @property
    def capacity(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(slots=True, eq=False)
class Job:
    """A request, how long its answer becomes (unknown before its end), and its fate."""

    job_id: str
    arrived: float
    prompt: int  # tokens
    length: int  # tokens of the answer
    ended: str = "stop"  # or "length" (cut at max_tokens), or "cancel" (the client leaves then)
    max_tokens: int | None = None
    tenant: str = ""
    features: Any = None  # for the predictor
    patience: float = math.inf  # seconds until a client leaves that has seen no token
    prefix: tuple[int, ...] = ()  # marks of a beginning that other prompts have as well
    shared: int = 0  # tokens of that beginning

    generated: int = 0
    computed: int = 0  # tokens whose KV is in blocks
    blocks: int = 0
    order: int = 0  # of arrival at the worker
    is_running: bool = False
    worker: int = -1
    first_at: float | None = None
    last_at: float = 0.0
    longest_gap: float = 0.0
    num_preemptions: int = 0
    num_recomputed: int = 0
    outcome: str = ""  # "done", "refused", "left"

    @property
    def known(self) -> int:
        return self.prompt + self.generated


@dataclass(slots=True)
class _Leap:
    """Equal steps in a row: each is longer than the one before by `slope`."""

    began: float
    first: float  # seconds of the first step
    slope: float
    steps: int
    decode: list[Job]
    chunks: list[tuple[Job, int]]

    def after(self, steps: int) -> float:
        """When that many steps are over."""
        return self.began + steps * self.first + self.slope * steps * (steps - 1) / 2

    def done_by(self, now: float) -> int:
        """Steps that are over."""
        return bisect_right(range(1, self.steps + 1), now, key=self.after)


@dataclass(slots=True)
class SimWorker:
    """`submit` and `cancel` at any time; `finish_leap` exactly when `ends_at` says."""

    index: int
    shape: WorkerShape
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)  # oldest first
    free: int = 0  # blocks
    num_preemptions: int = 0
    num_steps: int = 0
    num_tokens: int = 0  # of answers
    num_prefilled: int = 0
    victim: str = "youngest"  # one of VICTIMS
    num_hit: int = 0  # prompt tokens that were cached
    busy_s: float = 0.0
    _cached: OrderedDict[tuple[int, ...], int] = field(default_factory=OrderedDict)  # tokens
    _leap: _Leap | None = None
    _order: int = 0

    def __post_init__(self) -> None:
        self.free = self.shape.num_blocks

    @property
    def ends_at(self) -> float | None:
        """When something changes here by itself; None: it is idle."""
        return None if self._leap is None else self._leap.after(self._leap.steps)

    @property
    def outstanding(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def held(self) -> list[Job]:
        """All that are here."""
        return [*self.running, *self.waiting]

    def could_ever_fit(self, job: Job) -> bool:
        return self._blocks(job.prompt + job.length) <= self.shape.num_blocks - self._kept

    def would_fit(self, job: Job, now: float) -> bool:
        """The worker's veto: is there room for the prompt now, after those that wait here?"""
        self._cut(now)
        leap = self._leap
        growing = 0
        if leap is not None:
            growing = sum(self._blocks(e.computed + leap.steps) - e.blocks for e in leap.decode)
        ahead = sum(self._blocks(each.known) for each in self.waiting)
        wanted = ahead + self._blocks(job.known) + growing
        return self.outstanding < self.shape.slots and (
            wanted + self._kept <= self.free or not self.outstanding
        )

    def submit(self, job: Job, now: float) -> None:
        job.order, job.worker = self._order, self.index
        self._order += 1
        self.waiting.append(job)
        self._cut(now)
        if self._leap is None:
            self._plan(now)

    def cancel(self, job: Job, now: float) -> bool:
        """Its client left; True: gone at once. Else it ends with the step in progress."""
        if job in self.waiting:
            self.waiting.remove(job)
            return True
        self._cut(now)
        job.length, job.ended = job.generated + 1, "cancel"
        return False

    def finish_leap(self) -> list[Job]:
        """The leap is over: its tokens are out. Returns the answers that ended, and goes on."""
        leap = self._leap
        assert leap is not None
        now = leap.after(leap.steps)
        self.num_steps += leap.steps
        self.busy_s += now - leap.began
        last_step = leap.first + leap.slope * (leap.steps - 1)
        self.num_tokens += leap.steps * len(leap.decode)
        over = []
        for job in leap.decode:
            job.computed += leap.steps
            job.generated += leap.steps
            self._take(job, job.computed)
            gap = max(leap.after(1) - job.last_at, last_step if leap.steps > 1 else 0.0)
            over += self._token(job, now, gap)
        for job, length in leap.chunks:
            job.computed += length
            self.num_prefilled += length
            if job.computed == job.known:
                self._remember(job)
                job.generated += 1
                self.num_tokens += 1
                over += self._token(job, now, now - job.last_at)
        for job in over:
            self.running.remove(job)
            self.free += job.blocks
            job.blocks, job.is_running = 0, False
        assert 0 <= self.free <= self.shape.num_blocks, "more blocks in use than there are"
        self._leap = None
        self._plan(now)
        return over

    def progress(self, now: float) -> list[tuple[Job, int]]:
        """All that are here, and how many tokens of each are out by now."""
        steps, decoding = 0, set()
        if self._leap is not None:
            steps = self._leap.done_by(now)
            decoding = set(map(id, self._leap.decode)) if steps else set()
        return [
            (each, each.generated + (steps if id(each) in decoding else 0)) for each in self.held
        ]

    def tokens_by(self, now: float) -> int:
        """Tokens of answers that are out, what was computed again not counted twice."""
        leap = self._leap
        return self.num_tokens + (0 if leap is None else leap.done_by(now) * len(leap.decode))

    @property
    def _kept(self) -> int:
        return int(self.shape.watermark * self.shape.num_blocks)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.shape.block_size)

    def _token(self, job: Job, now: float, gap: float) -> list[Job]:
        """A token came; [job] if it was the last."""
        if job.first_at is None:
            job.first_at = now
        else:
            job.longest_gap = max(job.longest_gap, gap)
        job.last_at = now
        return [job] if job.generated >= job.length else []

    def _take(self, job: Job, tokens: int) -> bool:
        """Allocate blocks for that many tokens of a job; False: there are not enough."""
        more = self._blocks(tokens) - job.blocks
        if more > self.free:
            return False
        if more > 0:
            self.free -= more
            job.blocks += more
            self._drop_cached()
        return True

    def _remember(self, job: Job) -> None:
        """Its prompt is computed: the beginning that it shares is in the prefix cache."""
        if job.shared:
            self._cached[job.prefix] = job.shared
            self._cached.move_to_end(job.prefix)
            self._drop_cached()

    def _drop_cached(self) -> None:
        """Cached beginnings keep to blocks that are free."""
        while self._cached and sum(map(self._blocks, self._cached.values())) > self.free:
            self._cached.popitem(last=False)

    def _cut(self, now: float) -> None:
        """A request came or left: the step in progress is the leap's last one."""
        if self._leap is not None:
            self._leap.steps = min(self._leap.steps, self._leap.done_by(now) + 1)

    def _plan(self, now: float) -> None:
        decode, chunks = self._schedule()
        if not decode and not chunks:
            return
        kv = sum(each.computed + 1 for each in decode)
        model = self.shape.steps
        first = model.seconds(len(decode), kv, sum(length for _, length in chunks))
        steps = 1 if chunks else self._leap_steps(decode)
        self._leap = _Leap(now, first, model.kv * len(decode), steps, decode, chunks)

    def _leap_steps(self, decode: list[Job]) -> int:
        """Decode steps until one ends or blocks may run out."""
        most = min(each.length - each.generated for each in decode)
        size = self.shape.block_size
        if self.free >= len(decode) * (most // size + 1):
            return most
        lacking = [each.blocks * size - each.computed for each in decode]  # tokens that still fit

        def wanted(steps: int) -> int:
            return sum(max(0, -(-(steps - room) // size)) for room in lacking)

        return max(1, bisect_right(range(1, most + 1), self.free, key=wanted))

    def _schedule(self) -> tuple[list[Job], list[tuple[Job, int]]]:
        """Who computes how much in the next step; blocks for it are taken."""
        budget, before = self.shape.budget, self.num_preemptions
        planned: dict[int, tuple[Job, int]] = {}
        decoding = [each for each in self.running if each.known - each.computed == 1]
        filling = [each for each in self.running if each.known - each.computed > 1]
        for job in [*decoding, *filling]:
            length = min(job.known - job.computed, budget)
            if not job.is_running or length < 1:
                continue
            while job.is_running and not self._take(job, job.computed + length):
                victim = self._victim()
                budget += planned.pop(id(victim), (victim, 0))[1]
                self._preempt(victim)
            if job.is_running:
                planned[id(job)] = (job, length)
                budget -= length
        if self.num_preemptions == before:
            self._admit(budget, planned)
        decode_ids = set(map(id, decoding))
        decode = [job for key, (job, _) in planned.items() if key in decode_ids]
        return decode, [each for key, each in planned.items() if key not in decode_ids]

    def _admit(self, budget: int, planned: dict[int, tuple[Job, int]]) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.shape.slots:
            job = self.waiting[0]
            kept = self._kept if self.running else 0
            if self._blocks(job.known) + kept > self.free:
                return
            self.waiting.popleft()
            job.computed = min(self._cached.get(job.prefix, 0), job.known - 1)
            self.num_hit += job.computed
            self._take(job, job.known)
            at = len(self.running)
            while at and self.running[at - 1].order > job.order:
                at -= 1
            self.running.insert(at, job)
            job.is_running = True
            length = min(job.known - job.computed, budget)
            planned[id(job)] = (job, length)
            budget -= length

    def _victim(self) -> Job:
        """The answer to preempt; see VICTIMS."""
        able = [each for each in self.running[1:] if each.num_preemptions < MAX_PREEMPTIONS]
        if self.victim == "youngest" or not able:
            return self.running[-1]
        return max(able, key=lambda each: (each.known, each.order))

    def _preempt(self, job: Job) -> None:
        self.num_preemptions += 1
        job.num_preemptions += 1
        job.num_recomputed += job.computed
        self.running.remove(job)
        self.free += job.blocks
        job.blocks = job.computed = 0
        job.is_running = False
        older = sum(1 for each in self.waiting if each.order < job.order)
        self.waiting.insert(older, job)
