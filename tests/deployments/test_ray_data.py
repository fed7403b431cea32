"""`penstock.ray_data` on a real local Ray, against real servers."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="Ray Data needs pyarrow and pandas: pip install ray[data]")

import ray
import ray.data

from penstock.deployments.batch.runner import seed_of
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ray_data import COMPLETIONS, build_processor
from penstock.deployments.security.authority import make_all
from penstock.workers.request import Delta, FinishReason
from tests.deployments.batch.processes.engine_server import EngineServer
from tests.deployments.ports import free_port
from tests.deployments.serving import ScriptedBackend, Serving, reference_ids, tokenizer
from tests.deployments.tls import certificates_of

NUM_ROWS = 60
BAD = 17  # this row's body is refused


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    folder = Path(f"/tmp/pst-data-{os.getpid()}")
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=128 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(folder),
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class CountingBackend(ScriptedBackend):
    """Knows how many requests it had at once, at most."""

    most_at_once = 0

    async def generate(self, admission: AdmissionRequest) -> AsyncIterator[Delta]:
        self.most_at_once = max(self.most_at_once, len(self.requests) + 1 - self.num_closed)
        async for delta in super().generate(admission):
            yield delta


def prompts(num_rows: int = NUM_ROWS) -> Any:
    rows = [{"id": i, "prompt": f"The river number {i}"} for i in range(num_rows)]
    return ray.data.from_items(rows, override_num_blocks=4)


def body_of(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": row["prompt"],
        "max_tokens": 0 if row["id"] == BAD else 8,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def ids_and_error(row: dict[str, Any]) -> dict[str, Any]:
    answer = row["http_response"]
    ids = [] if answer is None else answer["choices"][0]["token_ids"]
    return {"id": row["id"], "token_ids": ids, "error": row["error"]}


def by_id(rows: Any) -> list[dict[str, Any]]:
    return sorted(rows.take_all(), key=lambda row: row["id"])


def test_each_row_has_its_answer_or_its_error_though_the_server_is_killed(cluster: None) -> None:
    with EngineServer(free_port()) as server:
        options: dict[str, Any] = {"endpoint": COMPLETIONS, "batch_size": 8, "max_in_flight": 4}
        process = build_processor(server.url, body_of, ids_and_error, **options, id_column="id")

        def kill_and_start() -> None:
            time.sleep(1.5)
            server.kill()
            server.start()

        killing = threading.Thread(target=kill_and_start)
        killing.start()
        rows = by_id(process(prompts()))
        killing.join()
        again = by_id(process(prompts()))
        plain = build_processor(server.url, body_of, **options)
        (first, *_, bad) = by_id(plain(prompts(BAD + 1)))
    assert [row["id"] for row in rows] == list(range(NUM_ROWS))
    for row in rows:
        if row["id"] == BAD:
            assert row["error"] == "invalid_value: max_tokens must be at least 1"
            assert not len(row["token_ids"])
            continue
        prompt_ids = tokenizer().encode(f"The river number {row['id']}")
        seed = seed_of(0, str(row["id"]))
        expected = reference_ids(prompt_ids, max_tokens=8, ignore_eos=True, seed=seed)
        assert (list(row["token_ids"]), row["error"]) == (expected, None)
    assert [list(row["token_ids"]) for row in again] == [list(row["token_ids"]) for row in rows]
    assert first["prompt"] == "The river number 0"
    assert first["generated_text"] and first["finish_reason"] == "length"
    assert (first["completion_tokens"], first["error"]) == (8, None)
    assert bad["generated_text"] is None and bad["completion_tokens"] is None
    assert bad["error"].startswith("invalid_value: ")


def test_rows_go_at_the_lowest_priority_many_at_a_time(cluster: None) -> None:
    backend = CountingBackend(0.5, [400], [500, 2], FinishReason.STOP)
    with Serving(backend, api_keys=["key"]) as serving:
        process = build_processor(
            serving.base_url,
            lambda row: {"messages": [{"role": "user", "content": row["prompt"]}], "max_tokens": 3},
            api_key="key",
            seed=9,
        )
        rows = by_id(process(prompts(48)))
        refused = build_processor(serving.base_url, lambda row: {}, api_key="other")
        with pytest.raises(Exception, match=r"refused the API key.*\(in build_processor"):
            refused(prompts(2)).take_all()
    assert all(row["generated_text"] and row["error"] is None for row in rows)
    assert {request.priority for request in backend.requests} == {100}
    seeds = [request.params.seed for request in backend.requests]
    assert len(set(seeds)) == 48 and None not in seeds
    assert 8 <= backend.most_at_once <= 64


def test_a_row_that_waits_too_long_gets_that_as_its_error(cluster: None) -> None:
    with Serving(ScriptedBackend(30.0, FinishReason.STOP)) as serving:
        process = build_processor(serving.base_url, body_of, endpoint=COMPLETIONS, give_up_s=1.0)
        rows = by_id(process(prompts(3)))
    assert [row["error"] for row in rows] == ["gave up after 1 s"] * 3
    with pytest.raises(Exception, match=r"cannot reach .*; is the server running"):
        process(prompts(1)).take_all()


def test_the_page_says_what_works(cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "ray-data.md").read_text()
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    with EngineServer(free_port()) as server:
        exec(found[1].replace("http://127.0.0.1:8000", server.url), {})
    said = capsys.readouterr().out
    assert re.search(r"^What feeds the turbine\? .+ None$", said, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"url": "10.0.0.1:8000"}, "url must be http://host:port"),
        ({"endpoint": "/v1/responses"}, "endpoint must be /v1/chat/completions or"),
        ({"num_actors": 0}, "num_actors must be at least 1; got 0"),
        ({"max_in_flight": 0}, "max_in_flight must be at least 1; got 0"),
        ({"priority": 101}, "priority must be 0 to 100, or None; got 101"),
    ],
)
def test_a_bad_setting_is_named(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"url": "http://127.0.0.1:1", "preprocess": body_of}
    with pytest.raises(ValueError, match=message):
        build_processor(**(given | changed))


def test_a_server_with_tls_is_reached_with_its_ca(cluster: None, tmp_path: Path) -> None:
    make_all(tmp_path, "test", days=1)
    backend = ScriptedBackend([100], [101], FinishReason.STOP)
    with Serving(backend, certificates=certificates_of(tmp_path)) as server:
        options: dict[str, Any] = {"endpoint": COMPLETIONS, "batch_size": 2}
        process = build_processor(
            server.base_url, body_of, ca_file=str(tmp_path / "ca.crt"), **options
        )
        rows = by_id(process(prompts(4)))
        assert [(row["error"], row["completion_tokens"]) for row in rows] == [(None, 2)] * 4
        untrusting = build_processor(server.base_url, body_of, **options)
        with pytest.raises(ray.exceptions.RayError, match="ca_file"):
            untrusting(prompts(4)).take_all()
