"""New weights under the same name, deployed under load: no answer is of two models.

Two checkpoints of one shape, made with transformers. Ids are those of transformers' own `generate`
in fp32, or of an engine alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.view import ClusterView
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from penstock.workers.stats import WorkerInfo
from penstock.workers.weights.model_digest import model_digest
from tests.deployments.clusters import ENGINE, prompt
from tests.deployments.nodes import UP_S, within
from tests.deployments.rolling import NUM, answers, updated_under_load
from tests.workers.checkpoints import FAMILIES, random_model, reference_greedy
from tests.workers.text.tokenizers_of import checkpoint

NUM_TOKENS, LONG = 60, 1500  # long: a second and more on a fast machine
KILL_S = 200.0
NAME = "the-model"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of the checkpoints: other weights, the same configuration and the same tokenizer."""
    model_type, settings = FAMILIES["llama"]
    shape = {**settings, "vocab_size": 2048, "max_position_embeddings": 2048}
    made = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("weights")
        shutil.copytree(checkpoint("byte_level"), folder, dirs_exist_ok=True)
        random_model(model_type, shape, seed).save_pretrained(folder)
        made.append(folder)
    return made[0], made[1]


@cache
def long_answers(folder: Path) -> list[list[int]]:
    """LONG tokens for each prompt, by an engine alone."""
    engine = Engine(ENGINE, load_model(folder, weights="fp32", progress=False))
    params = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    for number in range(NUM):
        engine.add(Request(str(number), tuple(prompt(number)), params))
    ids: dict[str, list[int]] = {str(number): [] for number in range(NUM)}
    while engine.has_work():
        for delta in engine.step():
            ids[delta.request_id] += delta.token_ids
    return [ids[str(number)] for number in range(NUM)]


@pytest.fixture(scope="module")
def of_first(config: ServeConfig, folders: tuple[Path, Path]) -> ServeConfig:
    return replace(
        config,
        engine=replace(ENGINE, model=str(folders[0])),
        served_model_name=NAME,
        lost_wait_s=3.0,
    )


@pytest.fixture(scope="module")
def of_second(of_first: ServeConfig, folders: tuple[Path, Path]) -> ServeConfig:
    return replace(of_first, engine=replace(ENGINE, model=str(folders[1])))


def deploy(config: ServeConfig) -> None:
    """On the cluster of this folder's tests; nothing is restarted where it is deployed already."""
    cluster = Cluster(config)
    cluster.deploy()
    cluster.wait_until_up(within(UP_S))


def digests(view: ClusterView) -> set[str]:
    return {info.model_digest for info, _ in view.workers}


@pytest.mark.timeout(900)
def test_each_answer_is_of_the_old_weights_or_of_the_new_and_none_fails(
    cluster, of_first, of_second, folders
):
    deploy(of_first)
    prompts = [prompt(number) for number in range(NUM)]
    old, new = ([reference_greedy(each, ids, NUM_TOKENS) for ids in prompts] for each in folders)
    assert all(a[:8] != b[:8] for a, b in zip(old, new, strict=True))
    assert answers(of_first, NUM, NUM_TOKENS) == [(ids, None) for ids in old]

    ended = updated_under_load(cluster, of_first, of_second, NUM_TOKENS)

    assert [error for *_, error in ended if error is not None] == []
    of_new = [ids == new[number] for number, ids, _ in ended]
    of_old = [ids == old[number] for number, ids, _ in ended]
    assert all(a or b for a, b in zip(of_old, of_new, strict=True))
    assert sum(of_old) >= 10 and sum(of_new) >= 10
    assert digests(cluster.view()) == {model_digest(folders[1])}
    assert answers(of_second, NUM, NUM_TOKENS) == [(ids, None) for ids in new]
    served = httpx.get(f"http://127.0.0.1:{of_second.http_port}/v1/models", timeout=30).json()
    assert [each["id"] for each in served["data"]] == [NAME]


class Killer:
    """Kills the last worker of some weights, once workers of others serve beside it. One that
    drains takes no streams of it over; it is listed for some seconds after its end.

    `victim`: what the registry said of that worker.
    """

    def __init__(self, cluster: Cluster, digest: str):
        self.victim: WorkerInfo | None = None
        self._cluster, self._digest = cluster, digest
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _watch(self) -> None:
        until_s = time.monotonic() + KILL_S
        while self.victim is None and time.monotonic() < until_s:
            view = self._cluster.view()
            if len(digests(view)) > 1:
                of_these = [each for each in view.workers if each[0].model_digest == self._digest]
                own = [(info, stats) for info, stats in of_these if not info.is_draining]
                if len(own) == 1 and own[0][1].num_running:
                    self.victim = own[0][0]
                    os.kill(self.victim.pid, signal.SIGKILL)
            time.sleep(0.02)


@pytest.mark.timeout(900)
def test_what_a_killed_worker_of_the_old_weights_began_is_not_continued_by_the_new(
    cluster, of_first, of_second, folders
):
    """The way back. An answer without a worker of its weights ends with an error, as it was."""
    deploy(of_second)
    old, new = long_answers(folders[1]), long_answers(folders[0])
    with Killer(cluster, model_digest(folders[1])) as killer:
        # Hardly a pause: a fast machine would have no stream for most of the time.
        ended = updated_under_load(cluster, of_second, of_first, LONG, pause_s=0.1)
    assert killer.victim is not None

    failed: list[Any] = [each for each in ended if each[2] is not None]
    for number, ids, error in ended:
        if error is None:
            assert ids in (old[number], new[number])
        else:
            assert error.code == "worker_lost", error
            assert ids and ids == old[number][: len(ids)]  # what has no token yet begins anew
    assert 1 <= len(failed) <= 4  # each client had one stream
    assert answers(of_first, NUM, NUM_TOKENS) == [(ids[:NUM_TOKENS], None) for ids in new]
