"""Connections that have not proven themselves are few, and refusals are logged once a minute."""

from __future__ import annotations

import asyncio
import logging

import pytest

from penstock.workers.channel import unproven
from penstock.workers.channel.refusals import MAX_ADDRESSES, QUIET_S, RefusalLog
from penstock.workers.channel.unproven import MAX_UNPROVEN, Unproven


def test_one_more_than_allowed_ends_the_oldest() -> None:
    async def scenario() -> None:
        ended: list[int] = []
        waiting: Unproven[int] = Unproven(lambda number, _: ended.append(number))
        for number in range(MAX_UNPROVEN):
            waiting.add(number)
        waiting.discard(3)  # it has proven itself
        waiting.add(MAX_UNPROVEN)
        assert not ended
        waiting.add(MAX_UNPROVEN + 1)
        waiting.add(MAX_UNPROVEN + 2)
        assert ended == [0, 1] and len(waiting) == MAX_UNPROVEN

    asyncio.run(scenario())


def test_one_that_says_nothing_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unproven, "HELLO_S", 0.05)

    async def scenario() -> None:
        ended: list[tuple[int, str]] = []
        waiting: Unproven[int] = Unproven(lambda *end: ended.append(end))
        waiting.add(1)
        waiting.add(2)
        waiting.discard(2)
        await asyncio.sleep(0.3)
        assert ended == [(1, "it did not prove itself within 0.05 s")] and not len(waiting)

    asyncio.run(scenario())


def test_a_line_an_address_and_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    refusals = RefusalLog(logging.getLogger("test"), lambda: now_s)
    for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.1"):
        refusals.note("ingress", address, "it does not know this worker's token")
    now_s = QUIET_S - 1
    refusals.note("ingress", "10.0.0.2", "again")
    assert [record.message for record in caplog.records] == [
        "refused the ingress at 10.0.0.1: it does not know this worker's token",
        "refused the ingress at 10.0.0.2: it does not know this worker's token",
    ]
    now_s = QUIET_S
    refusals.note("ingress", "10.0.0.1", "again")
    assert caplog.records[-1].message == "refused the ingress at 10.0.0.1: again"


def test_many_addresses_fill_neither_log_nor_memory(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    refusals = RefusalLog(logging.getLogger("test"), lambda: now_s)
    for number in range(3 * MAX_ADDRESSES):
        refusals.note("ingress", f"address {number}", "no")
    assert len(caplog.records) == MAX_ADDRESSES == len(refusals._logged_s)
    now_s = QUIET_S
    refusals.note("ingress", "address 0", "no")
    assert len(caplog.records) == MAX_ADDRESSES + 1 and len(refusals._logged_s) == 1
