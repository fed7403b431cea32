"""The flags of every command that calls a server, and of those that sample from its model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from penstock.deployments.cli.flags.types import url as url_type
from penstock.workers.errors import ConfigError

if TYPE_CHECKING:
    from penstock.deployments.client.tls import ClientTls

DEFAULT_URL = "http://127.0.0.1:8000"
TLS_SCHEMES = ("https://", "grpcs://")
KEY_VARIABLE = "PENSTOCK_API_KEY"  # a secret: other users can read command lines


def add_server_flags(
    parser: argparse.ArgumentParser,
    *,
    model: str | None = "model name; none: the first one that is served",
) -> None:
    """Which server a command calls, and the key it sends. `model`: help of --model; None: the
    command is about the whole server, and has no such flag."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        type=url_type,
        metavar="URL",
        default=DEFAULT_URL,
        help="http://host:port, host:port for short, or grpc://host:port; https:// and grpcs:// "
        f"with TLS (default: {DEFAULT_URL})",
    )
    if model is not None:
        group.add_argument("--model", help=model)
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"file with the API key; none: the environment variable {KEY_VARIABLE}",
    )
    add_tls_flags(group)


def add_tls_flags(group: Any) -> None:
    """How a command checks the server, and what it shows to it."""
    group.add_argument(
        "--ca-file",
        metavar="FILE",
        help="with https:// or grpcs://: the CAs that are trusted, in PEM; none: the system's",
    )
    group.add_argument(
        "--cert-file",
        metavar="FILE",
        help="certificate for a server that asks for one, in PEM; none: none is shown",
    )
    group.add_argument("--key-file", metavar="FILE", help="the key of --cert-file, in PEM")


def tls_of(args: argparse.Namespace, url: str) -> ClientTls | None:
    """What the flags of `add_tls_flags` say for this URL; None: its scheme has no TLS.

    Raises ConfigError for files that cannot be used, and for flags that the URL does not need.
    """
    from penstock.deployments.client.tls import ClientTls  # imports gRPC

    tls = ClientTls(args.ca_file, args.cert_file, args.key_file)
    if not url.startswith(TLS_SCHEMES):
        if tls != ClientTls():
            raise ConfigError(
                f"--ca-file, --cert-file and --key-file are for TLS, and {url} has none: write "
                "https://host:port or grpcs://host:port"
            )
        return None
    try:
        tls.context()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tls


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The sampling parameters of one request."""
    group = parser.add_argument_group("sampling; the server decides what is not given")
    group.add_argument(
        "--temperature", type=float, metavar="X", help="sampling temperature; 0 is greedy"
    )
    group.add_argument(
        "--top-p", type=float, metavar="X", help="nucleus sampling: probability mass"
    )
    group.add_argument(
        "--top-k", type=int, metavar="N", help="sample from the N most likely tokens"
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="maximum tokens of the answer")
    group.add_argument(
        "--seed", type=int, metavar="N", help="seed; the same seed gives the same answer"
    )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop before this text; repeatable"
    )
