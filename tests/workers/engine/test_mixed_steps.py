"""Steps are really mixed: prompts and decoding rows of different requests in one forward pass.

Seen from the model: which rows it was called with. The ids are transformers'.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from tests.workers.checkpoints import make_checkpoint, random_prompt, reference_greedy

NUM_NEW, CHUNK = 30, 16
SHORT, LONG = random_prompt(5, 1), random_prompt(70, 2)


def serve(
    name: str, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[list[tuple[int, int]], dict[str, list[int]]]:
    """Decode rows and prompt rows of each forward pass, and the ids by request: a long prompt comes
    while another answer is under way."""
    model = load_model(make_checkpoint(name), weights="fp32", progress=False)
    config = EngineConfig(num_blocks=64, max_num_batched_tokens=CHUNK, max_num_seqs=4, **settings)
    engine, passes = Engine(config, model), []
    engine.executor.replay = None  # steps of decode rows would not call the model
    run_layers = model.run_layers

    def watched(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append((inputs.num_decode, len(inputs.slots) - inputs.num_decode))
        return run_layers(inputs, *args, **kwargs)

    monkeypatch.setattr(model, "run_layers", watched)
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    engine.add(Request("short", tuple(SHORT), params))
    ids: dict[str, list[int]] = {"short": []}
    while engine.has_work():
        for delta in engine.step():
            ids[delta.request_id] += delta.token_ids
        if len(ids["short"]) == 4 and "long" not in ids:
            ids["long"] = []
            engine.add(Request("long", tuple(LONG), params))
    engine.close()
    return passes, ids


@pytest.mark.parametrize("name", ["llama", "olmoe"])
def test_a_prompt_joins_those_that_decode(name, monkeypatch):
    passes, ids = serve(name, monkeypatch)
    mixed = [each for each in passes if all(each)]
    assert mixed[:-1] == [(1, CHUNK - 1)] * 4, "chunks of the prompt fill the steps"
    assert len(mixed) == 5 and sum(rows for _, rows in mixed) == len(LONG)
    want = {
        key: reference_greedy(make_checkpoint(name), prompt, NUM_NEW)
        for key, prompt in (("short", SHORT), ("long", LONG))
    }
    assert ids == want


def test_apart_no_step_is_mixed(monkeypatch):
    passes, ids = serve("llama", monkeypatch, merge_steps=False)
    assert passes and not any(all(each) for each in passes)
    assert ids == serve("llama", monkeypatch)[1]
