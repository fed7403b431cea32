"""Idempotency keys: which call, or batch, a client's key stands for, for a day.

A key belongs to a principal and a route: a path, or a gRPC method. The same key with another body
is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
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


def checked_key(key: str, name: str = "Idempotency-Key") -> str:
    """`name`: what the front end calls it. Raises RequestError."""
    if not (key.isascii() and key.isprintable() and 1 <= len(key) <= MAX_KEY_CHARS):
        raise RequestError(
            f"{name} must be 1 to {MAX_KEY_CHARS} printable ASCII characters", param=name
        )
    return key


def fingerprint_of_json(path: str, content: bytes) -> str:
    """Of a request, whatever the order of its fields. Raises RequestError invalid_json."""
    try:
        body = orjson.dumps(orjson.loads(content), option=orjson.OPT_SORT_KEYS)
    except orjson.JSONDecodeError:
        raise RequestError("the body is not valid JSON", code="invalid_json") from None
    return fingerprint(path, body)


def fingerprint(route: str, content: bytes) -> str:
    """Of a request whose content has one form only."""
    return hashlib.blake2b(route.encode() + b"\0" + content, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Key:
    """A client's key, where it holds, and the fingerprint of the request that has it."""

    principal: str
    route: str
    key: str
    digest: str

    @property
    def name(self) -> str:
        """In the store."""
        parts = json.dumps([self.principal, self.route, self.key]).encode()
        return f"once/{hashlib.blake2b(parts, digest_size=16).hexdigest()}"


class IdempotencyKeys:
    """The keys in a store. `find` and `claim` raise ServiceError state_unavailable."""

    def __init__(self, store: Store, ttl_s: float = TTL_S):
        self._store = store
        self._ttl_s = ttl_s

    async def find(self, key: Key) -> str | None:
        """The id of what the key stands for; None: it is new.

        Raises ServiceError idempotency_key_reused if the request was another one.
        """
        try:
            found = await self._store.get(key.name, budget_s=BUDGET_S)
        except (StateDown, StateFull):
            raise _unavailable() from None
        return None if found is None else _id_of(found, key.digest)

    async def claim(self, key: Key, new_id: str) -> str | None:
        """Let the key stand for `new_id`. The id of another request that was first; else None.

        Raises ServiceError idempotency_key_reused if that request was another one.
        """
        value = json.dumps({"call": new_id, "digest": key.digest}).encode()
        try:
            await self._store.put(
                key.name, value, ttl_s=self._ttl_s, expect=ABSENT, budget_s=BUDGET_S
            )
        except Conflict:
            return await self.find(key)
        except (StateDown, StateFull):
            raise _unavailable() from None
        return None

    async def release(self, key: Key) -> None:
        """Nothing came of the request: the key may be used again. Never fails."""
        with contextlib.suppress(StateError):
            await self._store.delete(key.name, budget_s=BUDGET_S)


def _id_of(found: Versioned, digest: str) -> str:
    value: dict[str, Any] = json.loads(found.value)
    if value["digest"] != digest:
        raise ServiceError("idempotency_key_reused")
    return str(value["call"])


def _unavailable() -> ServiceError:
    return ServiceError("state_unavailable", retry_after_s=2.0)
