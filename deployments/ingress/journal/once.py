"""Calls with an idempotency key, for all front ends: a new one begins, a repeated one is found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from penstock.deployments.ingress.core.call import CallContext
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.journal.call_journal import CallJournal
from penstock.deployments.ingress.journal.idempotency import Key
from penstock.deployments.ingress.journal.journals import Journals

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class NewCall(Generic[P]):
    """The first call of its key, checked, with a journal that is kept."""

    prepared: P
    journal: CallJournal


async def once(
    journals: Journals,
    key: Key,
    context: CallContext,
    body: bytes,
    prepare: Callable[[CallContext, CallJournal], Awaitable[P]],
) -> NewCall[P] | str:
    """The new call of `key`, or the id of the call that the key stands for already.

    `prepare` checks the request, and may complete the journal's head. Call `release_unused` when
    the answer of a new call has ended. Raises what `prepare` raises, and ServiceError.
    """
    known = await journals.keys.find(key)
    if known is not None:
        return known
    journal = journals.journal_for(context, key.route, body, has_key=True)
    prepared = await prepare(replace(context, seed=journal.head.seed), journal)
    await journals.begin(journal)
    if not journal.is_kept:
        raise ServiceError("state_unavailable", retry_after_s=2.0)
    known = await journals.keys.claim(key, journal.call_id)
    return NewCall(prepared, journal) if known is None else known


async def release_unused(journals: Journals, key: Key, journal: CallJournal) -> None:
    """Let the key be used again if its call ended before its first token. Never fails."""
    if not journal.has_tokens:
        await journals.keys.release(key)
