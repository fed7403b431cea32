"""A store that misses its time once: a stream that is continued is the same to its last event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from penstock.deployments.ingress.journal import journals
from penstock.deployments.state.store import StateDown
from tests.deployments.ingress.journal.test_resume import NUMBERED, resume, stream_numbered
from tests.deployments.serving import EngineBackend, Serving

WHOLE = 10**6  # more events than any stream here has


class LateStore:
    """A real store, of which the next `num_late` appends of records miss their time."""

    def __init__(self, store: Any):
        self._store, self.num_late = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def append(self, name: str, first: int, records: Sequence[bytes], **rest: Any) -> int:
        if records and self.num_late > 0:
            self.num_late -= 1
            raise StateDown("no answer in time")
        return int(await self._store.append(name, first, records, **rest))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("state")
    folder.chmod(0o700)
    backend = EngineBackend()
    with Serving(backend, state_url=f"sqlite://{folder}") as servers:
        yield servers
    backend.stop()


@pytest.fixture(scope="module")
def store(serving: Serving) -> LateStore:
    """The servers' store. Nothing is written but where a stream is continued."""
    journals = serving.journals
    assert journals is not None
    late = LateStore(journals.store)

    def replace() -> None:
        journals._store = late
        journals._writing.cancel()

    serving.call(replace)
    return late


@pytest.fixture(scope="module")
def http(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.base_url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("name", ["response tools", "message tools"])
def test_what_a_late_store_lacks_is_not_made_anew(
    http: httpx.Client, store: LateStore, name: str
) -> None:
    """Tokens of the prompt that come from the cache the second time would show it."""
    path, body = NUMBERED[name]
    call_id, whole, ids = stream_numbered(http, path, body, WHOLE)
    store.num_late = 2
    again, again_ids = resume(http, call_id, None)
    assert (again, again_ids) == (whole, ids)
    assert store.num_late == 0


def test_a_store_that_stays_away_is_said_and_nothing_is_lost(
    http: httpx.Client, store: LateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = NUMBERED["response tools"]
    call_id, whole, ids = stream_numbered(http, path, body, WHOLE)
    store.num_late = 10**6
    with monkeypatch.context() as patch:
        patch.setattr(journals, "RESUME_BUDGET_S", 2.0)
        refused = http.get(f"/v1/penstock/streams/{call_id}")
    assert refused.status_code == 503 and refused.headers["retry-after"] == "2"
    assert refused.json()["error"]["code"] == "state_unavailable"
    store.num_late = 0
    assert resume(http, call_id, None) == (whole, ids)
