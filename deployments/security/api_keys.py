"""API keys: kept as digests, and compared in constant time.

The HTTP and gRPC front ends pass the value of their `authorization` field.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
from collections.abc import Sequence
from pathlib import Path

from penstock.workers.errors import ConfigError

log = logging.getLogger("penstock.security")

DIGEST_PREFIX = "sha256:"


class ApiKeys:
    """The accepted keys. Without keys, every caller is accepted."""

    def __init__(self, keys: Sequence[str] = ()):
        """Each of `keys` is a key, or 'sha256:' and the hex digest of one."""
        self._digests = [_digest(key) for key in keys]

    def principal(self, authorization: str | None) -> str | None:
        """A name for the holder of the key in 'Bearer <key>'; None if there is no valid key.

        The name is the same for the same key, and does not reveal it. Without keys it is "" for
        every caller.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        offered = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = False
        for digest in self._digests:  # compare with all: the time must not reveal a near match
            found |= hmac.compare_digest(offered, digest)
        return offered.hex()[:16] if found and scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    """Raises ConfigError for a digest that is none."""
    if key.startswith(DIGEST_PREFIX):
        digits = key.removeprefix(DIGEST_PREFIX)
        try:
            digest = bytes.fromhex(digits)
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise ConfigError(
                f"an API key begins with {DIGEST_PREFIX}, and 64 hexadecimal digits must follow; "
                "'printf %s KEY | sha256sum' makes them"
            )
        return digest
    return hashlib.sha256(key.encode()).digest()


def read_api_keys(path: str) -> tuple[str, ...]:
    """The keys in a file, one a line, without blank lines and '#' comments. Raises ConfigError.

    Also for a file that every user may write.
    """
    try:
        mode = Path(path).stat().st_mode
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read api_keys_file {path}: {why}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"api_keys_file {path} has no key; write one a line")
    for key in keys:
        _digest(key)
    if mode & stat.S_IWOTH:
        raise ConfigError(f"api_keys_file {path} can be written by every user: chmod o-w {path}")
    if mode & stat.S_IROTH and not all(key.startswith(DIGEST_PREFIX) for key in keys):
        log.warning(
            "api_keys_file %s can be read by every user of this machine: chmod o-r, or keep "
            "'sha256:' and the digests of the keys there",
            path,
        )
    return keys
