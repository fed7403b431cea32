"""`penstock.LLM` over the real engine: ids, text, order, errors, threads and endings."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from penstock.deployments.ingress.http.openai.requests import CompletionRequest
from penstock.deployments.offline.llm import LLM, GenerationError
from penstock.deployments.offline.sampling_params import SamplingParams
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.request import PARAMETERS, RequestError
from penstock.workers.weights.hub import resolve_model
from tests.deployments.serving import reference_ids, tokenizer
from tests.workers.checkpoints import reference_greedy

PROMPTS = ["It was a bright morning, and", "The river", "A lamp in the window of the mill"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
QUESTION = [{"role": "user", "content": "What feeds the turbine?"}]
SLOTS = 4
TEXT: Any = "x"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin", weights="fp32", max_num_seqs=SLOTS, num_blocks=512, threads=1) as opened:
        yield opened


def test_greedy_ids_are_those_of_transformers(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        prompt_ids = tokenizer().encode(prompt)
        expected = reference_greedy(resolve_model("builtin"), prompt_ids, 24)
        answer = output.outputs[0]
        assert answer.token_ids == expected
        assert answer.text == tokenizer().decode([*prompt_ids, *expected])[len(prompt) + 13 :]
        assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
        assert (output.prompt, output.prompt_token_ids) == (prompt, prompt_ids)
        assert output.finished and output.request_id
    assert len({output.request_id for output in outputs}) == len(PROMPTS)


def test_the_tokenizer_reads_texts_and_conversations_as_the_model_does(llm: LLM) -> None:
    found = llm.get_tokenizer()
    ids = found.encode(PROMPTS[1])
    (output,) = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)
    assert ids == output.prompt_token_ids and ids[0] == found.bos_token_id
    assert found.decode(ids, skip_special_tokens=True) == PROMPTS[1]
    assert found.decode(ids[-1]) == found.decode([ids[-1]])
    assert found.eos_token_id in tokenizer().eos_token_ids
    (output,) = llm.chat(QUESTION, GREEDY, use_tqdm=False)
    ids = found.apply_chat_template(QUESTION, add_generation_prompt=True)
    assert ids == output.prompt_token_ids
    shorter = found.apply_chat_template(QUESTION)
    assert shorter == ids[: len(shorter)] and len(shorter) < len(ids)
    text = found.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert found.encode(text, add_special_tokens=False) == ids
    assert found.chat_template and QUESTION[0]["content"] in text
    with pytest.raises(RequestError, match="role"):
        found.apply_chat_template([{"content": TEXT}])


def test_prompts_of_all_forms_give_the_same_answer(llm: LLM) -> None:
    ids = tokenizer().encode(PROMPTS[0])
    expected = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    forms = [ids, tuple(ids), np.array(ids), {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    for form in forms:
        (alone,) = llm.generate(form, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
        assert alone.outputs[0].token_ids == expected
    assert llm.generate([], GREEDY) == llm.chat([], GREEDY) == []
    listed = llm.generate(forms, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    assert [each.outputs[0].token_ids for each in listed] == [expected] * len(forms)


def test_chat_applies_the_template(llm: LLM) -> None:
    shown = tokenizer().render_chat(QUESTION, add_generation_prompt=True)
    prompt_ids = tokenizer().encode(shown, add_special_tokens=False)
    (alone,) = llm.chat(QUESTION, GREEDY, use_tqdm=False)
    assert alone.prompt_token_ids == prompt_ids
    assert alone.outputs[0].token_ids == reference_ids(
        prompt_ids, temperature=0, max_tokens=24, ignore_eos=True
    )
    both = llm.chat([QUESTION, [{"role": "user", "content": "Why?"}]], GREEDY, use_tqdm=False)
    assert both[0].outputs == alone.outputs
    assert both[1].prompt_token_ids != prompt_ids


def test_more_prompts_than_fit_keep_their_order(llm: LLM) -> None:
    prompts = [tokenizer().encode(f"Number {i}") for i in range(6 * SLOTS)]
    params = [SamplingParams(max_tokens=1 + i % 9, ignore_eos=True, seed=i) for i in range(24)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for i, output in enumerate(outputs):
        assert output.prompt_token_ids == prompts[i]
        assert output.outputs[0].token_ids == reference_ids(
            prompts[i], max_tokens=1 + i % 9, ignore_eos=True, seed=i
        )


def test_several_answers_to_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True, logprobs=2)
    first, again = (llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(2))
    assert [each.outputs for each in first] == [each.outputs for each in again]
    for output in first:
        assert [each.index for each in output.outputs] == [0, 1, 2]
        assert len({tuple(each.token_ids) for each in output.outputs}) == 3
        for answer in output.outputs:
            assert answer.logprobs is not None and len(answer.logprobs) == 10
            chosen = [row[token] for row, token in zip(answer.logprobs, answer.token_ids)]
            assert answer.cumulative_logprob == pytest.approx(sum(c.logprob for c in chosen))
            assert all(2 <= len(row) <= 3 for row in answer.logprobs)


def test_text_stops_and_takes_shape(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = whole[9:13]
    cut = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, stop=stop), use_tqdm=False)
    answer = cut[0].outputs[0]
    assert answer.text == whole[: whole.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    shaped = SamplingParams(max_tokens=20, structured_outputs={"choice": ["wind", "water"]})
    assert llm.chat(QUESTION, shaped, use_tqdm=False)[0].outputs[0].text in ("wind", "water")
    scored = llm.generate(
        PROMPTS[1], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
    )
    assert scored[0].prompt_logprobs is not None
    assert scored[0].prompt_logprobs[0] is None
    assert len(scored[0].prompt_logprobs) == len(scored[0].prompt_token_ids)


def test_max_tokens_is_16_and_none_goes_to_the_end(llm: LLM) -> None:
    prompt_ids = tokenizer().encode("word " * 1900)
    endless = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
    usual = SamplingParams(ignore_eos=True, temperature=0)
    long, short = llm.generate([prompt_ids] * 2, [endless, usual], use_tqdm=False)
    assert len(long.outputs[0].token_ids) == llm.max_model_len - len(prompt_ids)
    assert len(short.outputs[0].token_ids) == 16


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", ""], None, r"^prompts\[1\]: the prompt is empty"),
        (["a", 7], None, r"^prompts\[1\]: a prompt must be a text, token ids, or a "),
        (["a", {"text": "b"}], None, r"^prompts\[1\]: .* got a mapping with 'text'"),
        ([[1, 2], [3, 99999]], None, r"^prompts\[1\]: token ids must lie in \[0, 8192\)"),
        ([[1, 2], [3, 4.5]], None, r"^prompts\[1\]: token ids must be integers"),
        (["a", "b " * 3000], None, r"^prompts\[1\]: the prompt has \d+ tokens; this model takes"),
        ("", None, r"^the prompt is empty"),
        (3, None, r"^prompts must be a text, .* got int"),
        ("a", SamplingParams(top_p=3), r"^sampling_params: top_p must lie in \(0, 1\]"),
        ("a", SamplingParams(n=9), r"^n must lie in \[1, 8\]"),
        (["a"] * 2, [SamplingParams()], r"^sampling_params has 1 entries for 2 prompts"),
        (
            ["a"],
            [SamplingParams(max_tokens=TEXT)],
            r"^sampling_params\[0\]: max_tokens: ",
        ),
        ("a", {"max_tokens": 3}, r"^sampling_params must be a penstock.SamplingParams"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_is_computed(
    llm: LLM, prompts: object, params: object, message: str
) -> None:
    before = llm._host._engine._thread.stats().num_prompt_tokens
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    assert llm._host._engine._thread.stats().num_prompt_tokens == before


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [QUESTION, [{"role": "usr", "content": "x"}]],
            r"^conversations\[1\]: messages\[0\]\.role",
        ),
        ([QUESTION, "Why?"], r"^conversations\[1\]: a conversation must be a list of messages"),
        ([{"content": "x"}], r"^messages\[0\]\.role: this parameter is required"),
        ("Why?", r"^messages must be a list of messages, .* got str"),
    ],
)
def test_a_bad_conversation_is_named(llm: LLM, messages: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, use_tqdm=False)  # type: ignore[arg-type]


def test_what_fails_while_it_runs_costs_no_other_answer(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs={"regex": "("})
    with pytest.raises(GenerationError, match=r"not answered: prompts\[1\]: structured") as caught:
        llm.generate(PROMPTS, [GREEDY, bad, GREEDY], use_tqdm=False)
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    first, second, third = caught.value.outputs
    assert first is not None and third is not None and second is None
    assert [first.outputs, third.outputs] == [expected[0].outputs, expected[2].outputs]


def test_threads_share_it(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    found: list[object] = []

    def ask() -> None:
        found.append([each.outputs for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[each.outputs for each in expected]] * 3


def test_the_progress_bar_counts_prompts(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert "3/3" in capfd.readouterr().err
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capfd.readouterr().err == ""


def test_closing_ends_what_runs_and_all_threads() -> None:
    before = set(threading.enumerate())
    llm = LLM("builtin", num_blocks=512, threads=1)
    failures: list[Exception] = []

    def ask() -> None:
        try:
            llm.generate("Once", SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
        except Exception as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not llm._host._engine._thread.stats().num_generated_tokens:
        time.sleep(0.01)
    llm.close()
    asking.join(60)
    assert [str(each) for each in failures] == ["this LLM was closed before it had answered"]
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("Once")
    llm.close()  # again is harmless
    left = {each.name for each in set(threading.enumerate()) - before if each.is_alive()}
    assert not {name for name in left if name.startswith("penstock")}


def test_an_engine_that_has_failed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("builtin", num_blocks=64, threads=1) as llm:
        monkeypatch.setattr(llm._host._engine._thread._engine, "step", lambda: 1 / 0)
        with pytest.raises(RuntimeError, match=r"the engine has failed.*; make a new LLM"):
            llm.generate(PROMPTS, use_tqdm=False)


@pytest.mark.parametrize(
    ("model", "settings", "error", "message"),
    [
        ("builtin", {"http_port": 80}, ConfigError, "http_port is a setting of a server"),
        ("builtin", {"max_num_seq": 2}, ConfigError, "did you mean 'max_num_seqs'"),
        ("builtin", {"uvicorn_log_level": "info"}, ConfigError, "log_level is a setting of a serv"),
        ("builtin", {"gpu_memory_utilization": 0.9}, ConfigError, "say with --kv-cache-gb X"),
        ("builtin", {"kv_cache_dtype": "int8", "kv": "int8"}, ConfigError, "says what kv is, too"),
        ("builtin", {"max_num_seqs": 0}, ConfigError, "max_num_seqs must be at least 1"),
        ("builtin", {"device": "cuda"}, ConfigError, "PyTorch sees no GPU here"),
        ("./nowhere", {}, LoadError, "nowhere"),
    ],
)
def test_a_bad_setting_is_named(
    model: str, settings: dict[str, Any], error: type[Exception], message: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = threading.active_count()
    with pytest.raises(error, match=message):
        LLM(model, **settings)
    assert threading.active_count() == before


def test_settings_may_have_the_names_of_vllm() -> None:
    names = {"kv_cache_dtype": "int8", "enforce_eager": True, "enable_prefix_caching": False}
    with LLM("builtin", num_blocks=64, threads=1, **names) as llm:
        engine = llm._config.engine
        assert (engine.kv, engine.cuda_graphs, engine.prefix_cache) == ("int8", "off", False)


def test_it_has_every_parameter_of_the_engine_and_the_bodies_have_its() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert PARAMETERS.keys() - names == {"bad_words_ids", "structured"}  # by more readable names
    assert names <= CompletionRequest.model_fields.keys()


def test_a_script_that_forgets_to_close_ends() -> None:
    script = (
        "from penstock.deployments.offline.llm import LLM\n"
        "llm = LLM('builtin', num_blocks=64, threads=1)\n"
        "print(len(llm.generate('The river')[0].outputs[0].text) > 3)\n"
        "import sys; assert not {'ray', 'vllm'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_embeddings_are_those_of_transformers_in_any_number(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModel.from_pretrained(resolve_model("builtin"), dtype=torch.float32)
    monkeypatch.setattr("penstock.deployments.offline.llm.MAX_INPUTS", 2)  # of one call
    prompts: list[Any] = [*PROMPTS, tokenizer().encode(PROMPTS[0]), {"prompt": PROMPTS[1]}]
    found = llm.embed(prompts, use_tqdm=False)
    for output, text in zip(found, [*PROMPTS, PROMPTS[0], PROMPTS[1]], strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([tokenizer().encode(text)])).last_hidden_state[0]
        want = torch.nn.functional.normalize(states[-1], dim=0).numpy()
        np.testing.assert_allclose(output.outputs.embedding, want, rtol=1e-3, atol=2e-5)
    assert [each.prompt for each in found] == [*PROMPTS, None, PROMPTS[1]]
    (short,) = llm.embed(PROMPTS[0], use_tqdm=False, dimensions=3)
    assert len(short.outputs.embedding) == 3
    with pytest.raises(RequestError, match=r"prompts\[1\]: the text is empty"):
        llm.embed(["a", ""], use_tqdm=False)
