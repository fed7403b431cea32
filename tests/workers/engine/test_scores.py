"""A reranker's score is transformers' own difference of two logits, or the output of its head."""

from __future__ import annotations

import functools
import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from penstock.workers.config import EngineConfig
from penstock.workers.engine.load import load_engine
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.models.score_vector import configured_pooling
from penstock.workers.pooling.scoring import Scoring, read_scoring
from penstock.workers.request import Request, SamplingParams
from penstock.workers.weights.quantize import plan_quantize, write_quantized
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import (
    ALL,
    make_checkpoint,
    random_prompt,
    randomised,
    reference_greedy,
    reference_logits,
)
from tests.workers.text.tokenizers_of import checkpoint

YES, NO = 17, 5
PROMPTS = [tuple(random_prompt(length, seed)) for seed, length in enumerate([1, 15, 16, 33, 130])]
CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-4}
ONE = SamplingParams(temperature=0.0, max_tokens=1)
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "a step ahead": {"async_scheduling": "on"},
    "little memory": {"num_blocks": 44, "block_size": 4, "max_num_batched_tokens": 16},
}


def with_logit_score(tmp_path, name, stated):
    """A copy of the checkpoint `name`, as sentence-transformers keeps rerankers."""
    folder = tmp_path / "model"
    shutil.copytree(make_checkpoint(name), folder)
    kinds = [("base.modules.transformer.Transformer", ""), ("LogitScore", "1_LogitScore")]
    listed = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(stated))
    return folder


def loaded(folder, **settings):
    sizes = {"num_blocks": 64, "max_num_seqs": 12, **settings}
    config = EngineConfig(model=str(folder), device="cpu", **{"weights": "fp32", **sizes})
    engine = load_engine(config, report=lambda _: None)
    engine.arena.storage.fill_(0xFF)  # all NaN
    return engine


def scores(engine, prompts=PROMPTS, others=()):
    requests = [Request(f"s{i}", each, ONE, embeds=True) for i, each in enumerate(prompts)]
    found = answers(engine, [*requests, *others])
    vectors = [np.frombuffer(found[f"s{i}"][0].embedding, dtype="<f4") for i in range(len(prompts))]
    assert {len(each) for each in vectors} == {1}
    return [float(each[0]) for each in vectors], found


def by_logits(name, negative=NO):
    rows = [reference_logits(make_checkpoint(name), each)[-1] for each in PROMPTS]
    return [float(row[YES] - (0.0 if negative is None else row[negative])) for row in rows]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_scores_are_differences_of_transformers_logits_beside_answers(tmp_path, schedule):
    stated = {"true_token_id": YES, "false_token_id": NO}
    engine = loaded(with_logit_score(tmp_path, "qwen3", stated), **SCHEDULES[schedule])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for _ in range(2):  # the second time with hits in the prefix cache
        found, all_of = scores(engine, others=[Request("g", PROMPTS[3], params)])
        np.testing.assert_allclose(found, by_logits("qwen3"), **CLOSE)
        expected = reference_greedy(make_checkpoint("qwen3"), PROMPTS[3], 12)
        assert ids_of(all_of["g"]) == expected
    assert engine.pool.num_live == 0


@pytest.mark.parametrize("name", ["llama-tied", "granite", "qwen3"])
@pytest.mark.parametrize("negative", [NO, None])
def test_the_head_may_be_tied_or_divided_and_one_token_may_count(tmp_path, name, negative):
    stated = {"true_token_id": YES, "false_token_id": negative}
    found, _ = scores(loaded(with_logit_score(tmp_path, name, stated)))
    np.testing.assert_allclose(found, by_logits(name, negative), **CLOSE)


@functools.cache
def classifier(name, num_labels=1):
    """transformers' model of `name` with a head of `num_labels` outputs."""
    model_type, settings = ALL[name]
    config = AutoConfig.for_model(model_type, **settings, num_labels=num_labels)
    return randomised(AutoModelForSequenceClassification.from_config(config))


@pytest.mark.parametrize("name", ["qwen3", "llama", "llama-tied", "qwen2"])
def test_a_head_of_one_output_scores_as_in_transformers(tmp_path, name):
    classifier(name).save_pretrained(tmp_path / "model")
    with torch.inference_mode():
        expected = [float(classifier(name)(torch.tensor([each])).logits[0, 0]) for each in PROMPTS]
    assert len({round(each, 2) for each in expected}) == len(PROMPTS)
    found, _ = scores(loaded(tmp_path / "model"))
    np.testing.assert_allclose(found, expected, **CLOSE)


def int8_plan(source, *, quantize_lm_head=False):
    return plan_quantize(source, "int8", quantize_o=True, quantize_lm_head=quantize_lm_head)


def test_a_quantised_copy_scores_as_its_weights_say(tmp_path):
    """The head that scores is kept as it is, and so is the list of modules."""
    rounding: dict[str, Any] = {"rtol": 0, "atol": 0.4}
    stated = {"true_token_id": YES, "false_token_id": NO}
    source, out = with_logit_score(tmp_path, "qwen3", stated), tmp_path / "out"
    write_quantized(int8_plan(source), out, lambda _: None)
    np.testing.assert_allclose(
        scores(loaded(out, weights="auto"))[0], by_logits("qwen3"), **rounding
    )

    classifier("qwen3").save_pretrained(tmp_path / "classifier")
    write_quantized(int8_plan(tmp_path / "classifier"), tmp_path / "head", lambda _: None)
    exact, _ = scores(loaded(tmp_path / "classifier"))
    assert max(exact) - min(exact) > 2
    np.testing.assert_allclose(
        scores(loaded(tmp_path / "head", weights="auto"))[0], exact, **rounding
    )


def test_a_setting_names_the_words(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("byte_level"), folder)
    shutil.copytree(make_checkpoint("qwen3"), folder, dirs_exist_ok=True)
    options = EngineConfig(model=str(folder), score_tokens="a,b")
    scoring = read_scoring(folder, options)
    assert scoring is not None and None not in (scoring.positive, scoring.negative)
    assert scoring.positive != scoring.negative
    with pytest.raises(ConfigError, match=r"score_tokens: 'a long word' is 10 tokens"):
        read_scoring(folder, EngineConfig(model=str(folder), score_tokens="a long word"))
    for wrong in ("", "a,", "a,b,c"):
        with pytest.raises(ConfigError, match="score_tokens must be one word, or two"):
            EngineConfig(score_tokens=wrong)
    with pytest.raises(ConfigError, match="score_tokens and pooling mean: a model either scores"):
        EngineConfig(score_tokens="a,b", pooling="mean")


def test_pooling_serves_a_reranker_for_embeddings(tmp_path):
    folder = with_logit_score(tmp_path, "qwen3", {"true_token_id": YES, "false_token_id": NO})
    assert read_scoring(folder, EngineConfig(model=str(folder))) == Scoring(YES, NO)
    assert configured_pooling(folder, EngineConfig(pooling="last")).score_vector is None


def test_what_cannot_be_scored_is_refused_by_name(tmp_path):
    stated = {"true_token_id": 100_000, "false_token_id": NO}
    with pytest.raises(ConfigError, match=r"token 100000 cannot be scored by: .* rows"):
        loaded(with_logit_score(tmp_path / "a", "qwen3", stated))
    with pytest.raises(ConfigError, match="true_token_id None, not a token"):
        loaded(with_logit_score(tmp_path / "b", "qwen3", {"false_token_id": NO}))
    stated = {"true_token_id": YES, "false_token_id": NO}
    with pytest.raises(ConfigError, match="caps its logits: serve it with --pooling last"):
        loaded(with_logit_score(tmp_path / "c", "gemma2", stated))
    classifier("qwen3", 3).save_pretrained(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"with 3 labels is not supported: .* one output"):
        loaded(tmp_path / "d")
    folder = with_logit_score(tmp_path / "e", "qwen3", stated)
    write_quantized(int8_plan(folder, quantize_lm_head=True), tmp_path / "f", lambda _: None)
    with pytest.raises(LoadError, match="lm_head"):
        loaded(tmp_path / "f", weights="auto")
