"""Streams whose events have numbers: the same events at each try, so that any can be continued.

An answer with a journal comes in pieces of one token. So its events, and their numbers, depend on
the tokens alone, whatever process renders them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.deployments.ingress.core.call import TextDelta
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.http.events import server_sent
from penstock.deployments.ingress.journal.call_journal import CallJournal
from penstock.deployments.ingress.journal.received import Delivery


class NumberedEvents:
    """Turns the events of one answer into frames, without those that the client has."""

    def __init__(self, delivery: Delivery | None = None, after: int = -1):
        """`delivery`: of a call with a journal: frames have ids. `after`: the last number that the
        client has."""
        self._delivery, self._after = delivery, after
        self._next = 0

    @classmethod
    def of(cls, journal: CallJournal | None, generation: Generation) -> NumberedEvents:
        """Raises RequestError if the client has more answers than one."""
        if journal is None:
            return cls()
        return cls(journal.delivery([generation], by_token=True), journal.after)

    def count(self, piece: TextDelta) -> None:
        """The events that follow are of `piece`. Raises ServiceError resume_mismatch."""
        if self._delivery is not None:
            self._delivery.is_new(0, piece)

    def frames(self, events: Sequence[dict[str, Any]]) -> Iterator[bytes]:
        """Those of `events`, each with its `type`, that the client does not have."""
        for event in events:
            number, self._next = self._next, self._next + 1
            if number > self._after:
                event_id = None if self._delivery is None else self._delivery.event_id(number)
                yield server_sent(event, event["type"], event_id)

    @staticmethod
    def unnamed(events: Sequence[dict[str, Any]]) -> Iterator[bytes]:
        """Events after which a stream cannot be continued, such as its failure."""
        for event in events:
            yield server_sent(event, event["type"])
