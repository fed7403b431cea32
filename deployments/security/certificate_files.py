"""The files of a certificate, its key and a CA: names, contents, and when they change."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.workers.errors import ConfigError

TLS_SETTINGS = ("tls_cert_file", "tls_key_file", "tls_client_ca_file")
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Names of files in PEM. `settings`: what the messages call them."""

    cert: str
    key: str
    ca: str | None = None
    settings: tuple[str, str, str] = TLS_SETTINGS

    def named(self) -> Iterator[tuple[str, str]]:
        """Setting and file, of those that are given."""
        for setting, file in zip(self.settings, (self.cert, self.key, self.ca), strict=True):
            if file is not None:
                yield setting, file

    def stamp(self) -> Stamp:
        """Changes with each replacement of a file. Raises ConfigError."""
        found = []
        for setting, file in self.named():
            try:
                status = Path(file).stat()  # of what a link leads to
            except OSError as error:
                raise ConfigError(f"{setting} {file} cannot be read: {error.strerror}") from None
            found.append((status.st_mtime_ns, status.st_ino, status.st_size))
        return tuple(found)

    def read(self) -> list[bytes]:
        """What is in the files that are given. Raises ConfigError."""
        found = []
        for setting, file in self.named():
            try:
                found.append(Path(file).read_bytes())
            except OSError as error:
                raise ConfigError(f"{setting} {file} cannot be read: {error.strerror}") from None
        return found

    def check_key_mode(self) -> None:
        """Raise ConfigError for a key that other users of the machine can read or write."""
        mode = Path(self.key).stat().st_mode
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            raise ConfigError(
                f"{self.settings[1]} {self.key} can be read or written by every user of this "
                f"machine: chmod 600 {self.key} (a secret of Kubernetes: defaultMode: 0440)"
            )
