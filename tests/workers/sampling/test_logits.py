"""Penalties, bias and logprobs against transformers' own processors and logits."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Delta, Request, RequestError, SamplingParams
from penstock.workers.sampling.logits import LogitsEditor, LogprobRows
from tests.workers.checkpoints import make_checkpoint, random_prompt, reference_logits

VOCAB = 97
VOCAB_OF_MANY = 120_000
PROMPT, ANSWER = [3, 5, 5, 8, 60], [5, 11, 11, 11, 7]


def edited(params, logits):
    editor = LogitsEditor(params, PROMPT)
    for token_id in ANSWER:
        editor.observe(token_id)
    row = logits.clone()
    editor.edit(row, PROMPT + ANSWER)
    return row


def by_transformers(processor, logits):
    return processor(torch.tensor([PROMPT + ANSWER]), logits[None].clone())[0]


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return torch.randn(VOCAB) * 3


@pytest.mark.parametrize("penalty", [0.5, 1.3, 7.0])
def test_repetition_penalty(logits, penalty):
    want = by_transformers(RepetitionPenaltyLogitsProcessor(penalty), logits)
    assert torch.equal(edited(SamplingParams(repetition_penalty=penalty), logits), want)


@pytest.mark.parametrize("seed", range(6))
def test_penalties_of_a_growing_answer_are_those_of_a_plain_loop(seed):
    """With more tokens than there are places at first, each of them several times, and an answer
    that began elsewhere."""
    rng = random.Random(seed)
    vocab = 700
    prompt = rng.choices(range(vocab), k=rng.choice([1, 40, 600]))
    answer = rng.choices(range(vocab), k=rng.choice([0, 3, 500]))
    params = SamplingParams(
        repetition_penalty=rng.choice([0.7, 1.3]),
        presence_penalty=rng.choice([0.0, -1.25, 0.4]),
        frequency_penalty=rng.choice([0.3, -0.1]),
        logit_bias=((3, 2.5), (500, -7.0)),
    )
    editor = LogitsEditor(params, prompt, answer)
    torch.manual_seed(seed)
    for _ in range(150):
        row = torch.randn(vocab) * 4
        row[rng.randrange(vocab)] = -math.inf
        biased = row.clone()
        for token_id, bias in params.logit_bias:
            biased[token_id] += bias
        processor = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        want = processor(torch.tensor([prompt + answer]), biased[None])[0]
        for token_id, count in Counter(answer).items():
            want[token_id] -= params.presence_penalty + params.frequency_penalty * torch.tensor(
                count, dtype=torch.float32
            )
        editor.edit(row, prompt + answer)
        assert torch.equal(row, want)
        answer.append(rng.randrange(vocab))
        editor.observe(answer[-1])


def test_a_further_token_changes_no_more_than_its_place(monkeypatch):
    """However many there were: else each token of a long answer costs the engine's thread more."""
    editor = LogitsEditor(SamplingParams(frequency_penalty=0.5), (), range(100_000))
    made: list[int] = []
    tensor = torch.tensor

    def counted(values, **options):
        made.append(len(values))
        return tensor(values, **options)

    monkeypatch.setattr(torch, "tensor", counted)
    for token_id in range(50, 60):
        editor.observe(token_id)
        row = torch.zeros(VOCAB_OF_MANY)
        editor.edit(row, ())
        assert row[token_id] == -1.0 and row[token_id + 1] == -0.5
    assert made == []


def test_bad_words(logits):
    """One token; a sequence that is about to be completed, and one that is not."""
    words = [[9], [11, 7, 30], [11, 11, 31], [60, 5, 11, 11, 11, 7, 32]]
    want = by_transformers(NoBadWordsLogitsProcessor(words, eos_token_id=None), logits)
    got = edited(SamplingParams(bad_words_ids=tuple(map(tuple, words))), logits)
    assert torch.equal(got, want)
    assert [i for i in range(VOCAB) if got[i] == -math.inf] == [9, 30, 32]


def test_logit_bias(logits):
    bias = {7: 5.5, 0: -100.0, 96: 3.25}
    processor = SequenceBiasLogitsProcessor([[[i], b] for i, b in bias.items()])
    got = edited(SamplingParams(logit_bias=tuple(bias.items())), logits)
    assert torch.equal(got, by_transformers(processor, logits))


def test_presence_and_frequency_count_the_answer_only(logits):
    want = logits.clone()
    for token_id, count in {5: 1, 11: 3, 7: 1}.items():
        want[token_id] -= 0.75 + 0.5 * count
    params = SamplingParams(presence_penalty=0.75, frequency_penalty=0.5)
    torch.testing.assert_close(edited(params, logits), want, rtol=0, atol=1e-6)


def test_allowed_ids(logits):
    got = edited(SamplingParams(allowed_token_ids=(4, 90)), logits)
    assert torch.isfinite(got).nonzero().flatten().tolist() == [4, 90]
    assert torch.equal(got[[4, 90]], logits[[4, 90]])


def test_logprobs_and_ranks(logits):
    [found] = LogprobRows.of(logits[None], torch.tensor([13]), 5).listed()
    want = logits.log_softmax(0)
    order = want.argsort(descending=True)
    assert found.logprob == pytest.approx(float(want[13]), abs=1e-6)
    assert found.rank == order.tolist().index(13) + 1
    assert [i for i, _ in found.top] == order[:5].tolist()


@pytest.mark.parametrize("size", [3, 19, 199, 5000])
def test_equal_logprobs_go_by_id_however_many_are_asked_for(size):
    """Of five kinds of logits, so that most are equal; each kind has up to 20 tokens or many."""
    logits = torch.randint(5, (7, size), generator=torch.Generator().manual_seed(size)).float()
    logits[:, :18] += 10
    likeliest = logits.sort(dim=-1, descending=True, stable=True).indices
    for num_top in (0, 1, 2, 5, min(18, size)):
        found = LogprobRows.of(logits, torch.zeros(7, dtype=torch.int64), num_top)
        assert found.top_ids.tolist() == likeliest[:, :num_top].tolist()
        assert torch.equal(found.top, logits.log_softmax(-1).gather(1, found.top_ids))
    all_ids = LogprobRows.of(logits, torch.zeros(7, dtype=torch.int64), 20).top_ids
    assert torch.equal(all_ids[:, :18], likeliest[:, :18])
    alone = [LogprobRows.of(row[None], torch.zeros(1, dtype=torch.int64), 20) for row in logits]
    assert torch.equal(torch.cat([each.top_ids for each in alone]), all_ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0),) * 1025}, "logit_bias"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"bad_words_ids": ((),)}, "bad_words"),
        ({"bad_words_ids": ((1,) * 65,)}, "bad_words"),
        ({"bad_words_ids": ((VOCAB,),)}, "bad_words"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_out_of_range_is_named(fields, param):
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**fields).check(VOCAB)
    assert refusal.value.param == param


@pytest.fixture(scope="module")
def model():
    return load_model(str(make_checkpoint("llama")), weights="fp32", progress=False)


def run(model, requests, **settings):
    engine = Engine(EngineConfig(**{"num_blocks": 256, **settings}), model)
    for request in requests:
        engine.add(request)
    deltas: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
    while engine.has_work():
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    return deltas, engine


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8},
    ],
    ids=["whole", "chunks of 7", "starved"],
)
def test_engine_reports_transformers_logprobs(model, settings):
    """Of answer and prompt, from the raw logits, whatever the parameters and the schedule."""
    prompts = [tuple(random_prompt(n, n)) for n in (1, 2, 23, 40, 31)]
    params = SamplingParams(
        temperature=0.8, top_k=9, seed=3, max_tokens=14, ignore_eos=True,
        repetition_penalty=1.2, logprobs=3, prompt_logprobs=2,
    )  # fmt: skip
    requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    requests.append(Request("plain", prompts[3], SamplingParams(max_tokens=5, ignore_eos=True)))
    deltas, engine = run(model, requests, **settings)
    if "block_size" in settings:
        assert engine.stats().num_preemptions
    for i, prompt in enumerate(prompts):
        answer = [token_id for delta in deltas[f"r{i}"] for token_id in delta.token_ids]
        want = reference_logits(make_checkpoint("llama"), [*prompt, *answer]).log_softmax(-1)
        of_prompt = [each for delta in deltas[f"r{i}"] for each in delta.prompt_logprobs]
        of_answer = [each for delta in deltas[f"r{i}"] for each in delta.logprobs]
        tokens = [*prompt, *answer][1:]
        assert [each.token_id for each in of_prompt + of_answer] == tokens
        assert len(of_answer) == len(answer)
        for row, found in zip(want, of_prompt + of_answer):
            assert found.logprob == pytest.approx(float(row[found.token_id]), abs=2e-4)
        best = want.topk(3).values
        for row, found in zip(best[len(prompt) - 1 :], of_answer):
            assert [p for _, p in found.top] == pytest.approx(row.tolist(), abs=2e-4)
        assert all(len(found.top) == 2 for found in of_prompt)
    assert not any(delta.logprobs or delta.prompt_logprobs for delta in deltas["plain"])


def test_penalised_row_leaves_its_neighbours_alone(model):
    prompts = [tuple(random_prompt(n, n)) for n in (5, 6, 7)]
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    odd = SamplingParams(
        temperature=0.0, max_tokens=20, ignore_eos=True, frequency_penalty=2.0,
        logit_bias=((17, 90.0),), bad_words_ids=((17, 17),),
    )  # fmt: skip
    alone, _ = run(model, [Request("r0", prompts[0], plain), Request("r2", prompts[2], plain)])
    mixed, _ = run(
        model,
        [Request(f"r{i}", p, odd if i == 1 else plain) for i, p in enumerate(prompts)],
    )
    for name in ("r0", "r2"):
        assert [d.token_ids for d in mixed[name]] == [d.token_ids for d in alone[name]]
    answer = [token_id for delta in mixed["r1"] for token_id in delta.token_ids]
    assert answer[0] == 17
    assert (17, 17) not in itertools.pairwise(answer)


PENALISED = SamplingParams(
    temperature=0.7, seed=5, max_tokens=30, ignore_eos=True, repetition_penalty=1.4,
    frequency_penalty=0.6, presence_penalty=-0.3, logit_bias=((17, 2.0),),
)  # fmt: skip


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def test_penalties_survive_preemption_and_chunks(model):
    requests = [Request(f"r{n}", tuple(random_prompt(20 + n, n)), PENALISED) for n in range(6)]
    want, _ = run(model, requests)
    starved = {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 6}
    got, engine = run(model, requests, **starved)
    assert engine.stats().num_preemptions
    assert {name: ids_of(each) for name, each in got.items()} == {
        name: ids_of(each) for name, each in want.items()
    }


@pytest.mark.parametrize("num_known", [1, 13, 29])
def test_an_answer_that_is_continued_has_the_same_penalties(model, num_known):
    request = Request("r", tuple(random_prompt(9, 1)), PENALISED)
    whole = ids_of(run(model, [request])[0]["r"])
    rest = replace(request, emitted_ids=tuple(whole[:num_known]))
    assert ids_of(run(model, [rest])[0]["r"]) == whole[num_known:]
