"""The text of an API key: `psk_<id>_<secret>_<crc32>`.

The id finds the record of the key without a scan. The checksum refuses a key that was mistyped or
cut before anything is compared, and lets scanners of leaked secrets match keys without false hits.
The secret has 256 random bits, so its SHA-256 can be kept: no slow hash is needed.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import string
import zlib
from dataclasses import dataclass

PREFIX = "psk_"
ID_BYTES = 5  # 8 letters of base32
SECRET_BYTES = 32
_BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_SECRET_CHARS = 43  # of base62, for 256 bits
_KEY = re.compile(r"(psk_([A-Za-z0-9-]{1,32})_([A-Za-z0-9]{22,128}))_([0-9a-f]{8})")
KEY_ID = re.compile(r"[A-Za-z0-9-]{1,32}")


@dataclass(frozen=True, slots=True)
class KeyText:
    """The parts of a key. `digest`: SHA-256 of the secret, which alone is stored."""

    key_id: str
    digest: bytes
    text: str


def new_key(key_id: str | None = None) -> KeyText:
    """A key with a new secret, and a new id unless one is given."""
    key_id = key_id or base64.b32encode(secrets.token_bytes(ID_BYTES)).decode().lower()
    secret = _base62(secrets.token_bytes(SECRET_BYTES))
    body = f"{PREFIX}{key_id}_{secret}"
    return KeyText(key_id, _digest(secret), f"{body}_{_checksum(body)}")


def parse_key(text: str) -> KeyText | None:
    """The parts of a key of this form; None for any other text, as one with a wrong checksum."""
    found = _KEY.fullmatch(text)
    if found is None or _checksum(found[1]) != found[4]:
        return None
    return KeyText(found[2], _digest(found[3]), text)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _checksum(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"


def _base62(content: bytes) -> str:
    number, digits = int.from_bytes(content), ""
    while number:
        number, digit = divmod(number, 62)
        digits = _BASE62[digit] + digits
    return digits.rjust(_SECRET_CHARS, _BASE62[0])
