"""Keys for tests: the text that a client sends, and the line of a server's file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from penstock.deployments.security.key_format import new_key
from penstock.deployments.security.records import KeyRecord, QuotaLimits, Terms
from penstock.deployments.security.roles import Role


def key_of(
    tenant: str = "acme",
    roles: Iterable[Role] = (Role.INFER,),
    *,
    quotas: QuotaLimits | None = None,
    weight: float = 1.0,
    **fields: Any,
) -> tuple[str, KeyRecord]:
    """A new key: its text, and its record. `fields`: of the record."""
    key = new_key()
    terms = Terms(weight, quotas or QuotaLimits())
    record = KeyRecord(key.key_id, key.digest, tenant, frozenset(roles), terms=terms)
    return key.text, replace(record, **fields)


def bearer(key: str) -> dict[str, str]:
    """The header of a request."""
    return {"authorization": f"Bearer {key}"}
