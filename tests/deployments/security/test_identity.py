"""The identity in a certificate, and its check: whatever is not exactly right is refused."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from penstock.deployments.security.authority import new_authority, new_leaf
from penstock.deployments.security.identity import (
    CLUSTER_ROLES,
    ROLES,
    Identity,
    WrongPeer,
    check_peer,
    identity_of,
)
from penstock.workers.errors import ConfigError

KEY = ec.generate_private_key(ec.SECP256R1())
AUTHORITY = new_authority("east")


def certificate(uris: Sequence[str] | None) -> bytes:
    """DER of a certificate with these URIs; None: without the extension."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "penstock://east/worker/all")])
    now = datetime.datetime(2026, 1, 1)
    builder = (
        x509.CertificateBuilder(name, name, KEY.public_key(), 7)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=9999))
    )
    if uris is not None:
        names = [x509.DNSName("localhost"), *map(x509.UniformResourceIdentifier, uris)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def leaf(identity: Identity) -> bytes:
    made = new_leaf(AUTHORITY, identity, days=1).certificate
    return made.public_bytes(serialization.Encoding.DER)


def test_the_right_peer_is_known():
    for role in ROLES:
        expected = Identity("east", role, "w-1.example")
        der = leaf(expected)
        assert check_peer(der, cluster="east", roles=(role,)) == expected
        assert check_peer(der, cluster="east", roles=ROLES, id="w-1.example") == expected
    others = ["spiffe://east/worker/all", "https://example.com", "penstock://east/gate/all"]
    assert check_peer(certificate(others), cluster="east", roles=("gate",)).id == "all"


@pytest.mark.parametrize(
    ("der", "message"),
    [
        (None, "no certificate"),
        (b"", "no certificate"),
        (b"\x30\x03abc", "cannot be read"),
        (certificate(None), "names 0 identities"),
        (certificate([]), "names 0 identities"),
        (certificate(["spiffe://east/worker/all"]), "names 0 identities"),
        (certificate(["penstock://east/worker/all"] * 2), "names 2 identities"),
        (certificate(["penstock://east/worker/all", "PENSTOCK://x/gate/all"]), "names 2"),
        (certificate(["PENSTOCK://east/worker/all"]), "no identity of the form"),
        (certificate(["penstock://east/worker"]), "no identity of the form"),
        (certificate(["penstock://east/worker/all/more"]), "no identity of the form"),
        (certificate(["penstock://east/worker/all?x"]), "no identity of the form"),
        (certificate(["penstock://east/worker/a%6Cl"]), "no identity of the form"),
        (certificate(["penstock://east/worker/all\n"]), "no identity of the form"),
        (certificate(["penstock://east/admin/all"]), "no identity of the form"),
        (certificate(["penstock://west/worker/all"]), "of the cluster 'west', not 'east'"),
        (certificate(["penstock://East/worker/all"]), "of the cluster 'East', not 'east'"),
        (certificate(["penstock://east/client/all"]), "it is a client, not a worker or gate"),
        (certificate(["penstock://east/worker/other"]), "the worker 'other', not 'all'"),
    ],
)
def test_every_other_peer_is_refused(der, message):
    with pytest.raises(WrongPeer, match=message):
        check_peer(der, cluster="east", roles=("worker", "gate"), id="all")


@given(st.binary(max_size=400))
def test_bytes_that_are_no_certificate_are_refused(der: bytes):
    with pytest.raises(WrongPeer):
        check_peer(der, cluster="east", roles=ROLES)


GOOD = leaf(Identity("east", "worker"))


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_changed_byte_gives_another_identity_never_another_error(at: int, change: int):
    changed = bytearray(GOOD)
    changed[at] ^= change
    try:
        found = check_peer(bytes(changed), cluster="east", roles=CLUSTER_ROLES)
    except WrongPeer:
        return
    assert found.cluster == "east" and found.role in CLUSTER_ROLES


@given(st.text(max_size=70), st.text(max_size=12), st.text(max_size=70))
def test_a_name_is_refused_or_comes_back_as_it_was(cluster: str, role: str, id: str):
    try:
        identity = Identity(cluster, role, id)
    except ConfigError:
        return
    assert identity_of(x509.load_der_x509_certificate(leaf(identity))) == identity


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)


@given(names, st.sampled_from(ROLES), names)
def test_names_of_the_allowed_form_come_back(cluster: str, role: str, id: str):
    identity = Identity(cluster, role, id)
    der = leaf(identity)
    assert check_peer(der, cluster=cluster, roles=(role,), id=id) == identity
