"""Who runs what in the background: one owner at a time, a next one when a lease ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.journal import background
from penstock.deployments.ingress.journal.background import BackgroundCalls
from penstock.deployments.options import StateOptions
from penstock.deployments.state.factory import open_store
from penstock.deployments.state.store import Store
from tests.deployments.waiting import until


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BEAT_S", 0.05)
    monkeypatch.setattr(background, "LEASE_S", 60.0)  # none ends while the machine stands still


class Work:
    """Notes what it is asked for."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.adopted: list[str] = []
        self.lost: list[str] = []
        self.is_stopped = False
        self.failure = failure

    async def adopt(self, call_id: str) -> None:
        if self.failure is not None:
            raise self.failure
        self.adopted.append(call_id)

    def on_lost(self, call_id: str) -> None:
        self.lost.append(call_id)

    async def stop(self) -> None:
        self.is_stopped = True


def run(folder: Path, scenario: Callable[[Store], Awaitable[None]]) -> None:
    async def main() -> None:
        folder.chmod(0o700)
        store = await open_store(StateOptions(state_url=f"sqlite://{folder}"))
        async with asyncio.timeout(60):
            await scenario(store)
        await store.close()

    asyncio.run(main())


def started(store: Store, work: Work) -> BackgroundCalls:
    calls = BackgroundCalls(store)
    calls.start(work)
    return calls


async def die(calls: BackgroundCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew the lease no more; its last one is short."""
    await calls.close()
    with monkeypatch.context() as patch:
        patch.setattr(background, "LEASE_S", 0.2)
        await calls._renew()


def test_one_ingress_takes_what_a_dead_one_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(store: Store) -> None:
        works = [Work(), Work(), Work()]
        dead, *living = [started(store, work) for work in works]
        for call_id in ("a", "b"):
            await dead.add(call_id)
        dead.remove("b")  # it has ended, and the index does not know it yet
        await asyncio.sleep(0.5)
        assert not any(work.adopted for work in works)  # a lease that is renewed holds
        await die(dead, monkeypatch)
        await until(lambda: works[1].adopted or works[2].adopted)
        await asyncio.sleep(0.3)
        assert works[1].adopted + works[2].adopted == ["a"] and not works[0].adopted
        for calls in living:
            await calls.close()

    run(tmp_path, scenario)


def test_what_is_handed_over_goes_to_another_ingress_only(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        leaving, work = Work(), Work()
        first = started(store, leaving)
        await first.add("a")
        await first.hand_over()
        assert leaving.is_stopped
        await asyncio.sleep(0.4)
        assert not leaving.adopted and not await first.claim("a")
        second = started(store, work)
        await until(lambda: work.adopted)
        assert work.adopted == ["a"]
        assert await first.claim("a", from_living=True)  # to end it
        await until(lambda: work.lost)
        assert work.lost == ["a"]
        for calls in (first, second):
            await calls.close()

    run(tmp_path, scenario)


def test_a_call_that_cannot_go_on_here_may_go_on_elsewhere(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        failing, work = Work(ServiceError("no_worker")), Work()
        first = started(store, Work())
        await first.add("a")
        await first.hand_over()
        second, third = started(store, failing), started(store, work)
        await until(lambda: work.adopted)
        for calls in (first, second, third):
            await calls.close()

    run(tmp_path, scenario)
