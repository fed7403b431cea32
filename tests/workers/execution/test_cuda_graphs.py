"""Decode graphs without a GPU: what would be captured is run again as it is.

So buckets, padding, fixed buffers and what may be replayed at all are those of a GPU, and the ids
must be those of the engine without graphs. Capturing itself only a GPU can show.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.execution.cuda_graphs import MAX_KEYS, MAX_ROWS, DecodeGraphs, GraphSizes
from penstock.workers.execution.step import PreparedStep, PromptRows
from penstock.workers.models.host_batch import HostBatch
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from penstock.workers.sampling.sampler import RowSampling
from tests.workers.checkpoints import make_checkpoint, random_prompt
from tests.workers.commit_rules import stays_always

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
WINDOW: dict[str, Any] = {"context_policy": "sink_window", "sinks": 4, "window": 16, "roll": 8}


class Recorder:
    """In the place of CUDA: `run` is what is replayed. It sees addresses when it is captured."""

    def __init__(self):
        self.num_captured = self.num_replayed = 0

    def __call__(self, run):
        self.num_captured += 1
        run()  # as the warm-up does

        def replay():
            self.num_replayed += 1
            run()

        return replay


@pytest.fixture(scope="module")
def models():
    torch.set_num_threads(1)
    loaded = {}

    def get(name):
        if name not in loaded:
            folder = str(make_checkpoint(name))
            loaded[name] = load_model(folder, weights="fp32", progress=False)
        return loaded[name]

    return get


def make_engine(model, capture=None, rule=None, **given):
    given = {"num_blocks": 128, "block_size": 4, "max_num_seqs": 20, **given}
    engine = Engine(EngineConfig(**given), model, rule, capture)
    engine.arena.storage.fill_(0xFF)  # the buffers of the graphs, too
    return engine


def run(engine, requests, arrivals=None):
    chance, coming = random.Random(arrivals), list(requests)
    ids: dict[str, list[int]] = {}
    while coming or engine.has_work():
        while coming and (arrivals is None or chance.random() < 0.4):
            engine.add(coming.pop(0))
        for delta in engine.step():
            ids.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check()
        for block_id in engine.pool._free:
            engine.arena.block(block_id).fill_(0xFF)
    return ids


SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "a step ahead": {"async_scheduling": "on"},
    "a step ahead, starved": {"async_scheduling": "on", "num_blocks": 30},
    "chunks of 20": {"max_num_batched_tokens": 20},
    "starved, deferral": {"num_blocks": 26, "kv_commit": "deferred", "rule": stays_always(8)},
    "int8": {"kv": "int8"},
    "a short context": {"max_model_len": 90},
}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_ids(models, family, schedule):
    model = models(family)
    requests = [
        Request(f"r{i}", tuple(random_prompt(1 + 5 * i % 37, i)), replace(GREEDY, max_tokens=n))
        for i, n in enumerate(range(9, 20))
    ]
    requests[3] = replace(requests[3], params=SamplingParams(seed=4, max_tokens=20, top_p=0.9))
    requests[4] = replace(requests[4], params=replace(GREEDY, logprobs=2, prompt_logprobs=1))
    requests[5] = replace(requests[5], params=replace(GREEDY, presence_penalty=1.0))
    requests[6] = replace(requests[6], params=replace(GREEDY, max_tokens=60, **WINDOW))
    kv = SCHEDULES[schedule].get("kv", "auto")
    want = run(make_engine(model, kv=kv), requests)
    recorder = Recorder()
    engine = make_engine(model, recorder, **SCHEDULES[schedule])
    assert recorder.num_captured == 6  # 1, 2, 4, 8, 16, 20 rows; contexts of up to 2048 tokens
    assert run(engine, requests, arrivals=1) == want
    stats = engine.stats()
    assert 0 < stats.num_graph_steps == recorder.num_replayed < stats.num_steps


def test_a_step_of_decode_rows_is_replayed_for_any_sequences(models):
    """All steps but those with a prompt in them, or after an eviction."""
    engine = make_engine(models("llama"), Recorder())
    settings: tuple[dict[str, Any], ...] = ({}, {"logprobs": 2}, {"frequency_penalty": 1.0})
    requests = [
        Request(f"r{i}", tuple(random_prompt(5, i)), replace(GREEDY, **params))
        for i, params in enumerate(settings)
    ]
    run(engine, requests)
    assert engine.stats().num_graph_steps == engine.stats().num_steps - 1 == 11
    rolls = replace(GREEDY, max_tokens=40, **WINDOW)
    run(engine, [Request("rolls", tuple(random_prompt(5, 9)), rolls)])
    # 20 tokens, sinks and window, are an ordinary sequence; 5 of them came at once.
    assert engine.stats().num_graph_steps == 11 + 20 - 5


def test_padding_writes_to_no_sequence(models):
    """Five rows of eight: each block that a step does not name stays as it is, to the last byte."""
    engine = make_engine(models("llama"), Recorder(), prefix_cache=False)
    for i in range(5):
        engine.add(Request(f"r{i}", tuple(random_prompt(6, i)), GREEDY))
    engine.step()
    for _ in range(6):
        named = {b for seq in engine.scheduler.running for b in seq.block_table[-2:]}
        before = [engine.arena.block(b).clone() for b in range(engine.pool.num_blocks)]
        engine.step()
        grown = {b for seq in engine.scheduler.running for b in seq.block_table[-2:]}
        changed = {b for b, old in enumerate(before) if not torch.equal(old, engine.arena.block(b))}
        assert changed <= named | grown
        assert len(changed) == 5
    assert engine.stats().num_graph_steps == 6


def test_nan_in_one_row_stays_there(models):
    model = models("llama")
    requests = [Request(f"r{i}", tuple(random_prompt(9, i)), GREEDY) for i in range(3)]
    want = run(make_engine(model), requests)
    engine = make_engine(model, Recorder(), async_scheduling="on")
    for request in requests:
        engine.add(request)
    last = {}
    ids: dict[str, list[int]] = {}
    for step in range(20):
        if step == 3:
            block = engine._sequences["r1"].block_table[0]
            engine.arena.block(block).fill_(0xFF)
        for delta in engine.step():
            ids.setdefault(delta.request_id, []).extend(delta.token_ids)
            last[delta.request_id] = delta
    assert last["r1"].error == "numerical_error"
    assert (ids["r0"], ids["r2"]) == (want["r0"], want["r2"])


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 600), st.integers(1, 200_000), st.sampled_from((1, 16, 64)))
def test_sizes(max_num_seqs, max_len, block_size):
    sizes = GraphSizes.of(max_num_seqs, max_len, block_size)
    assert list(sizes.rows) == sorted(set(sizes.rows))
    assert sizes.rows[-1] == min(max_num_seqs, MAX_ROWS)
    assert all(b <= max(2 * a, a + 16) for a, b in zip((1, *sizes.rows), sizes.rows))
    assert list(sizes.lengths) == sorted(set(sizes.lengths))
    assert sizes.lengths[-1] == max_len
    assert sizes.table_width * block_size >= max_len
    for num_rows, longest in ((1, 1), (sizes.rows[-1], 1), (1, max_len), (max_num_seqs, max_len)):
        pairs = [(r, n) for r, n in sizes.graphs if r >= num_rows and n >= longest]
        found = sizes.graph_for(num_rows, longest)
        assert found == (min(pairs) if pairs else None)
        assert found is not None or num_rows > MAX_ROWS or num_rows * longest > MAX_KEYS // 8
    assert sizes.num_bytes % 256 == 0


def batch_of(lens, width=1, **more):
    num = len(lens)
    ints, narrow = np.arange(num), np.zeros(0, np.int32)
    fields: dict[str, Any] = {
        "token_ids": ints + 5, "positions": np.array(lens) - 1, "slots": ints,
        "decode_tables": np.ones((num, width), np.int32), "decode_lens": np.array(lens, np.int32),
        "prefill_tables": narrow[:, None], "prefill_starts": np.zeros(1, np.int32),
        "prefill_lens": narrow, "max_prefill_chunk": 0,
        "unread": np.zeros((2, 0), np.int64), "rolling": None,
    }  # fmt: skip
    return HostBatch(**(fields | more))


def test_the_smallest_graph_that_fits_and_its_buffers():
    sizes, ran = GraphSizes((1, 2, 4, 6), (100, 800), 50), []
    seen = {}

    def run(token_ids, positions, inputs):
        ran.append((len(token_ids), inputs.decode.max_context_len))
        for name, values in {
            "ids": token_ids,
            "at": positions,
            "slots": inputs.slots,
            "lens": inputs.decode.context_lens,
            "tables": inputs.decode.block_tables,
        }.items():
            seen[name] = values.clone()  # fmt: skip

    memory = torch.empty(sizes.num_bytes, dtype=torch.uint8)
    graphs = DecodeGraphs(sizes, run, lambda run: run, memory)
    for lens, want in (
        ([3], (1, 100)), ([100], (1, 100)), ([5, 101], (2, 800)), ([7, 8, 9], (4, 100)),
        ([800] * 5, (6, 800)), ([1] * 6, (6, 100)),
    ):  # fmt: skip
        batch = batch_of(lens, width=3)
        assert graphs.takes(batch)
        graphs.fill(batch)()
        assert ran.pop() == want
        num, padding = len(lens), want[0] - len(lens)
        assert seen["ids"].tolist() == batch.token_ids.tolist() + [0] * padding
        assert seen["at"].tolist() == batch.positions.tolist() + [0] * padding
        assert seen["slots"].tolist() == batch.slots.tolist() + [-1] * padding
        assert seen["lens"].tolist() == lens + [1] * padding
        assert seen["tables"].shape == (want[0], 50)
        assert seen["tables"][:num, :3].tolist() == batch.decode_tables.tolist()
        assert not seen["tables"][num:, :3].any()
    assert graphs.num_replays == 6
    refused = {
        "too many": batch_of([1] * 7),
        "too long": batch_of([801]),
        "a table that is too wide": batch_of([5], width=51),
        "a prompt beside": batch_of([5], token_ids=np.arange(3)),
        "a prompt alone": batch_of([], token_ids=np.arange(3)),
        "evicted tokens": batch_of([5], rolling=object()),
    }
    for why, batch in refused.items():
        assert not graphs.takes(batch), why


def test_the_setting(models, caplog):
    model = models("llama")
    with pytest.raises(ConfigError, match="cannot be on: this worker computes on a CPU"):
        make_engine(model, cuda_graphs="on")
    with pytest.raises(ConfigError, match="cuda_graphs must be one of auto, on, off"):
        EngineConfig(cuda_graphs="yes")  # type: ignore[arg-type]
    for setting in ("auto", "off"):
        engine = make_engine(model, cuda_graphs=setting)
        assert engine.executor.graphs is None

    def fails(run):
        raise RuntimeError("no capture today")

    with caplog.at_level(logging.ERROR):
        engine = make_engine(model, fails)
    assert "continuing without" in caplog.text
    assert len(run(engine, [Request("a", (5, 6), GREEDY)])["a"]) == 12
    with caplog.at_level(logging.INFO):
        make_engine(model, Recorder())
    assert "captured 6 decode graphs" in caplog.text


def test_only_a_step_that_is_sampled_from_in_all_its_rows_is_replayed():
    row = RowSampling(0.0, 0, 1.0, 0.0, 0.0)
    scored = PromptRows(0, 0, (7,), 0)
    for rows, prompts, want in (([row] * 2, [], True), ([row], [], False),
                                ([row] * 2, [scored], False)):  # fmt: skip
        step = PreparedStep(batch_of([3, 4]), [*range(len(rows))], {}, rows, prompts, [])
        assert step.samples_all == want
