"""Lines of key files: what is written is read back, and an error names the line and the field."""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deployments.security.key_file import parse_key_file
from penstock.deployments.security.records import (
    KeyRecord,
    QuotaLimits,
    Terms,
    bare_tenant,
    record_from,
)
from penstock.deployments.security.roles import Role
from penstock.workers.errors import ConfigError

GOOD: dict[str, Any] = {"id": "a1", "sha256": "0" * 64, "tenant": "acme", "roles": ["infer"]}

limits = st.none() | st.integers(1, 10**12)
moments = st.none() | st.integers(0, 4 * 10**9).map(float)
records = st.builds(
    KeyRecord,
    st.from_regex(r"[A-Za-z0-9-]{1,32}", fullmatch=True),
    st.binary(min_size=32, max_size=32),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    st.frozensets(st.sampled_from(Role), min_size=1),
    moments,
    moments,
    moments,
    st.builds(
        Terms,
        st.floats(1e-9, 1e6),
        st.builds(QuotaLimits, limits, limits, limits, limits),
    ),
    st.integers(0, 100),
    st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=200),
)


@given(records)
def test_a_record_is_read_as_it_was_written(record: KeyRecord) -> None:
    assert record_from(record.as_line()) == record


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists), st.text())
def test_any_other_value_is_taken_or_is_a_config_error(value: Any, name: str) -> None:
    for field in ("id", "sha256", "tenant", "roles", "expires", "weight", "quotas", name):
        with contextlib.suppress(ConfigError):  # and no other exception
            record_from(json.dumps({**GOOD, field: value}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "a_b"}, "'id' must be 1 to 32 of"),
        ({"sha256": "12"}, "'sha256' must be 64 hexadecimal"),
        ({"tenant": ""}, "'tenant' must be 1 to 64"),
        ({"tenant": "batch:x"}, "'tenant'"),
        ({"roles": []}, "'roles' must be a list of one or more of infer, metrics, queue, admin"),
        ({"roles": ["root"]}, "'roles'"),
        ({"expires": "soon"}, "'expires' must be a date or time as 2027-01-31"),
        ({"expires": 5}, "'expires'"),
        ({"weight": 0}, "'weight' must be a number above 0"),
        ({"weight": True}, "'weight'"),
        ({"quotas": {"requests": 5}}, "'quotas' must be an object of requests_per_minute"),
        ({"quotas": {"tokens_per_day": 0}}, "'quotas' must be a whole number from 1"),
        ({"max_priority": 101}, "'max_priority' must be a whole number from 0 to 100"),
        ({"note": "a\nb"}, "'note' must be a text of up to 200"),
        ({"secret": "x"}, "'secret' is unknown; known: id, sha256"),
    ],
)
def test_errors_name_line_and_field(change: dict[str, Any], says: str) -> None:
    text = f"# keys\n\n{json.dumps({**GOOD, **change})}\n"
    with pytest.raises(ConfigError) as refused:
        parse_key_file(text, "api_keys_file keys")
    assert str(refused.value).startswith("api_keys_file keys, line 3: field ")
    assert says in str(refused.value)


def test_missing_fields_doubled_ids_and_broken_lines_are_errors() -> None:
    for name in GOOD:
        with pytest.raises(ConfigError, match=f"line 1: field '{name}' is missing"):
            parse_key_file(json.dumps({k: v for k, v in GOOD.items() if k != name}), "f")
    with pytest.raises(ConfigError, match="line 2: field 'id' must be unique, and line 1 has a1"):
        parse_key_file(f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}", "f")
    with pytest.raises(ConfigError, match="line 1: this line begins with"):
        parse_key_file('{"id": ', "f")
    with pytest.raises(ConfigError, match="line 2: a key that begins with psk_") as refused:
        parse_key_file("bare\npsk_abc_secretsecretsecretsecret_00000000", "f")
    assert "secret" not in str(refused.value)


def test_a_bare_key_and_its_digest_are_the_same_tenant_whose_name_is_no_part_of_the_hash() -> None:
    digest = hashlib.sha256(b"hunter2")
    bare, hashed = record_from("hunter2"), record_from(f"sha256:{digest.hexdigest()}")
    assert bare == hashed and bare.is_bare
    assert bare.roles == {Role.INFER, Role.METRICS, Role.QUEUE}
    assert bare.tenant == bare_tenant(digest.digest()) == "key-" + bare.tenant.removeprefix("key-")
    assert bare.tenant.removeprefix("key-") not in digest.hexdigest()
    # The same in every process, release and ingress: stored records have it.
    assert bare.tenant == "key-5fa587704f8b"
