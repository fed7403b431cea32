"""Proofs of both ends: right only for the token, the roles, the nonces, the epoch, the binding."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.channel.proof import NONCE_BYTES, Proof

TOKEN = "0123456789abcdef" * 4


def ends(token: str = TOKEN, epoch: int = 7) -> tuple[Proof, Proof]:
    """The ingress's and the worker's."""
    return (
        Proof(token, own="ingress", peer="worker", epoch=epoch),
        Proof(token, own="worker", peer="ingress", epoch=epoch),
    )


def test_each_end_accepts_the_other() -> None:
    ingress, worker = ends()
    assert worker.is_of_peer(ingress.of_own(worker.nonce), ingress.nonce)
    assert ingress.is_of_peer(worker.of_own(ingress.nonce), worker.nonce)
    bound = ingress.of_own(worker.nonce, b"certificate")
    assert worker.is_of_peer(bound, ingress.nonce, b"certificate")


def test_whatever_differs_is_refused() -> None:
    ingress, worker = ends()
    right = ingress.of_own(worker.nonce)
    (other_token, _), (other_epoch, _) = ends("f" * 64), ends(epoch=8)
    for stranger in (other_token, other_epoch, Proof(TOKEN, own="gate", peer="worker", epoch=7)):
        assert not worker.is_of_peer(stranger.of_own(worker.nonce), stranger.nonce)
    assert not worker.is_of_peer(right, ingress.nonce, b"certificate")
    assert not worker.is_of_peer(ingress.of_own(worker.nonce, b"a"), ingress.nonce, b"b")
    assert not worker.is_of_peer(worker.of_own(ingress.nonce), ingress.nonce)  # its own words
    assert not worker.is_of_peer(right, worker.nonce)


def test_a_proof_is_good_for_one_connection() -> None:
    ingress, worker = ends()
    recorded = ingress.of_own(worker.nonce), ingress.nonce
    assert worker.is_of_peer(*recorded)
    _, later = ends()
    assert later.nonce != worker.nonce and not later.is_of_peer(*recorded)


def test_a_nonce_of_another_length_is_refused() -> None:
    """Else whoever chooses the nonces could choose few."""
    ingress, worker = ends()
    for length in (0, NONCE_BYTES - 1, NONCE_BYTES + 1):
        ingress.nonce = bytes(length)
        assert not worker.is_of_peer(ingress.of_own(worker.nonce), ingress.nonce)


@given(st.lists(st.binary(max_size=40), min_size=2, max_size=2, unique=True), st.binary())
def test_no_two_bindings_have_one_proof(bindings: list[bytes], token: Any) -> None:
    ingress, worker = ends(token.hex() or TOKEN)
    proofs = [ingress.of_own(worker.nonce, each) for each in bindings]
    assert all(one != other for one, other in itertools.combinations(proofs, 2))
