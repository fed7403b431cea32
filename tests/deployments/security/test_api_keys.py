"""Who a key is: by id, in time, with its roles; every refusal says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.deployments.security.api_keys import ANYONE, ApiKeys, check_access
from penstock.deployments.security.key_format import new_key
from penstock.deployments.security.records import QuotaLimits, Terms
from penstock.deployments.security.roles import Access, Role
from penstock.workers.request import RequestError
from tests.deployments.security.keys import key_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def code_of(keys: ApiKeys, authorization: str | None) -> tuple[str, str]:
    with pytest.raises(RequestError) as refused:
        keys.caller(authorization)
    return refused.value.code, refused.value.message


def test_without_keys_every_caller_may_do_all() -> None:
    assert ApiKeys().caller(None) == ANYONE == ApiKeys().caller("Bearer x")
    assert all(ANYONE.may(need) for need in (*Role, *Access, None))


def test_keys_of_one_tenant_are_one_tenant() -> None:
    first, old = key_of("acme")
    second, new = key_of("acme", [Role.METRICS])
    keys = ApiKeys((old, new))
    one, two = keys.caller(f"Bearer {first}"), keys.caller(f"bearer {second}")
    assert one.tenant == two.tenant == "acme"
    assert one.key_id != two.key_id and one.roles != two.roles


def test_what_is_no_valid_key_is_refused_with_the_reason() -> None:
    text, record = key_of()
    keys = ApiKeys((record, "bare"))
    forged = new_key(record.key_id).text  # the id is known, the secret is another
    for offered, says in (
        (None, "requires an API key"),
        ("", "requires an API key"),
        ("Bearer ", "requires an API key"),
        (f"Basic {text}", "send the API key as"),
        (f"Bearer {text[:-1]}", "mistyped or cut"),
        (f"Bearer {forged}", "not known"),
        (f"Bearer {new_key().text}", "not known"),
        ("Bearer bar", "not known"),
        ("Bearer \udcff", "not known"),
    ):
        code, message = code_of(keys, offered)
        assert code == "invalid_api_key" and says in message, offered


def test_a_key_is_valid_from_not_before_until_it_expires_or_is_revoked() -> None:
    clock = Clock()
    text, record = key_of(not_before=1010.0, expires=1020.0)
    keys = ApiKeys((record,), clock=clock)
    assert code_of(keys, f"Bearer {text}")[0] == "api_key_not_yet_valid"
    clock.now_s = 1010.0
    assert keys.caller(f"Bearer {text}").key_id == record.key_id
    assert keys.ended(record.key_id, "acme") is None
    clock.now_s = 1020.0
    code, message = code_of(keys, f"Bearer {text}")
    assert code == "api_key_expired" and "1970-01-01T00:17:00Z" in message
    assert keys.ended(record.key_id, "acme") == "api_key_expired"
    keys.replace((replace(record, revoked=1015.0),))
    assert code_of(keys, f"Bearer {text}")[0] == "api_key_revoked"
    assert code_of(keys, f"Bearer {new_key(record.key_id).text}")[0] == "invalid_api_key"


def test_a_server_with_keys_never_opens() -> None:
    text, record = key_of()
    keys = ApiKeys((record,))
    keys.replace(())
    assert code_of(keys, f"Bearer {text}")[0] == "invalid_api_key"
    assert code_of(keys, None)[0] == "invalid_api_key"
    assert keys.ended(record.key_id, "acme") == "api_key_revoked"


def test_the_last_line_of_a_tenant_that_is_not_revoked_has_its_terms() -> None:
    small, large = Terms(1.0, QuotaLimits(requests_per_minute=1)), Terms(3.0, QuotaLimits())
    (_, first), (_, second), (_, third) = key_of(), key_of(), key_of("other")
    keys = ApiKeys((replace(first, terms=small), replace(second, terms=large), third))
    assert keys.terms("acme") == large and not keys.have_quotas
    keys.replace((replace(first, terms=small), replace(second, terms=large, revoked=5.0)))
    assert keys.terms("acme") == small and keys.have_quotas
    assert keys.terms("nobody") == Terms()


def test_roles() -> None:
    (_, some), (_, admin) = key_of(roles=[Role.INFER]), key_of(roles=[Role.ADMIN])
    keys = ApiKeys((some, admin))
    one, two = (replace(ANYONE, roles=each.roles) for each in keys.records)
    assert [one.may(need) for need in (*Role, Access.ANY_KEY, None)] == [
        *(True, False, False, False),
        *(True, False),
    ]
    assert all(two.may(need) for need in (*Role, *Access, None))
    for need, role in ((Role.QUEUE, "queue"), (None, "admin")):
        with pytest.raises(RequestError, match=f"GET /x needs a key with the role {role}") as no:
            check_access(one, need, "GET /x")
        assert no.value.code == "permission_denied"
