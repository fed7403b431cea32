"""Responses in the state store: what any ingress may be asked for, as bytes of the front end."""

from __future__ import annotations

import contextlib

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.state.store import ANY, Conflict, StateError, Store

TTL_S = 3600.0  # of a response that has ended
RUNNING_TTL_S = 24 * 3600.0
BUDGET_S = 0.5
END_BUDGET_S = 2.0  # its client may go on from it: better a late last event than none to go on from


class ResponseValues:
    """Value `response/{id}` of each. Raises ServiceError state_unavailable."""

    def __init__(self, store: Store, ttl_s: float = TTL_S):
        self._store = store
        self._ttl_s = ttl_s

    async def get(self, call_id: str) -> tuple[bytes, int] | None:
        """The value and its version."""
        try:
            found = await self._store.get(f"response/{call_id}", budget_s=BUDGET_S)
            return None if found is None else (found.value, found.version)
        except ValueError:  # no id that this server made
            return None
        except StateError:
            raise _unavailable() from None

    async def put(
        self,
        call_id: str,
        value: bytes,
        *,
        is_running: bool = False,
        expect: int | None = None,
    ) -> int | None:
        """The new version; None: the version is not the expected one, or the value is too large."""
        ttl_s = RUNNING_TTL_S if is_running else self._ttl_s
        budget_s = BUDGET_S if is_running else END_BUDGET_S
        try:
            return await self._store.put(
                f"response/{call_id}",
                value,
                ttl_s=ttl_s,
                expect=ANY if expect is None else expect,
                budget_s=budget_s,
            )
        except (Conflict, ValueError):
            return None
        except StateError:
            raise _unavailable() from None

    async def delete(self, call_id: str) -> None:
        try:
            with contextlib.suppress(ValueError):
                await self._store.delete(f"response/{call_id}", budget_s=BUDGET_S)
        except StateError:
            raise _unavailable() from None


def _unavailable() -> ServiceError:
    return ServiceError("state_unavailable", retry_after_s=2.0)
