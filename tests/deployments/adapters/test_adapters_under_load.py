"""A real cluster of two workers: adapters as model names, loaded and dropped under load.

Each oracle is transformers' `generate` on the merged checkpoint, in fp32.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from penstock.deployments.client import AsyncClient
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.workers.weights.hub import resolve_model
from tests.deployments.clusters import ENGINE, await_view, prompt, running
from tests.deployments.ports import free_port
from tests.workers.adapters.peft_files import merged, write_adapter
from tests.workers.checkpoints import reference_greedy

NAMES = ("one", "two", "three")
NUM_NEW, NUM_LONG = 24, 128  # tokens of an answer; the long ones still run when a worker is killed
PROMPTS = range(3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, base = tmp_path_factory.mktemp("adapters"), resolve_model("builtin")
    return {
        name: write_adapter(root / name, base, rank=rank, seed=rank, lora_alpha=0.4 * rank)
        for name, rank in zip(NAMES, (3, 4, 9))
    }


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """The answers to all prompts by model name."""
    base = resolve_model("builtin")
    found = {"builtin": base} | {
        name: merged(folder, base, folder.parent / f"{name}-merged")
        for name, folder in folders.items()
    }
    ids = {
        name: [reference_greedy(folder, prompt(n), NUM_NEW) for n in PROMPTS]
        for name, folder in found.items()
    }
    assert all(len({tuple(ids[name][n]) for name in ids}) == len(ids) for n in PROMPTS)
    return ids


@pytest.fixture(scope="module")
def config(folders: dict[str, Path]) -> ServeConfig:
    engine = replace(
        ENGINE,
        enable_lora=True,
        lora_modules=f"one={folders['one']}",
        max_loras=2,
        lora_runtime_updates=True,
    )
    return ServeConfig(
        engine=engine,
        served_model_name="builtin",
        http_port=free_port(),
        grpc_port=free_port(),
        metrics_port=0,
        api_metrics=True,
        num_workers=2,
        app_name="penstock-adapters",
        drain_s=5.0,
    )


@pytest.fixture(scope="module")
def cluster(config: ServeConfig) -> Iterator[Cluster]:
    with running(config) as cluster:
        yield cluster


class Caller:
    """Requests to the cluster, and their answers."""

    def __init__(self, config: ServeConfig):
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.http_port}", timeout=60)
        self._grpc_target = f"127.0.0.1:{config.grpc_port}"

    async def ids(self, model: str, number: int, *, over_grpc: bool) -> list[int]:
        if over_grpc:
            return await self.streamed(model, number, NUM_NEW)
        return await self.completed(model, number, NUM_NEW)

    async def completed(self, model: str, number: int, num_new: int) -> list[int]:
        body = {
            "model": model, "prompt": prompt(number), "temperature": 0, "max_tokens": num_new,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    async def streamed(
        self, model: str, number: int, num_new: int, has_begun: asyncio.Event | None = None
    ) -> list[int]:
        """`has_begun` is set by the first token."""
        ids: list[int] = []
        async with AsyncClient(self._grpc_target, model=model) as client:
            async for piece in client.generate(
                prompt(number), temperature=0.0, max_tokens=num_new, ignore_eos=True
            ):
                ids += piece.token_ids
                if has_begun is not None:
                    has_begun.set()
        return ids

    async def num_continued(self) -> float:
        """Times that a request went on at another worker."""
        page = (await self.http.get("/metrics")).text
        (line,) = re.findall("^penstock_requests_continued_total (.+)$", page, re.MULTILINE)
        return float(line)

    async def change(self, verb: str, **body: object) -> httpx.Response:
        return await self.http.post(f"/v1/{verb}_lora_adapter", json=body)

    async def close(self) -> None:
        await self.http.aclose()


def test_adapters_come_and_go_while_others_answer(cluster, config, folders, wanted):
    asyncio.run(_come_and_go(config, folders, wanted))
    await_view(cluster, lambda view: all(not s.num_live_blocks for _, s in view.workers), 60)


async def _come_and_go(config, folders, wanted):
    caller = Caller(config)
    await caller.change("unload", lora_name="extra")  # of an attempt before this one
    is_over, num_right = asyncio.Event(), 0

    async def keep_asking(model: str, over_grpc: bool) -> None:
        nonlocal num_right
        while not is_over.is_set():
            for number in PROMPTS:
                found = await caller.ids(model, number, over_grpc=over_grpc)
                assert found == wanted[model][number], (model, number)
                num_right += 1

    load = [
        asyncio.create_task(keep_asking(model, over_grpc))
        for model in ("builtin", "one")
        for over_grpc in (False, True)
    ]
    try:
        for _ in range(3):
            await _one_round(caller, folders, wanted)
    finally:
        is_over.set()
        await asyncio.gather(*load)
    assert num_right > 20
    await caller.close()


async def _one_round(caller: Caller, folders, wanted) -> None:
    """Load an adapter, ask it, replace it, drop it while answers run."""
    loaded = await caller.change("load", lora_name="extra", lora_path=str(folders["two"]))
    assert loaded.json() == {"model": "builtin", "adapters": ["extra", "one"]}
    listed = (await caller.http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [
        ("builtin", None), ("extra", "builtin"), ("one", "builtin"),
    ]  # fmt: skip
    twice = await caller.change("load", lora_name="extra", lora_path=str(folders["two"]))
    assert twice.status_code == 400 and "load_inplace" in twice.text
    full = await caller.change("load", lora_name="more", lora_path=str(folders["three"]))
    assert full.status_code == 400 and "max_loras" in full.text
    wrong = await caller.change("load", lora_name="extra", lora_path="/nowhere", load_inplace=True)
    assert wrong.status_code == 400 and "adapter_config.json" in wrong.text
    for over_grpc in (False, True):  # the failed load left it as it was
        found = await caller.ids("extra", 0, over_grpc=over_grpc)
        assert found == wanted["two"][0]
    again = await caller.change(
        "load", lora_name="extra", lora_path=str(folders["three"]), load_inplace=True
    )
    assert again.status_code == 200, again.text
    asked = [caller.ids("extra", n, over_grpc=bool(n % 2)) for n in PROMPTS]
    assert await asyncio.gather(*asked) == wanted["three"]
    dropped = await caller.change("unload", lora_name="extra")
    assert dropped.json() == {"model": "builtin", "adapters": ["one"]}
    gone = await caller.http.post("/v1/completions", json={"model": "extra", "prompt": "a"})
    assert gone.status_code == 404 and "served: builtin, one" in gone.text


def test_a_new_worker_has_the_adapters_that_were_loaded(cluster, config, folders, wanted):
    """Streams of an adapter survive their worker, and the worker that replaces it has both."""
    base, folder = resolve_model("builtin"), folders["three"]
    whole = merged(folder, base, folder.parent / "late-merged")
    asyncio.run(
        _lose_a_worker(
            cluster, config, folder, [reference_greedy(whole, prompt(n), NUM_LONG) for n in PROMPTS]
        )
    )


async def _lose_a_worker(cluster, config, folder, wanted):
    caller = Caller(config)
    for name in ("extra", "late"):  # of attempts before this one
        await caller.change("unload", lora_name=name)
    await asyncio.to_thread(await_view, cluster, lambda view: len(view.workers) == 2, 120)
    loaded = await caller.change("load", lora_name="late", lora_path=str(folder))
    assert loaded.status_code == 200, loaded.text
    before, num_before = await asyncio.to_thread(cluster.view), await caller.num_continued()
    begun = [asyncio.Event() for _ in range(2 * len(PROMPTS))]
    asked = [
        asyncio.create_task(each)
        for i, has_begun in enumerate(begun)
        for each in (
            caller.streamed("late", i % len(PROMPTS), NUM_LONG, has_begun),
            caller.completed("late", i % len(PROMPTS), NUM_LONG),
        )
    ]
    await asyncio.gather(*(each.wait() for each in begun))
    old = before.workers[0][0]
    os.kill(old.pid, signal.SIGKILL)
    right = [wanted[i % len(PROMPTS)] for i in range(len(begun)) for _ in range(2)]
    assert await asyncio.gather(*asked) == right
    assert await caller.num_continued() > num_before  # some of them ran at that worker
    is_replaced = functools.partial(_is_replaced, epoch=old.epoch)
    view = await asyncio.to_thread(await_view, cluster, is_replaced, 120)
    assert {info.adapters for info, _ in view.workers} == {("late", "one")}
    dropped = await caller.change("unload", lora_name="late")
    assert dropped.status_code == 200
    await caller.close()


def _is_replaced(view, epoch: int) -> bool:
    return len(view.workers) == 2 and all(info.epoch != epoch for info, _ in view.workers)
