"""Quotas in the request core: what a call reserves before it runs, and what it has used at its end.

A call without quotas has no bill, and costs nothing here.
"""

from __future__ import annotations

import asyncio

from penstock.deployments.ingress.core.call import TokenUsage
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.security.accounts import reset_text
from penstock.deployments.security.api_keys import ApiKeys
from penstock.deployments.security.quotas import (
    QuotaExceeded,
    QuotaLimiter,
    QuotaTooSmall,
    Reservation,
    check_size,
)
from penstock.deployments.security.records import QuotaLimits
from penstock.workers.request import RequestError

FIRST_GUESS_TOKENS = 256  # of an answer without max_tokens, before any was seen
BATCH_PREFIX = "batch:"  # of the principal of a tenant's batches


def tenant_of(principal: str) -> str:
    """Whose quotas and weight count for a principal."""
    return principal.removeprefix(BATCH_PREFIX)


class Billing:
    """The quotas of all tenants of one ingress. Lives on its event loop."""

    def __init__(self, keys: ApiKeys, limiter: QuotaLimiter):
        self.keys = keys
        self._limiter = limiter
        self._mean_answer: dict[str, float] = {}  # tokens, by tenant

    def weight(self, principal: str) -> float:
        """The share of the capacity that a principal has beside others that wait."""
        return self.keys.terms(tenant_of(principal)).weight

    def bill(
        self, principal: str, num_prompt: int, max_tokens: int | None, num_answers: int
    ) -> Bill | None:
        """Of a call; None: its tenant has no quotas. `max_tokens`: of each answer, as the client
        says; None: it does not, and an answer is expected to be as long as the tenant's others; 0:
        there is none, as where prompts are embedded. Raises RequestError quota_too_small."""
        tenant = tenant_of(principal)
        limits = self.keys.terms(tenant).quotas
        if not limits.are_set:
            return None
        limit = limits.max_tokens
        if max_tokens is not None:
            num_expected = max_tokens * num_answers
        else:
            num_expected = round(self._mean_answer.get(tenant, FIRST_GUESS_TOKENS)) * num_answers
            if limit is not None:
                # A guess is no reason to refuse for good: such a request waits for the whole quota.
                num_expected = max(num_answers, min(num_expected, limit - num_prompt))
        try:
            check_size(limits, num_prompt + num_expected)
        except QuotaTooSmall as refusal:
            raise RequestError(str(refusal), param="max_tokens", code="quota_too_small") from None
        return Bill(self, tenant, limits, num_prompt, num_prompt + num_expected)

    async def reserve(self, tenant: str, limits: QuotaLimits, num_tokens: int) -> Reservation:
        """Raises ServiceError rate_limit_exceeded."""
        try:
            return await self._limiter.reserve(tenant, limits, num_tokens)
        except QuotaExceeded as refusal:
            raise ServiceError(
                "rate_limit_exceeded", str(refusal), retry_after_s=refusal.retry_after_s
            ) from None

    def answered(self, tenant: str, num_tokens: int) -> None:
        """Learn the length of an answer of this tenant, in tokens."""
        mean = self._mean_answer.get(tenant, FIRST_GUESS_TOKENS)
        self._mean_answer[tenant] = mean + 0.1 * (num_tokens - mean)

    def headers(self, principal: str) -> list[tuple[bytes, bytes]]:
        """The headers that tell a client what is left; none without quotas."""
        tenant = tenant_of(principal)
        limits = self.keys.terms(tenant).quotas
        if not limits.are_set:
            return []
        values: list[tuple[str, str, str]] = []
        for each in self._limiter.status(tenant, limits):
            values += [
                ("limit", each.what, str(each.limit)),
                ("remaining", each.what, str(each.remaining)),
                ("reset", each.what, reset_text(each.reset_s)),
            ]
        return [
            (f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, what, value in values
        ]


class Bill:
    """What the answers to one prompt cost together."""

    def __init__(
        self,
        billing: Billing,
        tenant: str,
        limits: QuotaLimits,
        num_prompt: int,
        num_expected: int,
    ):
        self._billing, self._tenant, self._limits = billing, tenant, limits
        self._num_prompt, self._num_expected = num_prompt, num_expected
        self._has_answers = num_expected > num_prompt
        self._reserving: asyncio.Future[Reservation] | None = None
        self._num_open = 0
        self._num_used = 0

    async def begin(self) -> None:
        """One answer begins; the first one takes for all. Raises ServiceError."""
        if self._reserving is None:
            self._reserving = asyncio.ensure_future(
                self._billing.reserve(self._tenant, self._limits, self._num_expected)
            )
        self._num_open += 1
        try:
            await asyncio.shield(self._reserving)  # others may wait for it, too
        except BaseException:
            self._num_open -= 1
            if not self._num_open:  # its client has left, and what is taken then goes back
                self._reserving.add_done_callback(self._settle)
            raise

    def ended(self, usage: TokenUsage, *, is_computed: bool) -> None:
        """An answer that has begun is over. `is_computed`: a worker had its prompt."""
        assert self._reserving is not None
        self._num_open -= 1
        self._num_used += usage.completion_tokens
        if is_computed:
            self._num_used += self._num_prompt
            self._num_prompt = 0
            if self._has_answers:
                self._billing.answered(self._tenant, usage.completion_tokens)
        if not self._num_open:
            self._settle(self._reserving)

    def _settle(self, reserving: asyncio.Future[Reservation]) -> None:
        if not reserving.cancelled() and reserving.exception() is None and not self._num_open:
            reserving.result().settle(self._num_used)
