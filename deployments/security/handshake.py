"""A TLS handshake between two contexts in memory: proves that a certificate and its key work."""

from __future__ import annotations

import ssl

MAX_ROUNDS = 10  # TLS 1.3 needs two


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ...]:
    """The two ends, server first, after the handshake. Raises ssl.SSLError where it fails."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(MAX_ROUNDS):
        done = [_is_done(end) for end in ends]
        if all(done):
            return ends[1], ends[0]
    raise ssl.SSLError("the handshake does not end")


def _is_done(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
