"""Sampling, logprobs and several answers, as clients of both front ends get them.

The oracles: the engine driven directly with the same SamplingParams, and transformers' log_softmax.
"""

from __future__ import annotations

import functools

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.deployments.client import Client, ClientError, FinishReason
from penstock.deployments.ingress.core.validation import nth_choice
from penstock.deployments.ingress.http.openai.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
)
from penstock.workers.request import Request, SamplingParams
from penstock.workers.weights.hub import resolve_model
from tests.deployments.serving import MODEL, new_engine, tokenizer

MESSAGES = [{"role": "user", "content": "What feeds the turbine?"}]
PROMPT = "It was a bright morning, and"
FOREIGN = "She wrote 水门 and 👩‍👩‍👧 upon the naïve wall"  # characters of several tokens
SEEDED = {"temperature": 1.0, "seed": 11}
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def client(serving):
    url = f"{serving.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as official:
        yield official


@pytest.fixture(scope="module")
def grpc_client(serving):
    with Client(serving.grpc_target) as opened:
        yield opened


def engine_alone(prompt_ids, **params):
    """(token ids, their logprobs, the prompt's) of one request with nothing before the engine."""
    engine = new_engine()
    engine.add(Request("alone", tuple(prompt_ids), SamplingParams(**params)))
    ids, logprobs, prompt_logprobs = [], [], []
    while engine.has_work():
        for delta in engine.step():
            ids += delta.token_ids
            logprobs += delta.logprobs
            prompt_logprobs += delta.prompt_logprobs
    return ids, logprobs, prompt_logprobs


@functools.cache
def transformers_model():
    return AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32).eval()


def logprobs_by_transformers(token_ids):
    """[tokens - 1, vocab]: row i is of token i + 1."""
    with torch.inference_mode():
        logits = transformers_model()(torch.tensor([token_ids])).logits[0]
    return logits[:-1].float().log_softmax(-1)


def chat_ids():
    return tokenizer().encode(tokenizer().render_chat(MESSAGES), add_special_tokens=False)


def complete(client, prompt=PROMPT, *, stream=False, **options):
    known = {"max_tokens", "logprobs", "echo", "n", "stop", "seed", "temperature"}
    extra = {name: value for name, value in options.items() if name not in known}
    given = {name: value for name, value in options.items() if name in known}
    return client.completions.create(
        model=MODEL, prompt=prompt, stream=stream, extra_body=extra, **given
    )


# Logprobs


def test_chat_logprobs_are_the_models_own(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True, "return_token_ids": True, "top_k": 5},
        **SEEDED,
    )
    (choice,) = answer.choices
    content = choice.logprobs.content
    assert answer.prompt_token_ids == chat_ids()
    ids = choice.token_ids
    rows = logprobs_by_transformers(chat_ids() + ids)[len(chat_ids()) - 1 :]
    assert len(content) == len(ids) == 12
    for entry, token_id, row in zip(content, ids, rows):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        best = row.topk(3)
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(
            best.values.tolist(), abs=TOLERANCE
        )
        assert [bytes(each.bytes) for each in entry.top_logprobs] == [
            tokenizer().token_bytes(i) for i in best.indices.tolist()
        ]
    assert b"".join(bytes(each.bytes) for each in content).decode() == choice.message.content
    assert "".join(each.token for each in content) == choice.message.content
    ChatCompletion.model_validate(answer.model_dump(exclude_unset=True))


def test_completion_logprobs_are_the_engines(client):
    prompt_ids = tokenizer().encode(PROMPT)
    _, expected, _ = engine_alone(prompt_ids, max_tokens=16, ignore_eos=True, logprobs=2, **SEEDED)
    answer = complete(client, max_tokens=16, logprobs=2, ignore_eos=True, **SEEDED)
    (choice,) = answer.choices
    received = choice.logprobs
    assert received.token_logprobs == pytest.approx([e.logprob for e in expected], abs=TOLERANCE)
    assert "".join(received.tokens) == choice.text
    ends = [*received.text_offset[1:], len(choice.text)]
    spans = [choice.text[start:end] for start, end in zip(received.text_offset, ends)]
    assert spans == received.tokens
    for token, logprob, top, entry in zip(
        received.tokens, received.token_logprobs, received.top_logprobs, expected
    ):
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
        assert max(top.values()) == pytest.approx(entry.top[0][1], abs=TOLERANCE)
    Completion.model_validate(answer.model_dump(exclude_unset=True))


def test_the_end_of_a_sequence_has_an_entry(client):
    """One entry for each token that is counted, as programs that score texts rely on."""
    ids, _, _ = engine_alone(tokenizer().encode(PROMPT), max_tokens=24, **SEEDED)
    stop_id = next(i for n, i in enumerate(ids) if n > 3 and i not in ids[:n])
    answer = complete(client, max_tokens=24, logprobs=0, stop_token_ids=[stop_id], **SEEDED)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.tokens) == answer.usage.completion_tokens == ids.index(stop_id) + 1
    assert "".join(choice.logprobs.tokens[:-1]) == choice.text
    assert choice.logprobs.text_offset[-1] == len(choice.text)
    shown = complete(
        client,
        max_tokens=24,
        stop_token_ids=[stop_id],
        include_stop_str_in_output=True,
        **SEEDED,
    )
    stop_text = tokenizer().decode([stop_id])
    assert shown.choices[0].text == choice.text + stop_text


@pytest.mark.parametrize("prompt", [PROMPT, FOREIGN])
@pytest.mark.parametrize("num_new", [0, 1])
def test_scoring_of_a_prompt(client, prompt, num_new):
    prompt_ids = tokenizer().encode(prompt)
    rows = logprobs_by_transformers(prompt_ids)
    for wanted_prompt in (prompt, prompt_ids):
        answer = complete(
            client,
            wanted_prompt,
            max_tokens=num_new,
            echo=True,
            logprobs=1,
            temperature=0,
            ignore_eos=True,
        )
        (choice,) = answer.choices
        received = choice.logprobs
        assert len(received.tokens) == len(prompt_ids) + num_new
        assert choice.text.startswith(prompt)
        assert (received.token_logprobs[0], received.top_logprobs[0]) == (None, None)
        own = [float(row[i]) for row, i in zip(rows, prompt_ids[1:])]
        assert received.token_logprobs[1 : len(prompt_ids)] == pytest.approx(own, abs=TOLERANCE)
        best = [max(top.values()) for top in received.top_logprobs[1 : len(prompt_ids)]]
        assert best == pytest.approx(rows.max(-1).values.tolist(), abs=TOLERANCE)
        assert answer.usage.completion_tokens == num_new
        assert choice.finish_reason == "length"
        if num_new == 0:
            assert choice.text == prompt


def test_scoring_of_many_prompts_as_evaluation_programs_do(client):
    """lm-eval's local-completions: lists of ids, one token more, sums over the continuation."""
    texts = ["The river ran", "The river ran to the sea, and", "A lamp"]
    prompts = [tokenizer().encode(text) for text in texts]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=1, echo=True, logprobs=1, temperature=0, seed=1234
    )
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    for ids, choice in zip(prompts, choices, strict=True):
        rows = logprobs_by_transformers(ids)
        received = choice.logprobs.token_logprobs[1:-1]
        own = [float(row[i]) for row, i in zip(rows, ids[1:])]
        assert received == pytest.approx(own, abs=TOLERANCE)
        greedy = [int(row.argmax()) == i for row, i in zip(rows, ids[1:])]
        tops = choice.logprobs.top_logprobs[1:-1]
        assert [mine == max(top.values()) for mine, top in zip(received, tops)] == greedy


def test_prompt_logprobs(client):
    prompt_ids = tokenizer().encode(FOREIGN)
    _, _, expected = engine_alone(prompt_ids, max_tokens=1, prompt_logprobs=2)
    body = complete(client, FOREIGN, max_tokens=1, prompt_logprobs=2).choices[0].prompt_logprobs
    assert body[0] is None
    for received, entry in zip(body[1:], expected, strict=True):
        own = received[str(entry.token_id)]
        assert own["logprob"] == pytest.approx(entry.logprob, abs=TOLERANCE)
        assert own["rank"] == entry.rank
        assert set(received) == {str(entry.token_id), *(str(i) for i, _ in entry.top)}
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, n=2, extra_body={"prompt_logprobs": 0}
    )
    ChatCompletion.model_validate(chat.model_dump(exclude_unset=True))
    assert [list(each) for each in chat.prompt_logprobs[1:]] == [[str(i)] for i in chat_ids()[1:]]


# Parameters


PARAMETERS = {
    "repetition_penalty": 1.7,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.25,
    "negative presence": {"presence_penalty": -2.0, "frequency_penalty": -0.5},
    "logit_bias": {"logit_bias": {"300": 100.0, "301": 99.0}},
    "allowed_token_ids": list(range(300, 340)),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_do_what_the_engine_does(client, grpc_client, name):
    value = PARAMETERS[name]
    fields = value if isinstance(value, dict) else {name: value}
    params = dict(fields)
    if "logit_bias" in params:
        params["logit_bias"] = tuple((int(i), bias) for i, bias in params["logit_bias"].items())
    if "allowed_token_ids" in params:
        params["allowed_token_ids"] = tuple(params["allowed_token_ids"])
    prompt_ids = tokenizer().encode(PROMPT)
    base = {"max_tokens": 20, "ignore_eos": True, **SEEDED}
    expected, _, _ = engine_alone(prompt_ids, **base, **params)
    assert expected != engine_alone(prompt_ids, **base)[0]
    answer = complete(client, return_token_ids=True, **base, **fields)
    assert answer.choices[0].token_ids == expected
    if "logit_bias" in fields:
        fields = {"logit_bias": dict(params["logit_bias"])}
    assert list(grpc_client.complete(PROMPT, **base, **fields).token_ids) == expected


def test_bad_words_do_not_come(client, grpc_client):
    base = {"max_tokens": 40, "ignore_eos": True, **SEEDED}
    free = complete(client, **base).choices[0].text
    words = sorted({word for word in free.split() if word.isalpha()}, key=len)[-4:]
    kept = complete(client, bad_words=words, return_token_ids=True, **base).choices[0]
    assert words and kept.text != free
    encode = functools.partial(tokenizer().encode, add_special_tokens=False)
    for word in words:
        for spelling in (encode(word), encode(" " + word)):
            starts = range(len(kept.token_ids))
            assert not any(kept.token_ids[i : i + len(spelling)] == spelling for i in starts)
    assert grpc_client.complete(PROMPT, bad_words=words, **base).text == kept.text


def test_a_stop_string_may_be_shown(client, grpc_client):
    base = {"max_tokens": 40, "ignore_eos": True, **SEEDED}
    whole = complete(client, **base).choices[0].text
    stop = whole[9:15]
    end = whole.index(stop) + len(stop)
    shown = complete(client, stop=stop, include_stop_str_in_output=True, **base).choices[0]
    assert (shown.text, shown.stop_reason) == (whole[:end], stop)
    over_grpc = grpc_client.complete(PROMPT, stop=stop, include_stop_str_in_output=True, **base)
    assert over_grpc.text == shown.text


def test_a_prompt_may_be_truncated(client, grpc_client):
    base = {"max_tokens": 8, "ignore_eos": True, **SEEDED}
    ids = tokenizer().encode(FOREIGN)
    expected, _, _ = engine_alone(ids[-4:], **base)
    answer = complete(client, FOREIGN, truncate_prompt_tokens=4, return_token_ids=True, **base)
    (choice,) = answer.choices
    assert (choice.prompt_token_ids, choice.token_ids) == (ids[-4:], expected)
    assert answer.usage.prompt_tokens == 4
    over_grpc = grpc_client.complete(FOREIGN, truncate_prompt_tokens=4, **base)
    assert list(over_grpc.token_ids) == expected
    longer = complete(client, FOREIGN, truncate_prompt_tokens=10**6, max_tokens=1)
    assert longer.usage.prompt_tokens == len(ids)
    too_long = "the river " * 600
    assert complete(client, too_long, truncate_prompt_tokens=9, max_tokens=1).choices
    fitting = complete(client, too_long, truncate_prompt_tokens=-1, max_tokens=8)
    (served,) = client.models.list().data
    assert fitting.usage.prompt_tokens == served.model_extra["max_model_len"] - 8
    whole = complete(client, FOREIGN, truncate_prompt_tokens=-1, max_tokens=1)
    assert whole.usage.prompt_tokens == len(ids)


# Several answers


def test_choices_differ_and_come_again(client, grpc_client):
    base = {"max_tokens": 12, "ignore_eos": True, **SEEDED}
    prompt_ids = tokenizer().encode(PROMPT)
    params = SamplingParams(**base)
    seeds = [params.seed, *(nth_choice(params, i).seed for i in (1, 2))]
    expected = [engine_alone(prompt_ids, **{**base, "seed": seed})[0] for seed in seeds]
    for _ in range(2):
        answer = complete(client, n=3, return_token_ids=True, **base)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.token_ids for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == len(prompt_ids)
        assert answer.usage.completion_tokens == 36
    assert len({tuple(ids) for ids in expected}) == 3
    over_grpc = grpc_client.complete(PROMPT, n=3, **base)
    answers = [over_grpc, *over_grpc.others]
    assert [list(each.token_ids) for each in answers] == expected
    assert {each.finish_reason for each in answers} == {FinishReason.LENGTH}
    assert (over_grpc.usage.prompt_tokens, over_grpc.usage.completion_tokens) == (
        len(prompt_ids),
        36,
    )


def test_choices_of_several_prompts(client):
    base = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
    prompts = ["The river", "A lamp in"]
    answer = client.completions.create(
        model=MODEL,
        prompt=prompts,
        n=2,
        max_tokens=6,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    alone = [complete(client, prompt, **base).choices[0].text for prompt in prompts]
    assert [choice.text for choice in answer.choices] == [alone[0]] * 2 + [alone[1]] * 2
    lengths = [len(tokenizer().encode(prompt)) for prompt in prompts]
    assert answer.usage.prompt_tokens == sum(lengths)


def test_choices_share_the_prompt(serving, client):
    long_prompt = "Once upon a time there was a mill by the water. " * 8
    num_tokens = len(tokenizer().encode(long_prompt))
    before = serving.backend.engine.stats()
    complete(client, long_prompt, n=4, max_tokens=2, ignore_eos=True, temperature=0)
    after = serving.backend.engine.stats()
    computed = after.num_prompt_tokens - before.num_prompt_tokens
    assert num_tokens <= computed < 2 * num_tokens  # of 4 * num_tokens
    assert after.num_prefix_hit_tokens > before.num_prefix_hit_tokens


def test_a_call_is_cancelled_with_all_its_choices(serving, grpc_client):
    pieces = grpc_client.generate(PROMPT, n=3, max_tokens=400, ignore_eos=True)
    first = next(pieces)
    assert grpc_client.cancel(first.request_id)
    reasons = {piece.choice: piece.finish_reason for piece in pieces if piece.finish_reason}
    assert reasons == dict.fromkeys(range(3), FinishReason.ABORT)


# Streams


STREAMED = {
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True, "logprobs": 2},
    "only the prompt": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "n": {"n": 3, "logprobs": 1},
    "n and echo": {"n": 2, "echo": True, "logprobs": 0, "prompt_logprobs": 2},
    "ids": {"return_token_ids": True},
    "the prompt": {"prompt_logprobs": 1, "return_token_ids": True, "n": 2},
    "a stop string": {"stop": ["e", "zq"], "min_tokens": 6, "logprobs": 1},
    "a shown stop string": {"stop": ["the"], "include_stop_str_in_output": True, "logprobs": 1},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logprobs": 0},
    "bytes": {"allowed_token_ids": list(range(200, 262)), "logprobs": 1, "echo": True},
}


@pytest.mark.parametrize("name", STREAMED)
def test_a_completion_streams_what_it_says_at_once(client, name):
    fields = {"max_tokens": 24, "ignore_eos": True, **SEEDED, **STREAMED[name]}
    whole = complete(client, FOREIGN, **fields)
    joined = [{"text": ""} for _ in whole.choices]
    for chunk in complete(client, FOREIGN, stream=True, **fields):
        Completion.model_validate(chunk.model_dump(exclude_unset=True))
        (choice,) = chunk.choices
        so_far = joined[choice.index]
        so_far["text"] += choice.text
        for part, value in choice.model_dump(exclude_unset=True).items():
            if part == "logprobs" and value is not None:
                lists = so_far.setdefault("logprobs", {key: [] for key in value})
                for key in value:
                    lists[key] += value[key]
            elif part in ("token_ids", "prompt_token_ids", "prompt_logprobs"):
                so_far[part] = so_far.get(part, []) + value
            elif part in ("finish_reason", "stop_reason"):
                so_far[part] = value
    for so_far, choice in zip(joined, whole.choices, strict=True):
        expected = choice.model_dump(exclude_unset=True)
        for part in so_far.keys() | (expected.keys() - {"index", "logprobs"}):
            assert so_far[part] == approximately(expected[part]), part
        assert ("logprobs" in so_far) == (choice.logprobs is not None)


def approximately(value):
    """Equal but for the last bits of logprobs: what runs beside changes the order of sums."""
    if isinstance(value, dict):
        return {key: approximately(each) for key, each in value.items()}
    if isinstance(value, list):
        return [approximately(each) for each in value]
    return pytest.approx(value, abs=TOLERANCE) if isinstance(value, float) else value


@pytest.mark.parametrize("stop", [None, ["the", "zqzq"]])
def test_chat_streams_logprobs_with_their_text(client, stop):
    fields = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 1,
        "n": 2,
        "stop": stop,
        "extra_body": {
            "ignore_eos": True,
            "skip_special_tokens": False,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        },
        **SEEDED,
    }
    whole = client.chat.completions.create(**fields)
    texts, entries, prompts = [b"", b""], [[], []], []
    for chunk in client.chat.completions.create(stream=True, **fields):
        ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True))
        (choice,) = chunk.choices
        texts[choice.index] += (choice.delta.content or "").encode()
        entries[choice.index] += choice.logprobs.content if choice.logprobs else []
        if choice.finish_reason is None:  # no token is reported before its text
            received = b"".join(bytes(each.bytes) for each in entries[choice.index])
            if stop is None:
                assert texts[choice.index].startswith(received)
        if getattr(chunk, "prompt_logprobs", None):
            prompts.append((chunk.prompt_token_ids, chunk.prompt_logprobs))
    for choice, text, received in zip(whole.choices, texts, entries, strict=True):
        assert text.decode() == choice.message.content
        expected = [each.model_dump() for each in choice.logprobs.content]
        assert [each.model_dump() for each in received] == approximately(expected)
    assert prompts == approximately([(whole.prompt_token_ids, whole.prompt_logprobs)])


def test_grpc_tells_the_same_logprobs(client, grpc_client):
    fields = {"max_tokens": 10, "ignore_eos": True, "echo": True, **SEEDED}
    whole = complete(client, FOREIGN, logprobs=2, prompt_logprobs=1, **fields)
    answer = grpc_client.complete(FOREIGN, logprobs=2, prompt_logprobs=1, **fields)
    (choice,) = whole.choices
    assert answer.text == choice.text
    spelt = b"".join(each.token for each in answer.logprobs).decode()
    assert spelt == "<|endoftext|>" + answer.text
    assert [each.logprob for each in answer.logprobs] == approximately(
        choice.logprobs.token_logprobs
    )
    ids = [*tokenizer().encode(FOREIGN), *answer.token_ids]
    assert [each.token_id for each in answer.logprobs] == ids
    assert [len(each.top) for each in answer.logprobs] == [0] + [2] * (len(ids) - 1)
    assert [len(each.top) for each in answer.prompt_logprobs] == [0] + [1] * (len(ids) - 11)
    for each in answer.logprobs[1:]:
        assert each.rank >= 1
        assert [top.token for top in each.top] == [
            tokenizer().token_bytes(top.token_id) for top in each.top
        ]
    scored = grpc_client.complete(FOREIGN, logprobs=0, max_tokens=0, echo=True)
    assert (scored.text, scored.token_ids) == (FOREIGN, ())
    assert [each.logprob for each in scored.logprobs] == approximately(
        choice.logprobs.token_logprobs[:-10]
    )
    reply = grpc_client.reply(MESSAGES, n=2, logprobs=1, max_tokens=4, **SEEDED)
    for each in (reply, *reply.others):
        assert len(each.logprobs) == len(each.token_ids)


# What is refused

VOCAB = 8192
REFUSED = {
    "n": [0, 9, -1, 10**12],
    "logit_bias": [
        {"a": 1},
        {"-1": 1},
        {"01": 1},
        {str(VOCAB): 1},
        {"1": 101},
        {str(i): 1 for i in range(1025)},
        {"٣": 1},
        {"9" * 5000: 1},
    ],
    "allowed_token_ids": [[], [VOCAB], [-1]],
    "bad_words": [[""], ["   "], ["x" * 257], ["x"] * 65, [1], ["\u6c34" * 90]],
    "truncate_prompt_tokens": [0, -2, 2**31],
    "prompt_logprobs": [-1, 21],
    "repetition_penalty": [0, -1.0, 101, "1"],
    "presence_penalty": [2.1, -2.1],
    "frequency_penalty": [2.1, -2.1],
    "include_stop_str_in_output": [1],
    "return_token_ids": ["yes"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_values_are_refused_by_name(client, name):
    for value in REFUSED[name]:
        for ask in (
            lambda extra: complete(client, max_tokens=2, **extra),
            lambda extra: client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=2, extra_body=extra
            ),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                ask({name: value})
            assert error.value.code == "invalid_value", value
            assert error.value.param.partition("[")[0].partition(".")[0] == name, value


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"logprobs": 2}, "logprobs"),
        ("chat", {"echo": True}, "echo"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_the_forms_of_each_endpoint(client, path, given, param):
    body = {"messages": MESSAGES} if path == "chat" else {"prompt": PROMPT}
    where = "/chat/completions" if path == "chat" else "/completions"
    with pytest.raises(openai.BadRequestError) as error:
        client.post(where, body={**body, **given}, cast_to=object)
    assert error.value.param == param


def test_grpc_refuses_the_same(client, grpc_client):
    bad = {
        "n": 9,
        "logit_bias": {VOCAB: 1.0},
        "allowed_token_ids": [-1],
        "bad_words": ["x" * 257],
        "truncate_prompt_tokens": 0,
        "logprobs": 21,
        "prompt_logprobs": -1,
        "repetition_penalty": 0.0,
        "presence_penalty": float("nan"),
        "frequency_penalty": float("inf"),
        "max_tokens": 0,
    }
    for name, value in bad.items():
        with pytest.raises(ClientError) as error:
            grpc_client.complete(PROMPT, **{name: value})
        assert (error.value.code, error.value.param) == ("invalid_value", name)
    assert grpc_client.complete(PROMPT, max_tokens=2).token_ids
