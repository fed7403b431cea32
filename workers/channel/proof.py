"""How the two ends of a connection prove that they know a secret, without sending it.

Each end chooses a random nonce for the connection, and answers the other's with a keyed digest of
both. Who listens on a dead worker's address, or in between, learns no token from it; and a proof
that was recorded is worth nothing on another connection, whose nonces differ.

Used by the token channel (worker and ingress), by the gate and its ingresses, and between the
machines of a group (engine/group/far.py).
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

NONCE_BYTES = 32

Role = Literal["ingress", "worker", "gate", "leader", "rank"]


class Proof:
    """One end's part in one connection. Both ends have the same token; their roles differ."""

    def __init__(self, token: str, *, own: Role, peer: Role, epoch: int = 0):
        """`own`, `peer`: the roles of this end and of the other. `epoch`: of the worker."""
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._key = token.encode()
        self._own, self._peer = own, peer
        self._epoch = epoch.to_bytes(8, "little")

    def of_own(self, nonce: bytes, binding: bytes = b"") -> bytes:
        """What shows the other end, which sent `nonce`, that this one knows the token.

        `binding`: SHA-256 of the server's certificate under TLS, as this end sees it: a proof is
        good only on the connection that it was made for, not on one that somebody else relays.
        """
        return self._digest(self._own, nonce, self.nonce, binding)

    def is_of_peer(self, proof: bytes, nonce: bytes, binding: bytes = b"") -> bool:
        """Whether the other end, which sent `nonce`, has made `proof`; in constant time."""
        expected = self._digest(self._peer, self.nonce, nonce, binding)
        return hmac.compare_digest(proof, expected) and len(nonce) == NONCE_BYTES

    def _digest(self, role: Role, asked: bytes, own: bytes, binding: bytes) -> bytes:
        parts = (b"penstock", role.encode(), asked, own, self._epoch, binding)
        message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(self._key, message, "sha256")
