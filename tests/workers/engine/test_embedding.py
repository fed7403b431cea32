"""An embedding is transformers' own pooled hidden state, whatever the schedule, beside answers."""

from __future__ import annotations

import functools
import json
import shutil
import struct
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from penstock.workers.channel.codec import delta_from, delta_message, request_from, submit_message
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.load import load_engine
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.models.loader import load_model
from penstock.workers.pooling.pooling import LAST, MEAN, Pooling, read_pooling
from penstock.workers.request import FinishReason, Request, RequestError, SamplingParams
from penstock.workers.weights.quantize import plan_quantize, write_quantized
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import make_checkpoint, random_prompt, reference_greedy
from tests.workers.gguf_files import file_of, pair, text

LENGTHS = [1, 2, 15, 16, 17, 33, 50, 64, 7, 40, 23, 130]
PROMPTS = [tuple(random_prompt(length, seed)) for seed, length in enumerate(LENGTHS)]
# As close as sums of the same fp32 numbers in another order are.
CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-5}
NUM_NEW = 12
ONE = SamplingParams(temperature=0.0, max_tokens=1)
LITTLE: dict[str, Any] = {"num_blocks": 44, "block_size": 4, "max_num_seqs": 12}
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "a step ahead": {"async_scheduling": "on"},
    "a step ahead, chunks of 7": {
        **{"async_scheduling": "on", "max_num_batched_tokens": 7, "max_num_seqs": 4}
    },
    "little memory": {**LITTLE, "max_num_batched_tokens": 16},
    "little memory, no prefix cache": {**LITTLE, "prefix_cache": False},
    "always deferred": {"kv_commit": "deferred", "kv_defer_mode": "always"},
}


@functools.cache
def hidden_states(folder, prompt: tuple[int, ...]) -> np.ndarray:
    """transformers' last_hidden_state of one prompt alone, [T, hidden]."""
    with torch.inference_mode():
        output = base_model(folder)(torch.tensor([list(prompt)]), use_cache=False)
    return output.last_hidden_state[0].numpy()


@functools.cache
def base_model(folder):
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def pooled(folder, prompt, kind):
    states = hidden_states(folder, tuple(prompt))
    return states[-1] if kind == LAST else states.mean(axis=0)


@pytest.fixture(scope="module")
def qwen3():
    folder = make_checkpoint("qwen3")
    return folder, load_model(str(folder), weights="fp32", progress=False)


def make_engine(model, kind=LAST, **settings):
    """An engine whose fresh memory is all NaN."""
    config = EngineConfig(**{"num_blocks": 256, "block_size": 16, "pooling": kind, **settings})
    engine = Engine(config, model)
    engine.arena.storage.fill_(0xFF)
    return engine


def embeds(prompt, name="e", **fields):
    return Request(name, tuple(prompt), ONE, embeds=True, **fields)


def vector(deltas):
    """The embedding in the only delta of a request."""
    (delta,) = deltas
    assert (delta.token_ids, delta.finish_reason) == ([], FinishReason.STOP)
    assert delta.times is not None
    return np.frombuffer(delta.embedding, dtype="<f4")


def generates(prompt, name, num):
    params = SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True)
    return Request(name, tuple(prompt), params)


@pytest.mark.parametrize("kind", [LAST, MEAN])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_embeddings_are_transformers_beside_answers(qwen3, kind, schedule):
    folder, model = qwen3
    engine = make_engine(model, kind, **SCHEDULES[schedule])
    requests = []
    for i, prompt in enumerate(PROMPTS):
        requests.append(embeds(prompt, f"e{i}"))
        requests.append(generates(prompt[:30], f"g{i}", NUM_NEW))
    for _ in range(2):  # the second time with hits in the prefix cache
        found = answers(engine, requests)
        for i, prompt in enumerate(PROMPTS):
            want = pooled(folder, prompt, kind)
            np.testing.assert_allclose(vector(found[f"e{i}"]), want, **CLOSE, err_msg=f"{i}")
            assert ids_of(found[f"g{i}"]) == reference_greedy(folder, prompt[:30], NUM_NEW)
    assert engine.pool.num_live == 0


@pytest.mark.parametrize("kind", [LAST, MEAN])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_cache": False},
        {"prefix_cache": False, "host_kv_gb": 0.01, "kv_restore": "load"},
        {"host_kv_gb": 0.01, "kv_restore": "load"},
        {"async_scheduling": "on"},
        {"kv_commit": "deferred"},
    ],
)
def test_a_preempted_prompt_is_embedded_as_if_it_had_not_been(qwen3, kind, settings):
    """The answer is older, so the prompt makes room for it when half of it is computed."""
    folder, model = qwen3
    long, short = PROMPTS[LENGTHS.index(130)], PROMPTS[LENGTHS.index(33)]
    steps = {"max_num_batched_tokens": 4, "max_num_seqs": 4}
    engine = make_engine(model, kind, **(LITTLE | steps | settings))
    found = answers(engine, [generates(short, "g", 48), embeds(long)])
    np.testing.assert_allclose(vector(found["e"]), pooled(folder, long, kind), **CLOSE)
    assert ids_of(found["g"]) == reference_greedy(folder, short, 48)
    assert engine.stats().num_preemptions > 0, "the prompt was not preempted"


def test_a_hit_spares_all_but_the_last_token_and_none_of_a_mean(qwen3):
    folder, model = qwen3
    long = PROMPTS[LENGTHS.index(130)]
    for kind, most in ((LAST, 128), (MEAN, 0)):
        engine = make_engine(model, kind)
        answers(engine, [generates(long, "first", 2)])
        (delta,) = answers(engine, [embeds(long)])["e"]
        assert delta.num_cached_tokens == most
        np.testing.assert_allclose(vector([delta]), pooled(folder, long, kind), **CLOSE)
        # What an embedding computed, an answer to the same prompt finds.
        (last, *_) = answers(engine, [generates(long, "again", 2)])["again"]
        assert last.num_cached_tokens == 128


def test_its_blocks_are_free_when_it_ends_and_when_it_is_dropped(qwen3):
    _, model = qwen3
    # With a step ahead, blocks are freed when the step is read that uses them.
    engine = make_engine(model, max_num_batched_tokens=8, max_num_seqs=4, async_scheduling="off")
    engine.add(embeds(PROMPTS[7], "dropped"))
    engine.step()
    assert engine.pool.num_live > 0
    assert engine.abort("dropped")
    assert engine.pool.num_live == 0 and not engine.has_work()
    answers(engine, [embeds(PROMPTS[7])])
    assert engine.pool.num_live == 0
    assert engine.stats().num_finished == {"stop": 1, "length": 0, "abort": 1, "error": 0}
    assert engine.stats().num_generated_tokens == 0


def test_a_text_may_be_as_long_as_the_context_and_no_longer(qwen3):
    folder, model = qwen3
    engine = make_engine(model, max_model_len=64)
    prompt = PROMPTS[7]
    found = answers(engine, [embeds(prompt)])
    np.testing.assert_allclose(vector(found["e"]), pooled(folder, prompt, LAST), **CLOSE)
    with pytest.raises(RequestError, match="65 tokens, and this model takes at most 64") as caught:
        engine.add(embeds((*prompt, 5)))
    assert caught.value.code == "context_length_exceeded"


def test_a_vector_that_is_not_finite_ends_its_request_alone(qwen3):
    folder, model = qwen3
    engine = make_engine(model)
    broken = replace_embedding(model, 9, torch.nan)
    try:
        engine.add(embeds((5, 9, 4), "bad"))
        engine.add(embeds((5, 8, 4), "good"))
        ends = {each.request_id: each for _ in range(1) for each in engine.step()}
    finally:
        replace_embedding(model, 9, broken)
    assert ends["bad"].error == "numerical_error"
    np.testing.assert_allclose(vector([ends["good"]]), pooled(folder, (5, 8, 4), LAST), **CLOSE)


def replace_embedding(model, token, value):
    before = model.embedding[token].clone()
    model.embedding[token] = value
    return before


def test_the_channel_carries_request_and_vector(qwen3):
    _, model = qwen3
    request = embeds(PROMPTS[3], deadline_s=None)
    there = request_from(submit_message(request, 1, 0), "e")
    assert there == request
    (delta,) = answers(make_engine(model), [request])["e"]
    back = delta_from(delta_message(delta, 1), "e")
    assert back.embedding == delta.embedding and len(back.embedding) == 4 * 64


# -- checkpoints


def saved_as(tmp_path, name, *, headless=False, pooling=None, modules=(), **settings):
    """A copy of the checkpoint `name`, as sentence-transformers keeps models."""
    folder = tmp_path / "model"
    shutil.copytree(make_checkpoint(name), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    if headless:
        tensors = load_file(folder / "model.safetensors")
        bare = {key.removeprefix("model."): value for key, value in tensors.items()}
        bare.pop("lm_head.weight", None)
        save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    if pooling is not None:
        kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *modules]
        listed = [
            {"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def loaded(folder, **settings):
    return load_engine(
        EngineConfig(model=str(folder), weights="fp32", num_blocks=64, device="cpu", **settings),
        report=lambda _: None,
    )


def test_a_checkpoint_of_the_decoder_alone_embeds_and_with_a_tied_head_generates(tmp_path):
    prompt = PROMPTS[6]
    folder = saved_as(tmp_path, "llama-tied", headless=True, architectures=["LlamaModel"])
    engine = loaded(folder)
    found = answers(engine, [embeds(prompt), generates(prompt, "g", 8)])
    np.testing.assert_allclose(vector(found["e"]), pooled(folder, prompt, LAST), **CLOSE)
    assert ids_of(found["g"]) == reference_greedy(make_checkpoint("llama-tied"), prompt, 8)


def test_without_any_head_generation_is_refused_by_name(tmp_path):
    folder = saved_as(tmp_path, "qwen3", headless=True)
    engine = loaded(folder)
    found = answers(engine, [embeds(PROMPTS[6])])
    np.testing.assert_allclose(vector(found["e"]), pooled(folder, PROMPTS[6], LAST), **CLOSE)
    with pytest.raises(RequestError, match=r"no LM head .* ask it for embeddings") as caught:
        engine.add(generates(PROMPTS[6], "g", 8))
    assert caught.value.param == "model"


def test_a_quantised_copy_has_the_names_of_a_whole_model_and_needs_a_head(tmp_path):
    folder = saved_as(tmp_path, "llama-tied", headless=True)
    plan = plan_quantize(folder, "fp8", quantize_o=True, quantize_lm_head=False)
    write_quantized(plan, tmp_path / "out", lambda _: None)
    request = embeds(PROMPTS[6])
    (one,) = answers(make_engine(load_model(folder, weights="fp8", progress=False)), [request])["e"]
    (other,) = answers(make_engine(load_model(tmp_path / "out", progress=False)), [request])["e"]
    np.testing.assert_allclose(vector([one]), vector([other]), **CLOSE)
    other_folder = saved_as(tmp_path / "untied", "qwen3", headless=True)
    with pytest.raises(ConfigError, match="saved without an LM head"):
        plan_quantize(other_folder, "int8", quantize_o=True, quantize_lm_head=False)


def test_a_whole_checkpoint_that_lacks_its_head_is_damaged(tmp_path):
    folder = saved_as(tmp_path, "qwen3")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"lm_head\.weight"):
        loaded(folder)


@pytest.mark.parametrize(
    ("stated", "asked", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "auto", MEAN),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "auto", LAST),
        ({"pooling_mode_lasttoken": True}, "mean", MEAN),
        ({"pooling_mode_cls_token": True}, "mean", MEAN),
    ],
)
def test_pooling_is_as_the_files_say_unless_the_setting_does(tmp_path, stated, asked, kind):
    folder = saved_as(tmp_path, "qwen3", pooling=stated, modules=[("Normalize", "2_Normalize")])
    engine = loaded(folder, pooling=asked)
    found = answers(engine, [embeds(PROMPTS[6])])
    np.testing.assert_allclose(vector(found["e"]), pooled(folder, PROMPTS[6], kind), **CLOSE)


def test_without_such_files_it_is_the_last_token(tmp_path):
    assert read_pooling(make_checkpoint("qwen3"), "auto") == Pooling(LAST)


@pytest.mark.parametrize(
    ("stated", "modules", "why"),
    [
        ({"pooling_mode_cls_token": True}, [], "its pooling is pooling_mode_cls_token"),
        (
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            [],
            "pooling_mode_lasttoken + pooling_mode_mean_tokens",
        ),
        ({"pooling_mode_lasttoken": True}, [("Dense", "2_Dense")], "a module Dense"),
    ],
)
def test_what_we_cannot_pool_is_refused_and_answers_go_on(tmp_path, stated, modules, why):
    folder = saved_as(tmp_path, "qwen3", pooling=stated, modules=modules)
    engine = loaded(folder)
    with pytest.raises(RequestError) as caught:
        engine.add(embeds(PROMPTS[6]))
    assert why in caught.value.message and "--pooling last" in caught.value.message
    assert ids_of(answers(engine, [generates(PROMPTS[6], "g", 4)])["g"]) == reference_greedy(
        make_checkpoint("qwen3"), PROMPTS[6], 4
    )


@pytest.mark.parametrize(
    ("number", "kind"), [(None, LAST), (0, LAST), (1, MEAN), (3, LAST), (2, "cls"), (4, "rank")]
)
def test_a_gguf_file_says_it_in_its_metadata(tmp_path, number, kind):
    pairs = [pair("general.architecture", 8, text("qwen3"))]
    if number is not None:
        pairs.append(pair("qwen3.pooling_type", 4, struct.pack("<I", number)))
    file = tmp_path / "model.gguf"
    file.write_bytes(file_of(pairs, [], b""))
    found = read_pooling(file, "auto")
    if kind in (LAST, MEAN):
        assert found == Pooling(kind)
    else:
        assert f"its pooling_type is {kind}" in found.refusal
    assert read_pooling(file, "mean") == Pooling(MEAN)


def test_a_damaged_list_of_modules_is_named(tmp_path):
    folder = saved_as(tmp_path, "qwen3", pooling={"pooling_mode_lasttoken": True})
    (folder / "modules.json").write_text('[{"idx": 0}]')
    with pytest.raises(ConfigError, match=r"modules\.json should be a list of modules"):
        loaded(folder)
