"""`state_url` and the settings beside it, parsed and checked. Pure: opens and asks nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from penstock.deployments.options import StateOptions
from penstock.workers.errors import ConfigError
from penstock.workers.settings import settings_of

FORMS = "sqlite:///FOLDER, redis://HOST:PORT/DB or rediss://HOST:PORT/DB"
_PREFIX = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_TLS = ("state_ca_file", "state_cert_file", "state_key_file")


@dataclass(frozen=True, slots=True)
class EmbeddedAddress:
    """SQLite files in `folder`; None: in a temporary folder."""

    folder: Path | None


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A Redis server, and what is needed to log in. Files are read at each connect."""

    host: str
    port: int
    db: int
    prefix: str
    is_tls: bool = False
    username: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' * self.is_tls}://{host}:{self.port}/{self.db}"


def parse(options: StateOptions) -> EmbeddedAddress | RedisAddress:
    """Where the store is. Raises ConfigError naming the setting and the remedy."""
    url = options.state_url or ""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"state_url cannot be read ({error}); use {FORMS}") from None
    if parts.password is not None:
        raise ConfigError(
            "state_url holds a password, which every list of processes would show; write it into "
            "a file that only this user can read, and name that in state_password_file"
        )
    if parts.scheme in ("redis", "rediss"):
        return _redis(options, parts, port)
    _refuse_for_embedded(options)
    if not url:
        return EmbeddedAddress(None)
    path = unquote(parts.path)
    if parts.scheme != "sqlite":
        raise ConfigError(f"state_url must be {FORMS}, or none; got {url!r}")
    if parts.netloc or parts.query or parts.fragment or not path.strip("/"):
        raise ConfigError(
            f"state_url needs a folder with an absolute path, as sqlite:///var/lib/penstock; "
            f"got {url!r}"
        )
    return EmbeddedAddress(Path("/" + path.lstrip("/")))


def redis_options(options: StateOptions) -> StateOptions | None:
    """The settings of the store alone, for another process; None unless it is a Redis.

    A folder belongs to one process, and a temporary one ends with it.
    """
    if isinstance(parse(options), EmbeddedAddress):
        return None
    names = [setting.name for setting in settings_of(StateOptions)]
    return StateOptions(**{name: getattr(options, name) for name in names})


def _redis(options: StateOptions, parts: SplitResult, port: int | None) -> RedisAddress:
    number = parts.path.strip("/")
    if not parts.hostname:
        raise ConfigError(f"state_url names no host; use {parts.scheme}://HOST:PORT/DB")
    if parts.query or parts.fragment or (number and not re.fullmatch(r"[0-9]{1,5}", number)):
        raise ConfigError(
            f"state_url must end with the host, the port and perhaps the number of a database, as "
            f"{parts.scheme}://{parts.hostname}:6379/0"
        )
    is_tls = parts.scheme == "rediss"
    if not is_tls and (name := _first_given(options, _TLS)):
        raise ConfigError(f"{name} needs TLS; use a state_url that begins with rediss://")
    if (options.state_cert_file is None) != (options.state_key_file is None):
        raise ConfigError("state_cert_file and state_key_file belong together; give both or none")
    if parts.username and options.state_password_file is None:
        raise ConfigError("state_url names a user; give its password in state_password_file")
    if not _PREFIX.fullmatch(options.state_prefix):
        raise ConfigError(
            "state_prefix must be 1 to 64 letters, digits and characters of _.:/-; "
            f"got {options.state_prefix!r}"
        )
    return RedisAddress(
        host=parts.hostname,
        port=port or 6379,
        db=int(number or 0),
        prefix=options.state_prefix,
        is_tls=is_tls,
        username=unquote(parts.username) if parts.username else None,
        password_file=options.state_password_file,
        ca_file=options.state_ca_file,
        cert_file=options.state_cert_file,
        key_file=options.state_key_file,
    )


def _refuse_for_embedded(options: StateOptions) -> None:
    if name := _first_given(options, ("state_password_file", *_TLS)):
        raise ConfigError(
            f"{name} is for Redis; give a state_url redis:// or rediss://, or drop it"
        )


def _first_given(options: StateOptions, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if getattr(options, name) is not None), None)
