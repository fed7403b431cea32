"""Faults in the product itself, put in on purpose: with each, a row of the table must fail.

They show that the harness bites. The pool of a desk lives in this process, so that they patch it
here.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from penstock.deployments.ingress.dispatch.in_flight import InFlightRequest
from penstock.deployments.ingress.dispatch.worker_link import WorkerLink
from penstock.workers.channel.framing import MessageConnection


@contextlib.contextmanager
def patched(owner: type, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """While it holds, `function` gets the method that it replaces, and then its arguments."""
    original = getattr(owner, name)

    def instead(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, original)


def seed_drawn_anew() -> AbstractContextManager[None]:
    """A continuation draws other random numbers."""

    def continued(original: Callable[..., None], call: InFlightRequest) -> None:
        original(call)
        params = replace(call.request.params, seed=random.getrandbits(32))
        call.admission = replace(call.admission, request=replace(call.request, params=params))

    return patched(InFlightRequest, "continue_after_emitted", continued)


def one_token_forgotten() -> AbstractContextManager[None]:
    """A continuation begins one token too early."""

    def continued(original: Callable[..., None], call: InFlightRequest) -> None:
        original(call)
        request = replace(call.request, emitted_ids=call.request.emitted_ids[:-1])
        call.admission = replace(call.admission, request=request)

    return patched(InFlightRequest, "continue_after_emitted", continued)


def delta_taken_twice() -> AbstractContextManager[None]:
    """Each fifth delta counts twice."""
    num = 0

    def taken(original: Callable[..., None], link: Any, call: Any, delta: Any, now_s: Any) -> None:
        nonlocal num
        num += 1
        if num % 5 == 0 and delta.finish_reason is None:
            original(link, call, replace(delta, token_ids=list(delta.token_ids)), now_s)
        original(link, call, delta, now_s)

    return patched(WorkerLink, "_take", taken)


@contextlib.contextmanager
def no_fence() -> Iterator[None]:
    """What a worker sends after it was given up still counts for its requests."""

    def ended(original: Callable[..., None], connection: Any, why: str) -> None:
        if why != "this end closes it":
            original(connection, why)

    def broken(original: Callable[..., None], link: WorkerLink) -> None:
        calls = dict(link._calls)
        original(link)
        link._calls |= calls

    with patched(MessageConnection, "end", ended), patched(WorkerLink, "_break", broken):
        yield


MUTATIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "seed-drawn-anew": seed_drawn_anew,
    "one-token-forgotten": one_token_forgotten,
    "delta-taken-twice": delta_taken_twice,
    "no-fence": no_fence,
}
