"""The judge against transformers' own models: perplexity, KL, likeliest ids and greedy answers."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.kernels.quant import dequantize_weight, quantize_weight
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.evaluation.combination import Combination, ContextChoice
from penstock.workers.evaluation.eval_set import EvalSet
from penstock.workers.evaluation.judge import Judged, check_all, judge
from penstock.workers.evaluation.scoring import WindowScores
from penstock.workers.models.loader import load_model
from tests.workers import streaming_reference as slow
from tests.workers.checkpoints import make_checkpoint, random_prompt, reference_model

WINDOWS = tuple(tuple(random_prompt(70, seed)) for seed in range(3))
EVAL_SET = EvalSet(WINDOWS, tuple(each[:20] for each in WINDOWS), num_new=12)
BASELINE = Combination(weights="fp32")
NF4 = Combination(weights="nf4")
SINK = Combination(weights="fp32", context=ContextChoice.parse("4+24/8"))
CONFIG = EngineConfig(device="cpu", num_blocks=64, max_num_batched_tokens=32, max_num_seqs=16)


def judged_of(folder: Path, *others: Combination, config: EngineConfig = CONFIG) -> list[Judged]:
    return list(judge(config, folder, BASELINE, others, EVAL_SET))


@pytest.fixture(scope="module")
def folder() -> Path:
    return make_checkpoint("llama")


@pytest.fixture(scope="module")
def judged(folder: Path) -> dict[Combination, Judged]:
    kv = Combination(weights="fp32", kv="int8")
    return {each.combination: each for each in judged_of(folder, NF4, kv, SINK)}


def rounded(model):
    """The same model of transformers with the weights that nf4's codes stand for."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("proj.weight"):
                weight.copy_(dequantize_weight(quantize_weight(weight, "nf4")))
    return made


@torch.inference_mode()
def logprobs_of(model, ids) -> torch.Tensor:
    """fp64 [T - 1, vocab], of the tokens after the first."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1)


def sliding_logprobs(model, ids) -> torch.Tensor:
    """The same under StreamingLLM, one token at a time."""
    window = slow.SinkWindow(sinks=4, window=24, roll=8, block_size=CONFIG.block_size)
    reference = slow.StreamingReference(model, window)
    return torch.stack([reference.step(now).double().log_softmax(-1) for now in ids[:-1]])


def greedy_of(model, prompt, num_new) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_new):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def expected_of(base, other) -> dict[str, float]:
    """Figures of logprobs fp64 [T - 1, vocab] of each window, by the definitions."""
    after = [torch.tensor(each[1:])[:, None] for each in WINDOWS]
    nll = torch.stack([-each.gather(1, ids)[:, 0] for each, ids in zip(other, after)])
    base_nll = torch.stack([-each.gather(1, ids)[:, 0] for each, ids in zip(base, after)])
    kl = torch.stack([(b.exp() * (b - o)).sum(-1) for b, o in zip(base, other)])
    same = torch.stack([b.argmax(-1) == o.argmax(-1) for b, o in zip(base, other)])
    return {
        "perplexity": nll.mean().exp().item(),
        "change": (nll.mean() - base_nll.mean()).exp().item() - 1,
        "kl": kl.mean().item(),
        "kl_p99": float(np.quantile(kl.numpy(), 0.99)),
        "same_top1": same.double().mean().item(),
    }


def check(figures, expected) -> None:
    assert figures.perplexity.value == pytest.approx(expected["perplexity"], rel=2e-5)
    assert figures.change.value == pytest.approx(expected["change"], rel=1e-3, abs=2e-5)
    assert figures.kl.mean.value == pytest.approx(expected["kl"], rel=1e-3)
    assert figures.kl.p99 == pytest.approx(expected["kl_p99"], rel=1e-3)
    assert figures.same_top1.value == expected["same_top1"]


def test_weights_against_transformers(folder, judged):
    model = reference_model(folder)
    other = rounded(model)
    base = [logprobs_of(model, each) for each in WINDOWS]
    found = [logprobs_of(other, each) for each in WINDOWS]
    check(judged[NF4].figures, expected_of(base, found))
    assert judged[NF4].figures.kl.mean.value > 0.1  # the formats differ enough to be told apart
    assert 0 < judged[NF4].figures.same_top1.value < 1
    perplexity = judged[BASELINE].figures.perplexity.value
    assert perplexity == pytest.approx(expected_of(base, base)["perplexity"], rel=2e-5)


def test_greedy_ids_against_transformers(folder, judged):
    model = reference_model(folder)
    both = model, rounded(model)
    answers = [[greedy_of(each, p, EVAL_SET.num_new) for p in EVAL_SET.prompts] for each in both]
    assert judged[BASELINE].scores.answers == answers[0]
    assert judged[NF4].scores.answers == answers[1]
    pairs = [list(zip(*each)) for each in zip(*answers)]
    equal = [sum(a == b for a, b in pair) / len(pair) for pair in pairs]
    leading = [next((i for i, (a, b) in enumerate(p) if a != b), len(p)) for p in pairs]
    greedy = judged[NF4].figures.greedy
    assert greedy.equal_ids.value == pytest.approx(sum(equal) / len(equal))
    assert greedy.identical == sum(each == 1 for each in equal) / len(equal)
    assert greedy.before_first_difference == pytest.approx(sum(leading) / len(leading))
    assert greedy.identical < 1


def test_a_sink_window_against_streaming_llm(folder, judged):
    model = reference_model(folder)
    base = [logprobs_of(model, each) for each in WINDOWS]
    found = [sliding_logprobs(model, each) for each in WINDOWS]
    check(judged[SINK].figures, expected_of(base, found))
    assert judged[SINK].figures.kl.mean.value > 0.01


def test_the_baseline_is_its_own_equal(folder, judged):
    """Its distribution, made again from hidden states, is the one that scored its tokens."""
    twin = replace(BASELINE, activations="fp32")  # another model in memory, with the same numbers
    found = judged_of(folder, twin)[1]
    assert found.figures.kl.max == 0.0 and found.figures.change.value == 0.0
    greedy = found.figures.greedy
    assert found.figures.same_top1.value == 1.0 and greedy is not None and greedy.identical == 1.0
    assert np.array_equal(found.scores.nll, judged[BASELINE].scores.nll)


def test_chunks_and_batches_change_no_score(folder, judged):
    config = replace(CONFIG, max_num_batched_tokens=512, num_blocks=9, max_num_seqs=3)
    for each in judged_of(folder, NF4, config=config):
        same = judged[each.combination].scores
        assert np.array_equal(each.scores.nll, same.nll)
        assert np.array_equal(each.scores.kl, same.kl)


def test_formats_and_bits_are_those_in_memory(judged):
    base, nf4 = judged[BASELINE], judged[NF4]
    kv = judged[Combination(weights="fp32", kv="int8")]
    assert base.size.bits_per_weight == 32 and base.kv == "float32"
    assert kv.kv.startswith("int8") and kv.kv_bytes_per_token < base.kv_bytes_per_token / 3
    assert 0 < kv.figures.kl.mean.value < nf4.figures.kl.mean.value
    assert 4.5 <= nf4.size.bits_per_weight < 6 and nf4.size.num_bytes < base.size.num_bytes


def test_bf16_activations_are_named(folder):
    bf16 = judged_of(folder, replace(NF4, activations="bf16"))[1]
    assert bf16.activations == "bfloat16" and bf16.figures.kl.mean.value > 0


def test_a_watcher_is_gone_after_its_run(folder):
    decoder = load_model(str(folder), weights="fp32", progress=False)
    engine = Engine(CONFIG, decoder)
    WindowScores(WINDOWS, decoder, None).score(engine, {})
    assert engine.executor.watch_prompts is None


def test_damaged_weights_are_an_error(folder):
    decoder = load_model(str(folder), weights="fp32", progress=False)
    decoder.final_norm.fill_(math.nan)
    with pytest.raises(RuntimeError, match=r"damaged|numerical_error"):
        WindowScores(WINDOWS, decoder, None).score(Engine(CONFIG, decoder), {})


@pytest.mark.parametrize(
    ("combination", "message"),
    [
        (Combination(kv="int8", kv_group="64"), "must divide the model's head dimension"),
        (Combination(context=ContextChoice.parse("4+600")), "exceed the 512 tokens"),
        (Combination(context=ContextChoice.parse("4+128")), "costs nothing there"),
    ],
)
def test_what_a_model_cannot_have_is_said_before_it_is_loaded(folder, combination, message):
    with pytest.raises(ConfigError, match=message):
        check_all(CONFIG, folder, [BASELINE, combination], window_tokens=70)


def test_windows_longer_than_the_model_are_refused(folder):
    with pytest.raises(ConfigError, match="give --window-tokens 511"):
        check_all(CONFIG, folder, [BASELINE], window_tokens=512)
    check_all(CONFIG, folder, [BASELINE], window_tokens=511)
