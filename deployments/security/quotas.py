"""Quotas: how many requests and tokens a tenant may have in a minute and in a day.

A minute's quota is a token bucket: it holds one minute's worth, and fills evenly. A day's is a
window from midnight to midnight, UTC. A request takes from all of them or from none: one request,
and the tokens of its prompt and of the answer that it may have; at its end what it did not use goes
back, and what it used beyond that is owed, and paid before the tenant's next request.

Buckets are in the state store where there is one. Each ingress takes a slice in advance, so that
most requests cost no call to the store. While the store does not answer, each ingress counts alone,
in memory, with the whole quota.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.deployments.security.accounts import Account, Kind, account_kinds, day_of, reset_text
from penstock.deployments.security.records import KeyRecord, QuotaLimits
from penstock.deployments.state import rules
from penstock.deployments.state.store import Bucket, StateError, Taken
from penstock.workers.errors import ConfigError

log = logging.getLogger("penstock.security")

BUDGET_S = 0.25  # longest wait for the store, of a request that needs it
SWEPT_S = 3600.0  # so often, buckets in memory that have ended are forgotten
AWAY_S = 2.0  # the store is not asked again for so long after it did not answer


def check_quotas(records: Iterable[KeyRecord], max_ingress: int, state_url: str | None) -> None:
    """Raise ConfigError for quotas that the ingresses of a cluster could not count together."""
    limited = [each.key_id for each in records if each.terms.quotas.are_set]
    if limited and max_ingress > 1 and state_url is None:
        raise ConfigError(
            f"api_keys_file: key {limited[0]} has quotas, and up to {max_ingress} ingresses "
            "(num_ingress) would each count them for itself: name a store that they share "
            "(--state-url redis://HOST:PORT/DB), or use one ingress"
        )


class Buckets(Protocol):
    """Where quotas are counted; a state store is one."""

    async def take(self, buckets: Sequence[Bucket], *, budget_s: float) -> Taken:
        """Take each bucket's cost, or nothing from any. Raises StateError."""
        ...


class MemoryBuckets:
    """Buckets of this process. `clock`: Unix time in seconds."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._levels: dict[str, rules.Level] = {}
        self._ends_s: dict[str, float] = {}  # when each may be forgotten
        self._swept_s = clock()

    def __len__(self) -> int:
        return len(self._levels)

    async def take(self, buckets: Sequence[Bucket], *, budget_s: float = 0.0) -> Taken:
        now_s = self._clock()
        if now_s - self._swept_s > SWEPT_S:
            self._sweep(now_s)
        levels = [self._levels.get(bucket.name) for bucket in buckets]
        taken, left = rules.draw(buckets, levels, now_s)
        for bucket, level in zip(buckets, left):
            ttl_s = rules.ttl_s(bucket, level[0])
            self._levels[bucket.name] = level
            self._ends_s[bucket.name] = math.inf if ttl_s is None else now_s + ttl_s
        return taken

    def _sweep(self, now_s: float) -> None:
        self._swept_s = now_s
        for name in [name for name, end_s in self._ends_s.items() if end_s <= now_s]:
            del self._levels[name], self._ends_s[name]


class QuotaExceeded(Exception):
    """Refused for now. `retry_after_s`: when the same request would be let in."""

    def __init__(self, kind: Kind, limit: int, retry_after_s: float):
        self.retry_after_s = retry_after_s
        super().__init__(
            f"this key's tenant has used its {limit} {kind.what} a {kind.span}; try again in "
            + reset_text(math.ceil(retry_after_s))
        )


class QuotaTooSmall(Exception):
    """Refused for good: one request may need more than the whole quota."""

    def __init__(self, kind: Kind, limit: int, cost: float):
        super().__init__(
            f"this request may take {cost:.0f} {kind.what}, and the quota of its tenant is {limit} "
            f"a {kind.span}: lower max_tokens, or shorten the prompt"
        )


def check_size(limits: QuotaLimits, num_tokens: int) -> None:
    """Raise QuotaTooSmall for a request that no wait would let in."""
    for kind in account_kinds(limits):
        limit = getattr(limits, kind.name)
        if kind.what == "tokens" and num_tokens > limit:
            raise QuotaTooSmall(kind, limit, num_tokens)


@dataclass(frozen=True, slots=True)
class QuotaStatus:
    """What a client is told of requests or of tokens. `reset_s`: until all of it is there again."""

    what: str
    limit: int
    remaining: int
    reset_s: float


class QuotaLimiter:
    """The quotas of all tenants at one ingress. Lives on its event loop."""

    def __init__(self, shared: Buckets | None = None, *, clock: Callable[[], float] = time.time):
        """`shared`: of all ingresses; None: this is the only one. `clock`: Unix time in seconds."""
        self._clock = clock
        self._own = MemoryBuckets(clock)
        self._shared = shared
        self._away_until_s = 0.0
        self._tenants: dict[str, _Tenant] = {}

    async def reserve(self, tenant: str, limits: QuotaLimits, num_tokens: int) -> Reservation:
        """Take one request of `num_tokens` tokens. Raises QuotaExceeded or QuotaTooSmall."""
        known = self._tenants.setdefault(tenant, _Tenant())
        async with known.lock:  # requests that come together share a slice
            now_s = self._clock()
            accounts = known.update(tenant, limits, now_s)
            costs = [num_tokens if each.kind.what == "tokens" else 1 for each in accounts]
            check_size(limits, num_tokens)
            await self._pay(accounts, costs, now_s)
            for account, cost in zip(accounts, costs):
                account.held -= cost
        return Reservation(self, tenant, accounts, num_tokens)

    def status(self, tenant: str, limits: QuotaLimits) -> list[QuotaStatus]:
        """Of requests and of tokens, where they are limited: the quota that ends first."""
        now_s = self._clock()
        accounts = self._tenants.setdefault(tenant, _Tenant()).update(tenant, limits, now_s)
        found = []
        for what in ("requests", "tokens"):
            of_kind = [each for each in accounts if each.kind.what == what]
            if of_kind:
                first = min(of_kind, key=lambda each: each.remaining(now_s))
                remaining = max(0, math.floor(first.remaining(now_s)))
                found.append(QuotaStatus(what, first.limit, remaining, first.reset_s(now_s)))
        return found

    async def _pay(self, accounts: Sequence[Account], costs: Sequence[int], now_s: float) -> None:
        """Have what the costs need in each account. Raises QuotaExceeded."""
        for account in accounts:
            if account.held < 0:
                await self._pay_back(account, now_s)
        short = [
            (account, cost - account.held)
            for account, cost in zip(accounts, costs)
            if account.held < cost
        ]
        if not short:
            return
        for account, needed in short:
            if account.held < 0:
                raise _exceeded(account, needed, now_s)
        wants = [needed + self._slice(account, needed) for account, needed in short]
        if not await self._taken([account for account, _ in short], wants, now_s):
            exact = [needed for _, needed in short]
            if wants == exact or not await self._taken([a for a, _ in short], exact, now_s):
                lacking = [pair for pair in short if pair[0].level(now_s) < pair[1]] or short
                raise max(
                    (_exceeded(account, needed, now_s) for account, needed in lacking),
                    key=lambda refusal: refusal.retry_after_s,
                )

    async def _pay_back(self, account: Account, now_s: float) -> None:
        """Pay what an answer took beyond its reservation, or as much of it as there is."""
        owed = min(-account.held, account.limit)
        if not await self._taken([account], [owed], now_s):
            part = math.floor(min(account.level(now_s), owed))
            if part >= 1:
                await self._taken([account], [part], now_s)

    async def _taken(
        self, accounts: Sequence[Account], amounts: Sequence[float], now_s: float
    ) -> bool:
        """Move amounts from the buckets into the accounts; False: there is too little."""
        buckets = [each.bucket(amount) for each, amount in zip(accounts, amounts)]
        taken = await self._take(buckets, now_s)
        for account, amount, level in zip(accounts, amounts, taken.levels):
            account.saw(level, now_s)
            if taken.is_granted:
                account.hold(amount, now_s)
        return taken.is_granted

    async def _take(self, buckets: Sequence[Bucket], now_s: float) -> Taken:
        if self._shared is not None and now_s >= self._away_until_s:
            try:
                taken = await self._shared.take(buckets, budget_s=BUDGET_S)
            except StateError as error:
                if self._away_until_s == 0.0:
                    log.warning("quotas are counted by each ingress for itself: %s", error)
                self._away_until_s = now_s + AWAY_S
            else:
                if self._away_until_s:
                    log.warning("quotas are counted over all ingresses again")
                self._away_until_s = 0.0
                return taken
        return await self._own.take(buckets)

    def _slice(self, account: Account, needed: float) -> float:
        """What to take in advance: none where no other ingress takes, or where it is no whole."""
        if self._shared is None or self._away_until_s:
            return 0.0
        return min(account.slice, account.limit - needed)

    async def _even_out(self, tenant: str) -> None:
        """Pay what is owed, and return what this ingress has no use for soon."""
        known = self._tenants[tenant]
        async with known.lock:
            now_s = self._clock()
            for account in known.accounts.values():
                kept = account.slice if self._shared is not None else 0.0
                if account.held < 0:
                    await self._pay_back(account, now_s)
                if account.held > 2 * kept and not account.is_over(now_s):
                    spare, account.held = account.held - kept, kept
                    taken = await self._take([account.bucket(-spare)], now_s)
                    account.saw(taken.levels[0], now_s)

    def settled(self, tenant: str, accounts: Iterable[Account], spare: float) -> None:
        """A request of this tenant has not used so much of its reservation; negative: it has used
        more."""
        for account in accounts:
            account.hold(spare, self._clock())
        self._begin(self._tenants[tenant], self._even_out(tenant))

    def _begin(self, tenant: _Tenant, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        tenant.tasks.add(task)
        task.add_done_callback(tenant.tasks.discard)


class _Tenant:
    """The accounts of one tenant at this ingress."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.accounts: dict[str, Account] = {}  # by the name of the bucket
        self.tasks: set[asyncio.Future[None]] = set()

    def update(self, tenant: str, limits: QuotaLimits, now_s: float) -> list[Account]:
        """The accounts of the quotas as they are now; a new day or another limit has a new one."""
        found = []
        for kind in account_kinds(limits):
            new = Account(kind, tenant, getattr(limits, kind.name), day_of(now_s))
            account = self.accounts.get(new.name)
            if account is None:
                account = new
            account.expire(now_s)
            found.append(account)
        self.accounts = {each.name: each for each in found}
        return found


class Reservation:
    """What one request has taken. Settle it once it has ended, as often as more is known."""

    __slots__ = ("_accounts", "_limiter", "_num_tokens", "_tenant")

    def __init__(
        self, limiter: QuotaLimiter, tenant: str, accounts: Sequence[Account], num_tokens: int
    ):
        self._limiter, self._tenant = limiter, tenant
        self._accounts = [each for each in accounts if each.kind.what == "tokens"]
        self._num_tokens = num_tokens

    def settle(self, num_used: int) -> None:
        """The request has used `num_used` tokens in all."""
        spare, self._num_tokens = self._num_tokens - num_used, num_used
        if spare and self._accounts:
            self._limiter.settled(self._tenant, self._accounts, spare)


def _exceeded(account: Account, needed: float, now_s: float) -> QuotaExceeded:
    return QuotaExceeded(account.kind, account.limit, account.wait_s(needed, now_s))
