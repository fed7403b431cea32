"""Whatever settings, requests, arrivals and aborts meet: each answer is that of the request alone.

Ids, logprobs and embeddings are compared bit for bit, on the native path of the CPU. Alone, a
request has an engine with a large pool, and without prefix cache, drafts and async scheduling.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.cpu import native
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.request import Delta, FinishReason, Request
from tests.workers.answers import answers, ids_of, poison_released
from tests.workers.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.workers.commit_rules import stays_by_chance
from tests.workers.engine.scenario import Scenario, scenario
from tests.workers.speculation.draft_steps import AllSteps
from tests.workers.speculation.proposers import Adversary, Mixed, Oracle, Widest

if native.bound.library is None:
    reason = "needs the native library: a row of PyTorch's products has other bits in other batches"
    pytest.skip(reason, allow_module_level=True)

PROPOSERS = {"right": Oracle, "wrong": Adversary, "mixed": Mixed}
MAX_STEPS = 20_000


class Answer(NamedTuple):
    """All that does not depend on the schedule."""

    ids: list[int]
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    finish_reason: FinishReason | None
    stop_token_id: int | None
    embedding: bytes

    @classmethod
    def of(cls, deltas: list[Delta]) -> Answer:
        assert all(delta.error is None for delta in deltas), deltas
        return cls(
            ids_of(deltas),
            [each for delta in deltas for each in delta.logprobs or ()],
            [each for delta in deltas for each in delta.prompt_logprobs or ()],
            deltas[-1].finish_reason,
            deltas[-1].stop_token_id,
            deltas[-1].embedding or b"",
        )

    def after(self, num: int) -> Answer:
        """That of a request that had `num` tokens already."""
        return self._replace(ids=self.ids[num:], logprobs=self.logprobs[num:])


@functools.cache
def model_of(family: str, weights: str, slots: int | None = None) -> Decoder:
    experts = None if slots is None else ExpertSettings(num_slots=slots)
    folder = make_checkpoint(family)
    return load_model(folder, weights=weights, progress=False, experts=experts)


def alone(scene: Scenario, request: Request) -> Answer:
    config = EngineConfig(
        **scene.common, num_blocks=1024 // scene.common["block_size"], prefix_cache=False,
        async_scheduling="off", cuda_graphs="off", speculate="off",
    )  # fmt: skip
    engine = Engine(config, model_of(scene.family, scene.common["weights"]))
    engine.arena.storage.fill_(0xFF)  # NaN
    return Answer.of(answers(engine, [request])[request.request_id])


def engine_of(scene: Scenario, wanted: dict[str, Answer]) -> Engine:
    more: dict[str, Any] = {}
    if scene.drafts in PROPOSERS:
        right = {name: answer.ids for name, answer in wanted.items()}
        more["speculation"] = PROPOSERS[scene.drafts](right, VOCAB_SIZE), Widest()
    elif scene.drafts == "model":
        weights = scene.rng.choice((scene.common["weights"], "int4"))
        more |= {"draft": model_of(scene.family, weights), "draft_steps": AllSteps(scene.rng)}
    if scene.settings["kv_commit"] == "deferred" and scene.rng.random() < 0.5:
        more["commit_rule"] = stays_by_chance(scene.rng)
    model = model_of(scene.family, scene.common["weights"], scene.expert_slots)
    engine = Engine(EngineConfig(**scene.settings), model, **more)
    engine.arena.storage.fill_(0xFF)
    poison_released(engine)
    return engine


def resumed(scene: Scenario, request: Request, ids: list[int]) -> Request:
    """The request, at times with some of its answer, as after the end of another worker."""
    is_whole = request.embeds or request.params.prompt_logprobs is not None or len(ids) < 3
    if is_whole or scene.rng.random() > 0.3:
        return request
    return replace(request, emitted_ids=tuple(ids[: scene.rng.randint(1, len(ids) - 1)]))


def run(scene: Scenario, engine: Engine, requests: list[Request]) -> dict[str, list[Delta]]:
    """The deltas of each; those of an aborted request end without a reason."""
    found: dict[str, list[Delta]] = {}
    coming = list(requests)
    for _ in range(MAX_STEPS):
        while coming and scene.rng.random() < scene.arrival:
            engine.add(coming.pop(0))
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
        engine.check()
        if engine._sequences and scene.rng.random() < scene.abort:
            engine.abort(scene.rng.choice([*engine._sequences]))
        if not coming and not engine.has_work():
            return found
    raise AssertionError("the engine does not come to an end")


@settings(max_examples=120)
@given(seed=st.integers(0, 2**63))
def test_an_answer_is_that_of_the_request_alone(seed):
    scene = scenario(seed)
    wanted = {each.request_id: alone(scene, each) for each in scene.requests}
    engine = engine_of(scene, wanted)
    given = [resumed(scene, each, wanted[each.request_id].ids) for each in scene.requests]
    found = run(scene, engine, given)
    assert engine.stats().num_live_blocks == 0
    for request in given:
        want = wanted[request.request_id].after(len(request.emitted_ids))
        deltas = found.get(request.request_id, [])
        if not deltas or deltas[-1].finish_reason is None:
            assert scene.abort > 0
            assert ids_of(deltas) == want.ids[: len(ids_of(deltas))]
            continue
        assert Answer.of(deltas) == want
