"""An engine as it is configured: which proposer it has, where it has none, and what it measures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.kernels import text_match
from penstock.workers.config import EngineConfig
from penstock.workers.engine import speculation
from penstock.workers.engine.draft import LARGE, load_draft
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.speculation import proposer_of, widths_of
from penstock.workers.errors import ConfigError
from penstock.workers.execution.draft_model import DraftModel
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import load_model
from penstock.workers.planning.hardware import DEVICES
from penstock.workers.planning.roofline import Roofline
from penstock.workers.request import Request, SamplingParams
from penstock.workers.speculation.proposers import Lookup, Suffix
from penstock.workers.speculation.widths import MeasuredWidths
from penstock.workers.weights.hub import resolve_model
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import ALL, make_checkpoint, random_model, random_prompt

CPU, GPU = SimpleNamespace(type="cpu"), SimpleNamespace(type="cuda")


def model_with(**more: Any) -> Any:
    config = SimpleNamespace(has_states=False)
    known = {"device": CPU, "generates": True, "whole_config": config, "has_expert_caches": False}
    return SimpleNamespace(**{**known, **more})


def proposer_with(how: Any, **more: Any) -> Any:
    return proposer_of(EngineConfig(speculate=how), model_with(**more))


def test_the_proposer_is_the_configured_one():
    assert proposer_with("off") is None
    assert type(proposer_with("lookup")) is Lookup
    assert type(proposer_with("suffix")) is Suffix
    assert type(proposer_with("auto")) is Suffix
    assert proposer_with("auto", device=GPU) is None
    assert type(proposer_with("suffix", device=GPU)) is Suffix


@pytest.mark.parametrize("name", ["builtin", "llama"])
def test_the_planner_counts_the_bytes_of_a_draft_model(name):
    folder = resolve_model(name) if name == "builtin" else make_checkpoint(name)
    config = EngineConfig(model=str(folder), speculate="draft")
    model = load_model(folder, progress=False)
    draft = load_draft(config, folder, "cpu", model)
    assert draft is not None
    shape, device = ModelConfig.from_pretrained(folder), DEVICES["cpu"]
    weights = "fp32" if model.dtype == torch.float32 else "bf16"
    planned = Roofline(
        *(shape, device, weights),
        draft=Roofline(shape, device, "int4", quantised_head=True, wide_layers=False),
    )
    table = model.embedding.nbytes
    assert planned.draft_bytes == pytest.approx(draft.weights.num_bytes - table, rel=0.03)


def test_where_there_are_no_drafts_auto_is_off_and_others_are_refused(monkeypatch):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"has_expert_caches": True}, "expert_cache_gb"),
        ({"generates": False}, "generates no text"),
        ({"whole_config": SimpleNamespace(has_states=True)}, "linear attention has a state"),
    ]
    for more, why in cases:
        assert proposer_with("auto", **more) is None
        for how in ("lookup", "suffix"):
            with pytest.raises(ConfigError, match=f"speculate {how} is not possible: .*{why}"):
                proposer_with(how, **more)
    monkeypatch.setattr(text_match, "is_available", lambda: False)
    assert proposer_with("auto") is None
    with pytest.raises(ConfigError, match="install g"):
        proposer_with("lookup")


def test_rows_that_are_sampled():
    assert EngineConfig(max_num_seqs=2).max_sampled_rows == 2
    assert EngineConfig(max_num_seqs=2, speculate="suffix").max_sampled_rows == 16
    assert EngineConfig(max_num_seqs=64, speculate="suffix").max_sampled_rows == 64
    few = EngineConfig(max_num_seqs=2, max_num_batched_tokens=8, speculate="lookup")
    assert few.max_sampled_rows == 8


@pytest.mark.parametrize("how", ["lookup", "suffix"])
def test_an_engine_of_these_settings_answers_as_without(how):
    """With measured widths, whatever they are here; prompts repeat themselves."""
    model = load_model(make_checkpoint("llama"), weights="fp32", progress=False)
    wanted = [
        SamplingParams(temperature=0.0, max_tokens=60),
        SamplingParams(seed=3, max_tokens=40),
        SamplingParams(seed=4, top_k=2, max_tokens=50),
    ]
    requests = [
        Request(f"r{i}", tuple(random_prompt(20, seed=i) * 3), params)
        for i, params in enumerate(wanted)
    ]
    config = {"num_blocks": 256, "block_size": 4, "max_num_seqs": 4}
    off = Engine(EngineConfig(**config), model)  # type: ignore[arg-type]
    on = Engine(EngineConfig(**config, speculate=how), model)  # type: ignore[arg-type]
    for _ in range(2):
        expected, found = answers(off, requests), answers(on, requests)
        assert {n: ids_of(d) for n, d in found.items()} == {
            n: ids_of(d) for n, d in expected.items()
        }
    drafting = on.scheduler.drafting
    assert drafting is not None and isinstance(drafting.widths, MeasuredWidths)
    assert drafting.widths.costs.seconds(1, 0) > 0
    assert isinstance(drafting.proposer, Lookup) and drafting.proposer.num_bytes == 0


def engine_with_draft(folder: Path, **settings: Any) -> Engine:
    values = {"num_blocks": 256, "block_size": 4, "max_num_seqs": 4, "speculate": "draft"}
    config = EngineConfig(**{**values, "model": str(folder), **settings})
    model = load_model(folder, weights=config.weights, progress=False)
    return Engine(config, model, draft=load_draft(config, folder, "cpu", model))


@pytest.mark.parametrize("is_own", [False, True], ids=["shared", "own"])
def test_an_engine_with_a_draft_model_answers_as_without(is_own, monkeypatch):
    """Of the model itself, or of a named one; and it is not measured for long at the start."""
    monkeypatch.setattr(speculation, "MEASURE_S", 0.05)
    folder = make_checkpoint("llama")
    draft_model = {"draft_model": str(folder), "draft_weights": "bf16"} if is_own else {}
    engine = engine_with_draft(folder, weights="fp32", **draft_model)
    drafting = engine.scheduler.drafting
    assert drafting is not None and isinstance(drafting.model, DraftModel)
    drafts = drafting.model.executor
    assert drafts.model.weights.format == ("bf16" if is_own else "int4")
    assert (drafts.kv_layers[0] is engine.executor.kv_layers[0]) == (not is_own)
    assert drafts.model.dtype == (torch.bfloat16 if is_own else torch.float32)
    assert ("same KV cache: int4 weights" in engine.facts.drafts) == (not is_own)
    is_large = drafts.model.weights.num_bytes > LARGE * engine.model.weights.num_bytes
    assert ("hardly fewer" in engine.facts.drafts) == is_large
    own_blocks = drafts.memory.arena.num_blocks
    assert own_blocks == (engine.arena.num_blocks if is_own else 1)
    model = engine.model
    off = Engine(EngineConfig(num_blocks=256, block_size=4, max_num_seqs=4), model)
    params = [SamplingParams(temperature=0.0, max_tokens=40), SamplingParams(seed=2, max_tokens=30)]
    requests = [Request(f"r{i}", tuple(random_prompt(20, seed=i)), p) for i, p in enumerate(params)]
    expected, found = answers(off, requests), answers(engine, requests)
    assert {n: ids_of(d) for n, d in found.items()} == {n: ids_of(d) for n, d in expected.items()}


def test_memory_for_a_draft_model_is_taken_from_the_pool():
    folder = make_checkpoint("llama")
    model = load_model(folder, weights="fp32", progress=False)
    sizes = {}
    for name, more in {
        "off": {"speculate": "lookup"},
        "shared": {},
        "own": {"draft_model": str(folder)},
    }.items():
        values: dict[str, Any] = {
            "speculate": "draft",
            "max_num_seqs": 32,
            "block_size": 4,
            "kv_cache_gb": 0.004,
        }
        config = EngineConfig(**{**values, **more})
        draft = load_draft(config, folder, "cpu", model)
        engine = Engine(config, model, draft=draft)
        sizes[name] = engine.arena.num_blocks
        drafting = engine.scheduler.drafting
        assert drafting is not None
        if isinstance(drafting.model, DraftModel):
            taken = engine.arena.num_bytes + drafting.model.executor.memory.arena.num_bytes
            assert taken <= 0.004 * 2**30 + 8192
    assert sizes["off"] > sizes["shared"] > sizes["own"]


def test_draft_models_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"draft_model x needs speculate draft; got .* suffix"):
        EngineConfig(speculate="suffix", draft_model="x")
    folder = make_checkpoint("llama")
    with pytest.raises(ConfigError, match=r"256 tokens and the model .*the same vocabulary"):
        engine_with_draft(folder, draft_model=str(with_vocabulary(256, tmp_path)))
    with pytest.raises(ConfigError, match=r"speculate draft is not possible: .*linear attention"):
        engine_with_draft(make_checkpoint("qwen3_next"))
    with pytest.raises(ConfigError, match="as a draft model: its linear attention"):
        engine_with_draft(folder, draft_model=str(make_checkpoint("qwen3_next")))


def with_vocabulary(size: int, folder: Path) -> Path:
    model_type, values = ALL["llama"]
    random_model(model_type, {**values, "vocab_size": size}).save_pretrained(folder)
    return folder


def test_a_slow_start_assumes_costs(monkeypatch):
    model = load_model(make_checkpoint("llama"), weights="fp32", progress=False)
    engine = Engine(EngineConfig(num_blocks=64), model)
    monkeypatch.setattr(speculation, "MEASURE_S", 0.0)
    widths = widths_of(engine.executor, engine.max_model_len)
    assert isinstance(widths, MeasuredWidths)
    assert widths.costs.seconds(4, 0) / widths.costs.seconds(1, 0) == pytest.approx(1.3)
