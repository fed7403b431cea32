"""The quick part of the fault table, with real processes; and the harness itself: does it bite?

Rows that need a live cluster or Redis are run by `python -m benchmarks.faults.table`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from benchmarks.faults.proxy import Programme
from benchmarks.faults.table.__main__ import chosen, main, table
from benchmarks.faults.table.desk import Desk, Hand, desk
from benchmarks.faults.table.mutations import MUTATIONS
from benchmarks.faults.table.rows import ROWS, CannotInject, Outcome, Row, Scale, Seen, outcome_of
from benchmarks.faults.table.workers import compare, killed_at, plain
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.dispatch import worker_link

pytestmark = pytest.mark.timeout(900)  # the first row loads torch and the model
QUICK = Scale(is_quick=True)
QUICK_ROWS = (1, 2, 11, 19)
SEEDED = 1  # its random numbers and its place count


def test_there_are_28_rows_and_each_says_what_is_promised() -> None:
    assert sorted(ROWS) == list(range(1, 29))
    for each in ROWS.values():
        assert each.title and each.injected and each.promised


@pytest.mark.parametrize("number", QUICK_ROWS)
def test_row(number: int) -> None:
    outcome = asyncio.run(outcome_of(ROWS[number], QUICK))
    if outcome.passed is None:
        pytest.skip(outcome.seen.text())
    assert outcome.passed, outcome.seen.text()


async def _disturbed(made: Desk, seen: Seen) -> None:
    await made.expect(SEEDED)
    await killed_at(made, 7, SEEDED, seen)


@pytest.mark.parametrize("name", ["seed-drawn-anew", "one-token-forgotten", "delta-taken-twice"])
def test_a_fault_in_the_product_is_found_by_a_kill(name: str) -> None:
    async def scenario() -> tuple[Seen, Seen]:
        sound, unsound = Seen(), Seen()
        async with desk(2) as made:
            await _disturbed(made, sound)
            with MUTATIONS[name]():
                await _disturbed(made, unsound)
        return sound, unsound

    sound, unsound = asyncio.run(scenario())
    assert sound.passed, sound.text()
    assert not unsound.passed and "differs" in unsound.text()


def test_a_missing_fence_is_found_by_a_partition_that_heals(monkeypatch: Any) -> None:
    async def scenario(seen: Seen, fault: Callable[[], AbstractContextManager[None]]) -> None:
        call = plain("The sea was", seed=5, max_tokens=400)
        async with desk(2) as made:
            expected = await made.alone("sea", call)
            held: list[Hand] = []
            heals_at = 0

            async def told(num_tokens: int) -> None:
                nonlocal heals_at
                if num_tokens > 20 and not held:
                    held.append(await made.busy())
                    held[0].relay.set("down", Programme("stall"))
                    heals_at = num_tokens + 40  # the other worker generates these 40
                elif held and num_tokens >= heals_at:
                    held[0].relay.heal()

            with monkeypatch.context() as short, fault():
                short.setattr(worker_link, "SILENCE_TICKS", 3)
                try:
                    got, _ = await asyncio.wait_for(made.run(call, 1, told), 120)
                except ServiceError as refused:
                    seen.check(False, f"the stream differs: it ended with {refused}")
                else:
                    compare(seen, "the stream", got, expected)

    sound, unsound = Seen(), Seen()
    asyncio.run(scenario(sound, contextlib.nullcontext))
    assert sound.passed, sound.text()
    asyncio.run(scenario(unsound, MUTATIONS["no-fence"]))
    assert not unsound.passed and "differs" in unsound.text()


def _row_of(run: Any) -> Row:
    return Row(99, "a title", "a fault", "a promise", run)


async def _silent(scale: Scale, seen: Seen) -> None:
    """Checks nothing."""


async def _broken(scale: Scale, seen: Seen) -> None:
    seen.check(True, "")
    raise RuntimeError("it broke")


async def _powerless(scale: Scale, seen: Seen) -> None:
    raise CannotInject("no root")


@pytest.mark.parametrize(
    ("run", "passed", "words"),
    [(_silent, False, ""), (_broken, False, "it broke"), (_powerless, None, "no root")],
)
def test_a_row_passes_only_by_a_check(run: Any, passed: bool | None, words: str) -> None:
    outcome = asyncio.run(outcome_of(_row_of(run), QUICK))
    assert outcome.passed is passed and words in outcome.seen.text()


def test_the_table_shows_failures_and_facts() -> None:
    seen = Seen()
    seen.most("longest s", 1.23456)
    seen.most("longest s", 0.5)
    seen.check(False, "too long")
    text = table([Outcome(_row_of(_silent), seen, seen.passed, 1.0)])
    assert (
        "| 99 | a title | a fault | a promise | longest s: 1.235; FAILED: too long | FAIL |" in text
    )


def test_rows_are_chosen_by_numbers_and_ranges(capsys: Any) -> None:
    assert chosen("1,3-5") == [1, 3, 4, 5] and chosen(None) == sorted(ROWS)
    with pytest.raises(ValueError, match="no row 29"):
        chosen("29")
    with pytest.raises(SystemExit):
        main(["--rows", "29"])
    assert "there is no row 29" in capsys.readouterr().err
