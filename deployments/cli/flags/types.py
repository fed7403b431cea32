"""Types of command-line flags: numbers with a bound and an error that names it, lists, and URLs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence


def positive(text: str) -> float:
    """A finite number above 0. Raises ArgumentTypeError."""
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def non_negative(text: str) -> float:
    """A finite number from 0 on. Raises ArgumentTypeError."""
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def positive_int(text: str) -> int:
    """A whole number from 1 on. Raises ArgumentTypeError."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def url(text: str) -> str:
    """A server's URL; host:port alone is HTTP."""
    return text if "://" in text else f"http://{text}"


def non_negative_int(text: str) -> int:
    """A whole number from 0 on. Raises ArgumentTypeError."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return number


def list_of(choices: Sequence[str] = ()) -> Callable[[str], tuple[str, ...]]:
    """A type of flags that take several values with commas, each once; of `choices`, if any.

    The type raises ArgumentTypeError naming the value that is none of them.
    """

    def parse(text: str) -> tuple[str, ...]:
        values = tuple(dict.fromkeys(each.strip() for each in text.split(",")))
        for each in values:
            if not each or (choices and each not in choices):
                raise argparse.ArgumentTypeError(
                    f"{each!r} is none of {', '.join(choices)}" if choices else "a value is empty"
                )
        return values

    return parse
