"""Drafts of a model in a group: the ids of plain decoding, and the drafts of one process.

Real processes. The oracles are the engine of one process without drafts, for ids and logprobs, and
the same with drafts, for what is proposed and what is right of it.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.workers.config import EngineConfig
from penstock.workers.engine import load, speculation
from penstock.workers.engine.draft import load_draft, weight_bytes
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.execution.draft_model import DraftModel
from penstock.workers.models.loader import load_model
from penstock.workers.request import Delta, Request, SamplingParams
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import make_checkpoint
from tests.workers.engine.group.forked_ranks import forked_ranks
from tests.workers.engine.group.test_far_ranks import Here, group_of
from tests.workers.engine.group.test_group import PROMPTS, engine_of
from tests.workers.speculation.draft_steps import AllSteps
from tests.workers.speculation.proposers import Widest
from tests.workers.speculation.test_draft_model import Nothing, counts
from tests.workers.speculation.test_exact import said

Answered = tuple[dict[str, list[Delta]], tuple[int, int, int]]
SHAPES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "tp3": {"tensor_parallel_size": 3},
    "tp4": {"tensor_parallel_size": 4},
    "pp2": {"pipeline_parallel_size": 2},
    "pp2, tp2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}
SINKS = {"context_policy": "sink_window", "sinks": 4, "window": 24, "roll": 8, "max_tokens": 60}
CHUNKS = {"max_num_batched_tokens": 18}
# Apart from the blocks, which of a rank are smaller: so that steps are as large as in one process.
PREEMPTED = {"num_blocks": 30, "kv_commit": "eager", "activation_memory": "separate"}
LONG = {"max_tokens": 50}
INT8_KV = {"kv": "int8", "kv_group": "head"}


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MEASURE_S", 0.05)


def answered(shape: dict[str, Any], params: dict[str, Any], **options: Any) -> Answered:
    """All deltas by request, and the numbers of draft tokens that were proposed, of those that were
    right, and of preemptions. With a draft model, every draft grows as long as it has room."""
    num_ranks = shape.get("tensor_parallel_size", 1) * shape.get("pipeline_parallel_size", 1)
    with forked_ranks():
        engine = engine_of(**{"num_ranks": 1, "threads": num_ranks, **shape, **options})
    try:
        has_drafts = engine.config.speculate == "draft"
        if has_drafts:
            draft_always(engine)
        found = answers(engine, requests(params))
        proposed, accepted = counts(engine) if has_drafts else (0, 0)
        return found, (proposed, accepted, engine.stats().num_preemptions)
    finally:
        engine.close()


def draft_always(engine: Engine) -> None:
    drafting = engine.scheduler.drafting
    assert drafting is not None and isinstance(drafting.model, DraftModel)
    drafting.proposer, drafting.widths, drafting.model.steps = Nothing(), Widest(), AllSteps()


def requests(params: dict[str, Any]) -> list[Request]:
    """Every second one is sampled."""
    made = []
    for number, (name, prompt) in enumerate(PROMPTS.items()):
        values = {"temperature": 0.9 * (number % 2), "seed": number, "max_tokens": 20 + number}
        more = {"ignore_eos": True, "logprobs": 2, **params}
        made.append(Request(name, prompt, SamplingParams(**{**values, **more})))
    return made


def of_all(deltas: dict[str, list[Delta]]) -> dict[str, Any]:
    """Ids and logprobs, however many came at a time."""
    return {
        name: (ids_of(each), [entry for delta in each for entry in delta.logprobs or ()])
        for name, each in deltas.items()
    }


def same(plain: dict[str, Any], one: Answered, group: Answered, *, is_preempted: bool) -> None:
    assert of_all(group[0]) == plain
    assert said(group[0]) == said(one[0])
    assert group[1] == one[1]
    proposed, accepted, num_preemptions = group[1]
    assert 0 < accepted < proposed and (num_preemptions > 0) == is_preempted


@pytest.mark.parametrize(
    ("name", "shape", "options", "params"),
    [
        ("llama", "tp2", {"weights": "fp32", **CHUNKS}, {}),
        ("llama-tied", "tp2", {"weights": "bf16", **PREEMPTED}, LONG),
        ("llama", "tp3", {"weights": "bf16", **INT8_KV}, {}),  # ranks with the same KV head
        ("llama", "tp4", {"draft_weights": "int8"}, SINKS),
        ("qwen2_moe", "tp2", {"weights": "fp32"}, {}),  # whose passes make an odd number of calls
        ("olmo2", "tp2", {"async_scheduling": "on"}, {}),  # a norm over the heads of all ranks
        ("llama", "pp2", {"weights": "bf16", **CHUNKS}, SINKS),
        ("gpt_oss-window", "pp2", PREEMPTED, LONG),  # three layers
        ("llama", "pp2, tp2", {"weights": "fp32", **INT8_KV}, {}),
    ],
)  # fmt: skip
def test_the_model_itself_drafts_as_in_one_process(name, shape, options, params):
    model = str(make_checkpoint(name))
    plain = of_all(answered({}, params, model=model, **options)[0])
    drafted = [
        answered(each, params, model=model, speculate="draft", **options)
        for each in ({}, SHAPES[shape])
    ]
    same(plain, *drafted, is_preempted="num_blocks" in options)


@pytest.mark.parametrize(
    ("shape", "options", "params"),
    [("tp2", CHUNKS, SINKS), ("pp2, tp2", PREEMPTED, LONG), ("pp2", INT8_KV, {})],
)
def test_another_model_drafts_on_the_first_rank(shape, options, params):
    """Its blocks have the numbers of the model's, of which each rank has its heads."""
    model = str(make_checkpoint("llama"))
    drafts = {"speculate": "draft", "draft_model": model}
    plain = of_all(answered({}, params, model=model, **options)[0])
    one = answered({}, params, model=model, **drafts, **options)
    group = answered(SHAPES[shape], params, model=model, **drafts, **options)
    same(plain, one, group, is_preempted="num_blocks" in options)


@pytest.mark.parametrize("shape", ["tp2", "pp2, tp2"])
def test_by_collective_operations(shape, monkeypatch):
    """What GPUs use, by gloo."""
    monkeypatch.setattr(load, "transport_of", lambda device, is_far: "gloo")
    options = {"model": str(make_checkpoint("llama")), "weights": "bf16", "speculate": "draft"}
    one, group = answered({}, {}, **options), answered(SHAPES[shape], {}, **options)
    same(of_all(one[0]), one, group, is_preempted=False)


@pytest.mark.parametrize("is_far", [True, False])
def test_ranks_of_another_machine_and_host_memory(is_far):
    """When blocks come back is a matter of time, and so are drafts: ids and logprobs are not. On
    one machine the draft model is another model, and has no K and V of what comes back."""
    model = str(make_checkpoint("llama"))
    plain = of_all(answered({}, LONG, model=model)[0])
    options: dict[str, Any] = {"speculate": "draft", "host_kv_gb": 0.01, **PREEMPTED}
    with forked_ranks():
        group = (
            group_of(model, 2, (Here(),), **options)
            if is_far
            else engine_of(model, 2, draft_model=model, **options)
        )
    try:
        draft_always(group)
        assert of_all(answers(group, requests(LONG))) == plain
        assert counts(group)[1] > 0 and group.stats().num_preemptions > 0
    finally:
        group.close()


def test_each_rank_has_its_part_of_the_draft_model():
    """Or, of another model, the first one has all of it."""
    folder = make_checkpoint("llama")
    model = load_model(folder, weights="bf16", progress=False)
    for name in (None, str(folder)):
        settings: dict[str, Any] = {"speculate": "draft", "draft_model": name, "weights": "bf16"}
        draft = load_draft(EngineConfig(**settings), folder, "cpu", model)
        assert draft is not None
        with forked_ranks():
            engine = engine_of(str(folder), 1, threads=2, pipeline_parallel_size=2, **settings)
        try:
            first, second = (rank.weight_bytes for rank in engine.model.ranks())
            assert first + second == weight_bytes(model, draft)
            of_model = model.weights.num_bytes - engine.model.weights.num_bytes
            assert (second > of_model) == (name is None)
            assert "on the first rank" in engine.facts.drafts
        finally:
            engine.close()


def test_what_a_draft_model_cannot_be_beside_is_refused():
    with forked_ranks(), pytest.raises(ConfigError, match="speculate draft is not possible: its"):
        engine_of(str(make_checkpoint("qwen2_moe")), 2, speculate="draft", expert_cache_gb=0.01)
