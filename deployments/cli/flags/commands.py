"""Adds a command to the command line; every `add_*` of this folder begins with it."""

from __future__ import annotations

import argparse
from typing import Any


def add_command(
    commands: Any,
    name: str,
    *,
    help: str,
    description: str,
    epilog: str,
    usage: str | None = None,
    add_help: bool = True,
) -> argparse.ArgumentParser:
    """The parser of a new command, with `epilog` (its examples) printed as it is below the flags.

    `commands`: of `add_subparsers`. `add_help`: with the usual --help.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=add_help,
    )
    return parser
