"""What a key file says of one key: `KeyRecord`, read from a line and written as one.

A line is a JSON object, a bare key, or `sha256:` and the hex digest of a bare key. Bare keys have
the rights that they had before there were records: everything but what needs the role admin.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from penstock.deployments.security.key_format import KEY_ID, PREFIX, parse_key
from penstock.deployments.security.roles import BARE_KEY_ROLES, Role
from penstock.workers.errors import ConfigError

DIGEST_PREFIX = "sha256:"
MAX_PRIORITY = 100  # the number of the lowest priority; 0 is the highest
MAX_WEIGHT = 1e6
MAX_LIMIT = 10**12  # of a quota
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Of one tenant. Tokens are those of prompts and answers together. None: no limit."""

    requests_per_minute: int | None = None
    requests_per_day: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    @property
    def are_set(self) -> bool:
        return any(getattr(self, name) is not None for name in QUOTA_NAMES)

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that one request may take."""
        limits = (self.tokens_per_minute, self.tokens_per_day)
        return min((each for each in limits if each is not None), default=None)


QUOTA_NAMES = tuple(each.name for each in dataclasses.fields(QuotaLimits))


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for all keys of a tenant together: those of the last line of the tenant.

    `weight`: its share of the capacity beside other tenants that wait.
    """

    weight: float = 1.0
    quotas: QuotaLimits = QuotaLimits()


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key. Times are seconds of Unix time. `digest`: SHA-256 of the secret of a key with an
    id, or of the whole bare key. `max_priority`: the smallest number that requests may name."""

    key_id: str
    digest: bytes
    tenant: str
    roles: frozenset[Role]
    not_before: float | None = None
    expires: float | None = None
    revoked: float | None = None
    terms: Terms = field(default_factory=Terms)
    max_priority: int = 0
    note: str = ""
    is_bare: bool = False

    def as_line(self) -> str:
        """The JSON object of its line. Bare keys have no such line."""
        values: dict[str, Any] = {
            "id": self.key_id,
            "sha256": self.digest.hex(),
            "tenant": self.tenant,
            "roles": sorted(self.roles),
        }
        for name in ("not_before", "expires", "revoked"):
            if (time_s := getattr(self, name)) is not None:
                values[name] = time_text(time_s)
        if self.terms.weight != 1.0:
            values["weight"] = self.terms.weight
        quotas = dataclasses.asdict(self.terms.quotas)
        if set_quotas := {name: limit for name, limit in quotas.items() if limit is not None}:
            values["quotas"] = set_quotas
        if self.max_priority:
            values["max_priority"] = self.max_priority
        if self.note:
            values["note"] = self.note
        return json.dumps(values)


def record_from(line: str) -> KeyRecord:
    """The record of a line. Raises ConfigError that names the field and says what would be right,
    and never repeats a key."""
    if line.startswith("{"):
        return _from_object(line)
    if line.startswith(DIGEST_PREFIX):
        digits = line.removeprefix(DIGEST_PREFIX)
        if not _DIGEST.fullmatch(digits):
            raise ConfigError(
                f"an API key begins with {DIGEST_PREFIX}, and 64 hexadecimal digits must follow; "
                "'printf %s KEY | sha256sum' makes them"
            )
        return _bare(bytes.fromhex(digits))
    if line.startswith(PREFIX) and parse_key(line) is None:
        raise ConfigError(
            f"a key that begins with {PREFIX} has a wrong checksum: it was mistyped or cut; "
            "`penstock keys add` makes a new one"
        )
    return _bare(hashlib.sha256(line.encode()).digest())


def time_text(time_s: float) -> str:
    """ISO 8601, UTC."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_from(text: str) -> float:
    """Unix time of an ISO 8601 date or time, UTC unless it names a zone. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def check_tenant(value: Any) -> str:
    """Raises ValueError."""
    if not (isinstance(value, str) and _TENANT.fullmatch(value)):
        raise ValueError("1 to 64 of A-Z a-z 0-9 . _ -, a letter or digit first")
    return value


@functools.lru_cache(maxsize=4096)
def bare_tenant(digest: bytes) -> str:
    """The name of the tenant of a bare key, the same in every process and after every restart.

    It is shown in queues and written into stored records, so it must not help to find the key: by
    scrypt a guess costs some 20 ms and 8 MB, and by a plain hash a microsecond.
    """
    return (
        "key-" + hashlib.scrypt(digest, salt=b"penstock tenant", n=2**13, r=8, p=1, dklen=6).hex()
    )


def _bare(digest: bytes) -> KeyRecord:
    tenant = bare_tenant(digest)
    return KeyRecord(tenant, digest, tenant, BARE_KEY_ROLES, is_bare=True)


def _from_object(line: str) -> KeyRecord:
    try:
        values = json.loads(line)
    except ValueError:
        raise ConfigError("this line begins with {, and is not a JSON object") from None
    unknown = sorted(set(values) - set(_FIELDS))
    if unknown:
        raise ConfigError(f"field {unknown[0][:40]!a} is unknown; known: {', '.join(_FIELDS)}")
    for name in ("id", "sha256", "tenant", "roles"):
        if name not in values:
            raise ConfigError(f"field {name!r} is missing")
    read: dict[str, Any] = {}
    for name, value in values.items():
        try:
            read[name] = _FIELDS[name](value)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"field {name!r} must be {error}") from None
    return KeyRecord(
        read["id"],
        read["sha256"],
        read["tenant"],
        read["roles"],
        read.get("not_before"),
        read.get("expires"),
        read.get("revoked"),
        Terms(read.get("weight", 1.0), read.get("quotas", QuotaLimits())),
        read.get("max_priority", 0),
        read.get("note", ""),
    )


def _id(value: Any) -> str:
    if not (isinstance(value, str) and KEY_ID.fullmatch(value)):
        raise ValueError("1 to 32 of A-Z a-z 0-9 -")
    return value


def _sha256(value: Any) -> bytes:
    if not (isinstance(value, str) and _DIGEST.fullmatch(value)):
        raise ValueError("64 hexadecimal digits, the SHA-256 of the secret")
    return bytes.fromhex(value)


def _roles(value: Any) -> frozenset[Role]:
    if not isinstance(value, list) or not value or not set(map(str, value)) <= set(Role):
        raise ValueError(f"a list of one or more of {', '.join(Role)}")
    return frozenset(map(Role, value))


def _time(value: Any) -> float:
    try:
        return time_from(value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError("a date or time as 2027-01-31 or 2027-01-31T12:00:00Z") from None


def check_weight(value: Any) -> float:
    """Raises ValueError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and 0 < value <= MAX_WEIGHT):
        raise ValueError(f"a number above 0, up to {MAX_WEIGHT:g}")
    return float(value)


def _whole(value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"a whole number from {low} to {high}")
    return value


def _quotas(value: Any) -> QuotaLimits:
    if not isinstance(value, Mapping) or not set(value) <= set(QUOTA_NAMES):
        raise ValueError(f"an object of {', '.join(QUOTA_NAMES)}")
    return QuotaLimits(**{name: _whole(limit, 1, MAX_LIMIT) for name, limit in value.items()})


def _note(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise ValueError("a text of up to 200 printable characters")
    return value


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "id": _id,
    "sha256": _sha256,
    "tenant": check_tenant,
    "roles": _roles,
    "not_before": _time,
    "expires": _time,
    "revoked": _time,
    "weight": check_weight,
    "quotas": _quotas,
    "max_priority": lambda value: _whole(value, 0, MAX_PRIORITY),
    "note": _note,
}
