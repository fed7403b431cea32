"""How a client checks a server's certificate, and which certificate it shows."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files in PEM. `ca_file`: the CAs that are trusted; None: those of the system. `cert_file` and
    `key_file`: what is shown to servers that ask for it; None: nothing."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def context(self) -> ssl.SSLContext:
        """For HTTP. Raises ValueError that names the file that cannot be used."""
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together: give both, or none")
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise ValueError(f"ca_file {self.ca_file} cannot be used: {error}") from None
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file, password="")
            except OSError as error:
                raise ValueError(
                    f"cert_file {self.cert_file} and key_file {self.key_file} cannot be used "
                    f"together: {error}"
                ) from None
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """For gRPC, whose own CAs stand for the system's. Raises as `context` does."""
        self.context()  # gRPC reports a file that it cannot use at the first call only
        return grpc.ssl_channel_credentials(
            *(_read(each) for each in (self.ca_file, self.key_file, self.cert_file))
        )


def _read(file: str | None) -> bytes | None:
    return None if file is None else Path(file).read_bytes()
