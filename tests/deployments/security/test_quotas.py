"""Quotas against a naive count, on a clock that the test moves; two ingresses over one Redis."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deployments.security.accounts import DAY_S, reset_text
from penstock.deployments.security.quotas import (
    MemoryBuckets,
    QuotaExceeded,
    QuotaLimiter,
    QuotaTooSmall,
    Reservation,
    check_quotas,
)
from penstock.deployments.security.records import QuotaLimits
from penstock.deployments.state.store import Store
from penstock.workers.errors import ConfigError
from tests.deployments.security.keys import key_of
from tests.deployments.state.servers import RedisServer, redis_backend
from tests.deployments.waiting import until

START_S = 20_000 * DAY_S + 86_000.0  # soon before midnight


class Clock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


class Naive:
    """What is left of each quota, counted as plainly as it can be."""

    def __init__(self, limits: QuotaLimits):
        self.limits = limits
        self.minute = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        self.left: dict[str, float | None] = dict(self.minute)
        self.day = {"requests": limits.requests_per_day, "tokens": limits.tokens_per_day}
        self.used: dict[tuple[str, int], float] = {}

    def advance(self, seconds: int) -> None:
        for what, limit in self.minute.items():
            left = self.left[what]
            if limit is not None and left is not None:
                self.left[what] = min(float(limit), left + seconds * limit / 60)

    def has(self, what: str, cost: float, today: int) -> bool:
        left, of_day = self.left[what], self.day[what]
        fits_day = of_day is None or self.used.get((what, today), 0.0) + cost <= of_day
        return (left is None or cost <= left) and fits_day

    def use(self, what: str, cost: float, day: int) -> None:
        """Negative: it goes back."""
        left, limit = self.left[what], self.minute[what]
        if left is not None and limit is not None:
            self.left[what] = min(float(limit), left - cost)
        self.used[what, day] = self.used.get((what, day), 0.0) + cost


# Multiples of 60, so that a second's refill is a whole number.
per_minute = st.none() | st.integers(1, 20).map(lambda n: 60 * n)
per_day = st.none() | st.integers(1, 3000)
all_limits = st.builds(QuotaLimits, per_minute, per_day, per_minute, per_day)
steps = st.lists(
    st.tuples(st.just("wait"), st.integers(0, 90))
    | st.tuples(st.just("reserve"), st.integers(0, 400))
    | st.tuples(st.just("settle"), st.integers(0, 400)),
    max_size=40,
)


async def play(
    limits: QuotaLimits, moves: list[tuple[str, int]], *, most_used: float
) -> Iterator[tuple[bool, bool]]:
    """(granted, by the naive count) of each request. An answer uses at most `most_used` times what
    was reserved for it."""
    clock, naive = Clock(), Naive(limits)
    limiter = QuotaLimiter(clock=clock)
    running: list[tuple[Reservation, int, int]] = []
    seen = []
    for move, number in moves:
        today = int(clock.now_s // DAY_S)
        if move == "wait":
            clock.now_s += number
            naive.advance(number)
        elif move == "settle" and running:
            reservation, reserved, day = running.pop(0)
            used = min(number, int(most_used * reserved))
            reservation.settle(used)
            naive.use("tokens", used - reserved, day)
            for _ in range(10):
                await asyncio.sleep(0)
        elif move == "reserve":
            expected = naive.has("requests", 1, today) and naive.has("tokens", number, today)
            try:
                reservation = await limiter.reserve("t", limits, number)
            except (QuotaExceeded, QuotaTooSmall):
                seen.append((False, expected))
            else:
                seen.append((True, expected))
                running.append((reservation, number, today))
                naive.use("requests", 1, today)
                naive.use("tokens", number, today)
    return iter(seen)


@given(all_limits, steps)
def test_as_the_naive_count_says(limits: QuotaLimits, moves: list[tuple[str, int]]) -> None:
    for granted, expected in asyncio.run(play(limits, moves, most_used=1.0)):
        assert granted == expected


@given(all_limits, steps)
def test_what_answers_take_beyond_their_reservation_is_owed(
    limits: QuotaLimits, moves: list[tuple[str, int]]
) -> None:
    for granted, expected in asyncio.run(play(limits, moves, most_used=3.0)):
        assert expected or not granted


@given(st.integers(1, 50), st.integers(1, 400), st.integers(0, 200))
def test_the_wait_that_a_refusal_names_is_enough(limit: int, cost: int, further_s: int) -> None:
    async def scenario() -> None:
        clock, limits = Clock(), QuotaLimits(tokens_per_minute=limit * 60)
        limiter = QuotaLimiter(clock=clock)
        cost_now = min(cost, limit * 60)
        while True:
            try:
                await limiter.reserve("t", limits, cost_now)
            except QuotaExceeded as refusal:
                wait_s = refusal.retry_after_s
                break
        assert 0 < wait_s <= 60
        clock.now_s += wait_s / 2
        with pytest.raises(QuotaExceeded):
            await limiter.reserve("t", limits, cost_now)
        clock.now_s += wait_s / 2 + 1e-6 + further_s
        await limiter.reserve("t", limits, cost_now)

    asyncio.run(scenario())


def test_a_refusal_says_which_quota_and_a_new_day_begins_anew() -> None:
    async def scenario() -> None:
        clock, limits = Clock(), QuotaLimits(requests_per_day=2, tokens_per_minute=1000)
        limiter = QuotaLimiter(clock=clock)
        with pytest.raises(QuotaTooSmall, match=r"may take 1001 tokens.*is 1000 a minute"):
            await limiter.reserve("t", limits, 1001)
        for _ in range(2):
            await limiter.reserve("t", limits, 100)
        with pytest.raises(QuotaExceeded, match="its 2 requests a day; try again in 6m40s") as no:
            await limiter.reserve("t", limits, 100)
        assert no.value.retry_after_s == 400.0
        requests, tokens = limiter.status("t", limits)
        assert (requests.limit, requests.remaining, requests.reset_s) == (2, 0, 400.0)
        assert (tokens.limit, tokens.remaining, tokens.reset_s) == (1000, 800, 12.0)
        await limiter.reserve("other", limits, 100)
        clock.now_s += 400.0
        await limiter.reserve("t", limits, 100)
        assert limiter.status("t", limits)[0].remaining == 1

    asyncio.run(scenario())


def test_another_quota_is_in_force_at_once() -> None:
    async def scenario() -> None:
        limiter = QuotaLimiter(clock=Clock())
        small, large = QuotaLimits(requests_per_minute=1), QuotaLimits(requests_per_minute=60)
        await limiter.reserve("t", small, 1)
        with pytest.raises(QuotaExceeded):
            await limiter.reserve("t", small, 1)
        for _ in range(59):
            await limiter.reserve("t", large, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.1201, "121ms"),
        (1.0, "1s"),
        (59.2, "1m0s"),
        (360.0, "6m0s"),
        (86399.0, "23h59m59s"),
    ],
)
def test_times_as_openai_writes_them(seconds: float, text: str) -> None:
    assert reset_text(seconds) == text


def test_several_ingresses_need_a_store() -> None:
    _, limited = key_of(quotas=QuotaLimits(tokens_per_day=5))
    _, free = key_of()
    check_quotas([limited, free], 1, None)
    check_quotas([free], 3, None)
    check_quotas([limited], 3, "redis://h:1/0")
    with pytest.raises(ConfigError, match=f"{limited.key_id} has quotas, and up to 3.*state-url"):
        check_quotas([free, limited], 3, None)


# Several ingresses


class Counting(MemoryBuckets):
    """Counts the calls, as a store would see them."""

    def __init__(self, clock: Callable[[], float]):
        super().__init__(clock)
        self.num_takes = 0

    async def take(self, buckets: Any, *, budget_s: float = 0.0) -> Any:
        self.num_takes += 1
        return await super().take(buckets)


def test_slices_spare_most_calls_and_nothing_of_the_quota_is_lost() -> None:
    async def scenario() -> None:
        clock, limits = Clock(), QuotaLimits(1000, None, 100_000, None)
        shared = Counting(clock)
        ingresses = [QuotaLimiter(shared, clock=clock) for _ in range(3)]
        num = 0
        for n in range(1100):
            try:
                await ingresses[n % 3].reserve("t", limits, 10)
            except QuotaExceeded:
                continue
            num += 1
        assert num == 1000
        assert shared.num_takes < 200 + 2 * 100  # the last hundred are refused

    asyncio.run(scenario())


def test_buckets_in_memory_of_tenants_that_never_come_again_are_forgotten() -> None:
    async def scenario() -> None:
        clock = Clock()
        buckets = MemoryBuckets(clock)
        limiter = QuotaLimiter(buckets, clock=clock)
        limits = QuotaLimits(requests_per_minute=10, tokens_per_day=1000)
        for n in range(100):
            await limiter.reserve(f"tenant-{n}", limits, 10)
        clock.now_s += DAY_S
        await limiter.reserve("another", limits, 10)
        assert len(buckets) == 100 + 2  # of minutes none but its own
        clock.now_s += 1.5 * DAY_S
        await limiter.reserve("another", limits, 10)
        assert len(buckets) == 1 + 2

    asyncio.run(scenario())


def test_what_was_taken_in_advance_is_forfeited_after_a_quiet_minute() -> None:
    async def scenario() -> None:
        clock, limits = Clock(), QuotaLimits(requests_per_minute=1000)
        limiter = QuotaLimiter(MemoryBuckets(clock), clock=clock)
        await limiter.reserve("acme", limits, 1)
        assert limiter.status("acme", limits)[0].remaining == 999
        clock.now_s += 61.0
        assert len(await spent(limiter, limits, 1)) == 1000

    asyncio.run(scenario())


def test_a_late_answer_gives_back_what_it_did_not_use() -> None:
    async def scenario() -> None:
        clock, limits = Clock(), QuotaLimits(tokens_per_day=1000)
        limiter = QuotaLimiter(clock=clock)
        reservation = await limiter.reserve("acme", limits, 800)
        clock.now_s += 200.0
        reservation.settle(100)
        assert limiter.status("acme", limits)[0].remaining == 900
        await until(lambda: len(limiter._tenants["acme"].tasks) == 0)
        assert limiter.status("acme", limits)[0].remaining == 900

    asyncio.run(scenario())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 60)), max_size=60))
def test_no_minute_lets_more_through_than_the_document_says(
    bursts: list[tuple[int, int, int]],
) -> None:
    limit = 60

    async def scenario() -> list[float]:
        clock, limits = Clock(), QuotaLimits(requests_per_minute=limit)
        shared = MemoryBuckets(clock)
        ingresses = [QuotaLimiter(shared, clock=clock) for _ in range(3)]
        granted = []
        for ingress, wait_s, num in bursts:
            clock.now_s += wait_s
            for _ in range(num):
                with contextlib.suppress(QuotaExceeded):
                    await ingresses[ingress].reserve("acme", limits, 1)
                    granted.append(clock.now_s)
        return granted

    granted = asyncio.run(scenario())
    for begin_s in granted:
        num = sum(begin_s <= at_s < begin_s + 60 for at_s in granted)
        assert num <= 2 * limit + 3 * limit / 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder: Path = tmp_path_factory.mktemp("redis")
    running = RedisServer(folder).start()
    yield running
    running.kill()


async def spent(limiter: QuotaLimiter, limits: QuotaLimits, cost: int) -> list[Reservation]:
    """All that is granted, one request after another, until one is refused."""
    granted = []
    while True:
        try:
            granted.append(await limiter.reserve("acme", limits, cost))
        except QuotaExceeded:
            return granted


def test_two_ingresses_over_one_redis_share_a_quota(server: RedisServer) -> None:
    limits = QuotaLimits(requests_per_minute=120, tokens_per_day=100_000)

    async def scenario(one: Store, two: Store) -> None:
        limiters = QuotaLimiter(one), QuotaLimiter(two)
        began_s = time.monotonic()
        first, second = await asyncio.gather(*(spent(each, limits, 10) for each in limiters))
        most = 120 + 2 * (time.monotonic() - began_s)
        # What one has in advance, a twentieth, the other cannot use.
        assert 120 - 2 * 6 <= len(first) + len(second) <= most
        assert first and second
        third = QuotaLimiter(two)  # an ingress that starts anew finds the quota as it is
        assert len(await spent(third, limits, 10)) <= 2 * (time.monotonic() - began_s) + 6

    redis_backend(server).run(scenario, num=2)


def test_redis_forgets_a_day_of_a_tenant_that_never_comes_again(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await QuotaLimiter(store).reserve("gone", QuotaLimits(tokens_per_day=1000), 10)

    redis_backend(server).run(scenario)
    (key,) = server.ask("KEYS", "*quota/gone/*")
    assert 2 * DAY_S - 60 < server.ask("TTL", key) <= 2 * DAY_S


def test_tokens_that_were_not_used_go_back_to_all_ingresses(server: RedisServer) -> None:
    limits = QuotaLimits(tokens_per_day=10_000)

    async def scenario(one: Store, two: Store) -> None:
        first, second = QuotaLimiter(one), QuotaLimiter(two)
        reservations = await spent(first, limits, 1000)
        assert len(reservations) == 10 and not await spent(second, limits, 1000)
        for each in reservations:
            each.settle(100)
        await until(lambda: not first._tenants["acme"].tasks)  # all is in the store again
        granted = await spent(second, limits, 1000)
        assert 8 <= len(granted) <= 9  # one slice of 500 stays where it is
        granted[0].settle(1500)  # beyond what was reserved: it is owed
        rest = await spent(second, limits, 100)
        assert len(rest) <= 5

    redis_backend(server).run(scenario, num=2)


def test_while_the_store_is_away_each_ingress_counts_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = QuotaLimits(requests_per_day=40)
    server = RedisServer(tmp_path / "redis").start()

    async def scenario(one: Store, two: Store) -> None:
        first, second = QuotaLimiter(one), QuotaLimiter(two)
        assert 36 <= len(await spent(first, limits, 1)) <= 40
        server.kill()
        # In memory, with the whole quota each.
        assert 40 <= len(await spent(first, limits, 1)) <= 42
        assert len(await spent(second, limits, 1)) == 40
        assert "counted by each ingress for itself" in caplog.text
        server.start()

        async def is_back() -> bool:
            with contextlib.suppress(QuotaExceeded):
                await first.reserve("other", QuotaLimits(tokens_per_minute=60_000), 1)
            return "counted over all ingresses again" in caplog.text

        await until_true(is_back)

    try:
        redis_backend(server).run(scenario, num=2)
    finally:
        server.kill()


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.1)
