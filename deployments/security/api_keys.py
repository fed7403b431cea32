"""Who may come in: API keys, kept as digests and compared in constant time.

Knows nothing of HTTP or gRPC: both hand in what stood in their `authorization` field.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

DIGEST_PREFIX = "sha256:"


class ApiKeys:
    """The keys that are accepted. With none, everybody is."""

    def __init__(self, keys: Sequence[str] = ()):
        """Each of `keys` is a key, or 'sha256:' and the hex digest of one."""
        self._digests = [_digest(key) for key in keys]

    def principal(self, authorization: str | None) -> str | None:
        """A name for the holder of the key in 'Bearer <key>'; None if there is no valid key.

        The same key always has the same name, from which the key cannot be found. Without keys
        everybody is "".
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        offered = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = False
        for digest in self._digests:  # all of them: the time must not tell which one came close
            found |= hmac.compare_digest(offered, digest)
        return offered.hex()[:16] if found and scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    if key.startswith(DIGEST_PREFIX):
        return bytes.fromhex(key.removeprefix(DIGEST_PREFIX))
    return hashlib.sha256(key.encode()).digest()
