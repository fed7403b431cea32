"""What an ingress tells the gate, gathered: what goes at once, and what waits a moment for more."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.deployments import gate_outbox
from penstock.deployments.gate_outbox import GateOutbox


def test_news_wait_for_more_and_go_by_themselves():
    async def main() -> None:
        outbox = GateOutbox()
        outbox.begin("in")
        assert outbox.take().number == 1
        began_s = time.monotonic()
        for name in ("a", "b", "c"):
            outbox.message.ended.add(request_id=name)
            outbox.soon()
            await asyncio.sleep(0)
        await asyncio.wait_for(outbox.due(), 10)
        assert time.monotonic() - began_s >= 0.9 * gate_outbox.GATHER_S
        message = outbox.take()
        assert [each.request_id for each in message.ended] == ["a", "b", "c"]
        assert message.number == 2 and not outbox.message.ended

    asyncio.run(main())


def test_what_somebody_waits_for_goes_at_once_and_takes_the_news_along(monkeypatch):
    monkeypatch.setattr(gate_outbox, "GATHER_S", 3600.0)

    async def main() -> None:
        outbox = GateOutbox()
        outbox.message.ended.add(request_id="a")
        outbox.soon()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(outbox.due(), 0.05)
        outbox.message.offers.add(request_id="b")
        outbox.now()
        await asyncio.wait_for(outbox.due(), 10)
        message = outbox.take()
        assert message.ended[0].request_id == "a" and message.offers[0].request_id == "b"

        monkeypatch.setattr(gate_outbox, "GATHER_S", 0.001)
        outbox.soon()  # the hour of before is forgotten with its message
        await asyncio.wait_for(outbox.due(), 10)

    asyncio.run(main())


def test_a_new_stream_counts_from_one_and_says_who_it_is():
    async def main() -> None:
        outbox = GateOutbox()
        outbox.message.ended.add(request_id="of an earlier stream")
        outbox.take()
        outbox.message.ended.add(request_id="of an earlier stream, too")
        outbox.begin("in")
        assert outbox.next_number == 1
        message = outbox.take()
        assert (message.ingress_id, message.number, len(message.ended)) == ("in", 1, 0)

    asyncio.run(main())
