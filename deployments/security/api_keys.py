"""`ApiKeys`: the keys that are accepted now, and who the caller with a key is.

The HTTP and gRPC front ends pass the value of their `authorization` field. Secrets are kept as
digests and compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.deployments.security.key_format import PREFIX, parse_key
from penstock.deployments.security.records import KeyRecord, Terms, record_from, time_text
from penstock.deployments.security.roles import ALL_ROLES, Access, Need, Role
from penstock.workers.request import RequestError

MISSING, EXPIRED, REVOKED, NOT_YET, FORBIDDEN = (
    *("invalid_api_key", "api_key_expired", "api_key_revoked", "api_key_not_yet_valid"),
    "permission_denied",
)
NO_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `tenant`: its public name, the principal of its requests; "": there are no keys.

    `key_id`: of the key that was shown; "": none was asked for.
    """

    tenant: str = ""
    key_id: str = ""
    roles: frozenset[Role] = ALL_ROLES
    max_priority: int = 0

    @property
    def sees_all(self) -> bool:
        """Whether it may see what belongs to other tenants."""
        return Role.ADMIN in self.roles

    def may(self, need: Need | None) -> bool:
        """Whether its roles are enough. None: what no table knows, which is for the admin."""
        if isinstance(need, Access):
            return True
        return Role.ADMIN in self.roles or (need is not None and need in self.roles)


ANYONE = Caller()  # of a server without keys
NOBODY = Caller(roles=frozenset())  # without a key, where that is allowed


class ApiKeys:
    """The accepted keys. Made without keys, it accepts every caller, for ever.

    Lives on the event loop of an ingress; `replace` takes the keys of a file that has changed.
    """

    def __init__(
        self, keys: Iterable[str | KeyRecord] = (), *, clock: Callable[[], float] = time.time
    ):
        """`keys`: lines of a key file, or records. `clock`: Unix time in seconds. Raises
        ConfigError."""
        records = [record_from(each) if isinstance(each, str) else each for each in keys]
        self.is_open = not records  # every caller is accepted; never changes
        self._clock = clock
        self._nobodys = secrets.token_bytes(32)  # compared where an id is unknown
        self.replace(records)

    def replace(self, records: Sequence[KeyRecord]) -> None:
        """From now on these, and no others."""
        self.records = tuple(records)
        self._by_id = {each.key_id: each for each in records if not each.is_bare}
        self._bare = [each for each in records if each.is_bare]
        self._ids = {each.key_id: each for each in records}
        # The last line of a tenant that is not revoked says what holds for the tenant.
        self._terms = {each.tenant: each.terms for each in records if each.revoked is None}

    def caller(self, authorization: str | None) -> Caller:
        """Who holds the key in 'Bearer <key>'. Raises RequestError with one of the 401 codes."""
        if self.is_open:
            return ANYONE
        record = self._record_of(authorization)
        code = self._refusal(record)
        if code is not None:
            raise RequestError(_message(code, record), code=code)
        return _caller(record)

    def terms(self, tenant: str) -> Terms:
        """The weight and the quotas of a tenant; the default for one without keys."""
        return self._terms.get(tenant, NO_TERMS)

    @property
    def have_quotas(self) -> bool:
        return any(terms.quotas.are_set for terms in self._terms.values())

    def ended(self, key_id: str, tenant: str) -> str | None:
        """Why the running requests of a key of this tenant have to end: one of the 401 codes; None:
        they may go on."""
        record = self._ids.get(key_id)
        if self.is_open or not key_id:
            return None
        if record is None or record.tenant != tenant:
            return REVOKED
        return self._refusal(record)

    def _record_of(self, authorization: str | None) -> KeyRecord:
        """The record of the key that is offered. Raises RequestError invalid_api_key."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        parsed = parse_key(key)
        found: KeyRecord | None = None
        if parsed is not None:
            known = self._by_id.get(parsed.key_id)
            digest = self._nobodys if known is None else known.digest
            found = known if hmac.compare_digest(parsed.digest, digest) else None
        offered = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        for each in self._bare:  # compare with all: the time must not reveal a near match
            if hmac.compare_digest(offered, each.digest):
                found = each
        if found is not None and scheme.lower() == "bearer":
            return found
        if authorization is None or not key:
            message = "this server requires an API key: 'Authorization: Bearer <key>'"
        elif scheme.lower() != "bearer":
            message = "send the API key as 'Authorization: Bearer <key>'"
        elif key.startswith(PREFIX) and parsed is None:
            message = "this API key was mistyped or cut: its checksum is wrong"
        else:
            message = "this API key is not known to this server"
        raise RequestError(message, code=MISSING)

    def _refusal(self, record: KeyRecord) -> str | None:
        now_s = self._clock()
        if record.revoked is not None and record.revoked <= now_s:
            return REVOKED
        if record.expires is not None and record.expires <= now_s:
            return EXPIRED
        if record.not_before is not None and record.not_before > now_s:
            return NOT_YET
        return None


def check_access(caller: Caller, need: Need | None, what: str) -> None:
    """Raise RequestError permission_denied unless the caller may do `what`, which asks for
    `need`."""
    if not caller.may(need):
        role = Role.ADMIN if need is None else need
        raise RequestError(f"{what} needs a key with the role {role}", code=FORBIDDEN)


def _caller(record: KeyRecord) -> Caller:
    return Caller(record.tenant, record.key_id, record.roles, record.max_priority)


def _message(code: str, record: KeyRecord) -> str:
    if code == REVOKED:
        return f"the API key {record.key_id} was revoked"
    if code == EXPIRED:
        return f"the API key {record.key_id} expired at {time_text(record.expires or 0.0)}"
    return f"the API key {record.key_id} is valid from {time_text(record.not_before or 0.0)} on"
