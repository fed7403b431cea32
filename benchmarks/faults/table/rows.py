"""What a row of the fault table is, the list of all rows, and what one run of a row saw."""

from __future__ import annotations

import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

ROWS: dict[int, Row] = {}  # by number; a file of rows fills it when it is imported


class CannotInject(Exception):
    """This machine cannot make the fault, e.g. for want of root. The row is not run."""


@dataclass
class Seen:
    """What was seen in one run of a row. It passes if something was checked and nothing failed."""

    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    num_checks: int = 0

    def check(self, is_good: object, words: str) -> bool:
        """`words` say what is wrong where it is not good."""
        self.num_checks += 1
        if not is_good:
            self.failures.append(words)
        return bool(is_good)

    def note(self, name: str, value: Any) -> None:
        self.facts[name] = round(value, 3) if isinstance(value, float) else value

    def most(self, name: str, value: float) -> None:
        """Note the largest value of all calls."""
        self.note(name, max(value, self.facts.get(name, value)))

    def count(self, name: str, number: int = 1) -> None:
        self.facts[name] = self.facts.get(name, 0) + number

    @property
    def passed(self) -> bool:
        return self.num_checks > 0 and not self.failures

    def text(self) -> str:
        """The facts, then what failed; the first three of equal kind."""
        parts = [f"{name}: {value}" for name, value in self.facts.items()]
        parts += [f"FAILED: {each}" for each in self.failures[:3]]
        if len(self.failures) > 3:
            parts.append(f"and {len(self.failures) - 3} more failures")
        return "; ".join(parts)


@dataclass(frozen=True)
class Scale:
    """How much of a row is run: the quick part has the same checks, and fewer repetitions."""

    is_quick: bool = False
    seed: int = 0

    def of(self, quick: int, full: int) -> int:
        return quick if self.is_quick else full


@dataclass(frozen=True)
class Row:
    """One row. `needs`: "ray" (a live cluster), "redis", or "root"."""

    number: int
    title: str
    injected: str
    promised: str
    run: Callable[[Scale, Seen], Awaitable[None]]
    needs: tuple[str, ...] = ()


def row(
    number: int, title: str, *, injected: str, promised: str, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Scale, Seen], Awaitable[None]]], Callable[[Scale, Seen], Awaitable[None]]]:
    """Enter a function into the table. Raises ValueError for a number that is taken."""

    def enter(
        function: Callable[[Scale, Seen], Awaitable[None]],
    ) -> Callable[[Scale, Seen], Awaitable[None]]:
        if number in ROWS:
            raise ValueError(f"row {number} is entered twice: {ROWS[number].title} and {title}")
        ROWS[number] = Row(number, title, injected, promised, function, needs)
        return function

    return enter


@dataclass(frozen=True)
class Outcome:
    """One row of the printed table. `passed` None: it was not run."""

    row: Row
    seen: Seen
    passed: bool | None
    seconds: float

    @property
    def verdict(self) -> str:
        return {True: "pass", False: "FAIL", None: "not run"}[self.passed]

    def as_dict(self) -> dict[str, Any]:
        return {
            "row": self.row.number,
            "title": self.row.title,
            "injected": self.row.injected,
            "promised": self.row.promised,
            "seen": self.seen.text(),
            "facts": self.seen.facts,
            "failures": self.seen.failures,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 1),
        }


async def outcome_of(each: Row, scale: Scale) -> Outcome:
    """Run one row. An exception is a failure, except CannotInject."""
    seen, began_s = Seen(), time.monotonic()
    passed: bool | None
    try:
        await each.run(scale, seen)
        passed = seen.passed
    except CannotInject as why:
        seen.note("not run", str(why))
        passed = None
    except Exception as error:
        traceback.print_exc()
        seen.failures.append(f"{type(error).__name__}: {str(error)[:300]}")
        passed = False
    return Outcome(each, seen, passed, time.monotonic() - began_s)
