"""The flags of every command that calls a server, and of those that sample from its model."""

from __future__ import annotations

import argparse

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "PENSTOCK_API_KEY"  # a secret: other users can read command lines


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Which server a command calls, and the key it sends."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        default=DEFAULT_URL,
        help=f"http://host:port or grpc://host:port (default: {DEFAULT_URL})",
    )
    group.add_argument("--model", help="model name; none: the served one")
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"file with the API key; none: the environment variable {KEY_VARIABLE}",
    )


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
