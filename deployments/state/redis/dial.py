"""Connects to Redis and logs in, reading the password and the certificates anew each time."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError

from penstock.deployments.state.store import StateDown
from penstock.deployments.state.url import RedisAddress
from penstock.workers.errors import ConfigError

CONNECT_S = 1.0  # connect, TLS and log in


class PasswordFile(CredentialProvider):
    """So that a password can be changed without a restart."""

    def __init__(self, file: str, username: str | None) -> None:
        self._file = file
        self._username = username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Raises ConfigError where there is no such file, or no password in it."""
        password = read_password(self._file)
        return (password,) if self._username is None else (self._username, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return await asyncio.to_thread(self.get_credentials)


def read_password(file: str) -> str:
    """The first line of the file. Raises ConfigError."""
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"state_password_file {file} cannot be read: {reason}") from None
    if not lines or not lines[0].strip():
        raise ConfigError(f"state_password_file {file} has no password in its first line")
    return lines[0].strip()


def check_files(address: RedisAddress) -> None:
    """Raise ConfigError for a password file or a certificate that cannot be used. Blocks."""
    if address.password_file is not None:
        read_password(address.password_file)
    context = ssl.create_default_context()
    try:
        if address.ca_file is not None:
            context.load_verify_locations(address.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"state_ca_file {address.ca_file} cannot be used: {error}") from None
    try:
        if address.cert_file is not None:
            context.load_cert_chain(address.cert_file, address.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"state_cert_file {address.cert_file} and state_key_file {address.key_file} cannot be "
            f"used together: {error}"
        ) from None


async def dial(address: RedisAddress) -> Connection:
    """A new connection, logged in, without retries. Raises StateDown."""
    arguments: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "db": address.db,
        "protocol": 2,
        "socket_timeout": None,  # link.py has the clocks
        "socket_connect_timeout": CONNECT_S,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
    }
    if address.password_file is not None:
        arguments["credential_provider"] = PasswordFile(address.password_file, address.username)
    if address.is_tls:
        arguments |= {
            "ssl_ca_certs": address.ca_file,
            "ssl_certfile": address.cert_file,
            "ssl_keyfile": address.key_file,
            "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        }
    connection = (SSLConnection if address.is_tls else Connection)(**arguments)
    try:
        async with asyncio.timeout(CONNECT_S):
            await connection.connect()  # type: ignore[no-untyped-call]
    except TimeoutError:
        raise StateDown(f"{address} does not answer") from None
    except AuthenticationError:
        raise StateDown(f"{address} refuses the password (state_password_file)") from None
    except (RedisError, OSError, ConfigError) as error:
        raise StateDown(f"{address} cannot be reached: {error}") from None
    return connection
