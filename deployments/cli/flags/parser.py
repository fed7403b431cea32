"""The parser of every command: one form of error, hints from the command's own flags, underscores.

A misuse is a ConfigError, which `main` prints as it prints all errors, with exit status 2.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from penstock.workers.errors import ConfigError

CLOSE = 0.7  # of 1: the likeness from which on a flag is worth a hint


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes `--max_model_len` for `--max-model-len`, as vLLM does.

    A flag must be spelt out: a new flag may not change what an abbreviation means, and `--api-key
    SECRET` not be taken for the file of a key, whose name an error shows.
    """

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **{"allow_abbrev": False, **named})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As the base class; but what is not known is an error of the command that it is for."""
        given = sys.argv[1:] if args is None else args
        parsed, rest = super().parse_known_args(with_dashes(given), namespace)
        if rest:
            raise self._not_understood(rest[0])
        return parsed, []

    def _not_understood(self, argument: str) -> ConfigError:
        """The error for an unknown flag or argument; it names the nearest flag of this command."""
        if not argument.startswith("-"):
            return ConfigError(f"unexpected argument {argument!r}; see `{self.prog} --help`")
        flag = argument.partition("=")[0]
        known = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(flag, known, n=1, cutoff=CLOSE)
        hint = f"did you mean {near[0]}?" if near else f"see `{self.prog} --help`"
        return ConfigError(f"unknown flag {flag}; {hint}")


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """The arguments with dashes for underscores in the names of flags; values stay."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*map(_dashed, arguments[:end]), *arguments[end:]]


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if not name.startswith("--") or " " in name:  # a text with blanks is no flag
        return argument
    return f"{name.replace('_', '-')}{equals}{value}"
