"""What a server refuses though it answers: it is full, or its ACL forbids a command.

The connection is well then, so link.py has no fault to report.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from penstock.deployments.state.redis.plans import Refused
from penstock.deployments.state.store import StateFull

WRITES = frozenset({"put", "append", "take"})  # which a full server refuses; a delete it takes

log = logging.getLogger("penstock.state")


class Refusals:
    """The last refusal of each verb, until the verb succeeds."""

    def __init__(self) -> None:
        self._by_verb: dict[str, StateFull | Refused] = {}

    @property
    def fault(self) -> str | None:
        """The one that was seen first; None: nothing is refused."""
        return next(map(str, self._by_verb.values()), None)

    @contextlib.contextmanager
    def noted(self, verb: str) -> Iterator[None]:
        """Around one call of `verb`. What it raises is raised."""
        before = self.fault
        try:
            yield
            self._succeeded(verb)
        except (StateFull, Refused) as error:
            self._by_verb[verb] = error
            raise
        finally:
            self._log(before)

    def _succeeded(self, verb: str) -> None:
        self._by_verb.pop(verb, None)
        if verb in WRITES:  # the room that there is again is there for all
            full = [each for each, error in self._by_verb.items() if isinstance(error, StateFull)]
            for each in full:
                del self._by_verb[each]

    def _log(self, before: str | None) -> None:
        if (now := self.fault) == before:
            return
        if now is None:
            log.info("Redis takes all calls again")
        else:
            log.warning("%s", now)
