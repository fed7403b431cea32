"""Idempotency keys: which call a client's key stands for, for a day.

A key belongs to a principal and a path. The same key with another body is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any

import orjson

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.state.store import (
    ABSENT,
    Conflict,
    StateDown,
    StateError,
    StateFull,
    Store,
    Versioned,
)
from penstock.workers.request import RequestError

TTL_S = 24 * 3600.0
BUDGET_S = 0.5
MAX_KEY_CHARS = 255


def checked_key(key: str) -> str:
    """Raises RequestError."""
    if not (key.isascii() and key.isprintable() and 1 <= len(key) <= MAX_KEY_CHARS):
        raise RequestError(
            f"Idempotency-Key must be 1 to {MAX_KEY_CHARS} printable ASCII characters",
            param="Idempotency-Key",
        )
    return key


def fingerprint(path: str, content: bytes) -> str:
    """Of a request, whatever the order of its fields. Raises RequestError invalid_json."""
    try:
        body = orjson.dumps(orjson.loads(content), option=orjson.OPT_SORT_KEYS)
    except orjson.JSONDecodeError:
        raise RequestError("the body is not valid JSON", code="invalid_json") from None
    return hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).hexdigest()


class IdempotencyKeys:
    """The keys in a store. `find` and `claim` raise ServiceError state_unavailable."""

    def __init__(self, store: Store, ttl_s: float = TTL_S):
        self._store = store
        self._ttl_s = ttl_s

    async def find(self, principal: str, path: str, key: str, digest: str) -> str | None:
        """The call that the key stands for; None: it is new.

        Raises ServiceError idempotency_key_reused if the request was another one.
        """
        try:
            found = await self._store.get(_name(principal, path, key), budget_s=BUDGET_S)
        except (StateDown, StateFull):
            raise _unavailable() from None
        return None if found is None else _call_of(found, digest)

    async def claim(
        self, principal: str, path: str, key: str, digest: str, call_id: str
    ) -> str | None:
        """Let the key stand for `call_id`. The call of another request that was first; else None.

        Raises ServiceError idempotency_key_reused if that request was another one.
        """
        value = json.dumps({"call": call_id, "digest": digest}).encode()
        name = _name(principal, path, key)
        try:
            await self._store.put(name, value, ttl_s=self._ttl_s, expect=ABSENT, budget_s=BUDGET_S)
        except Conflict:
            return await self.find(principal, path, key, digest)
        except (StateDown, StateFull):
            raise _unavailable() from None
        return None

    async def release(self, principal: str, path: str, key: str) -> None:
        """The call ended before its first token: the key may be used again. Never fails."""
        with contextlib.suppress(StateError):
            await self._store.delete(_name(principal, path, key), budget_s=BUDGET_S)


def _name(principal: str, path: str, key: str) -> str:
    parts = json.dumps([principal, path, key]).encode()
    return f"once/{hashlib.blake2b(parts, digest_size=16).hexdigest()}"


def _call_of(found: Versioned, digest: str) -> str:
    value: dict[str, Any] = json.loads(found.value)
    if value["digest"] != digest:
        raise ServiceError("idempotency_key_reused")
    return str(value["call"])


def _unavailable() -> ServiceError:
    return ServiceError("state_unavailable", retry_after_s=2.0)
