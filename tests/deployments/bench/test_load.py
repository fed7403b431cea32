"""Loads of a benchmark: arrivals against their distributions, traces, lengths, prompts."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from penstock.deployments.bench.load import Job, Lengths, WordPrompts, gaps, make_jobs, read_trace
from penstock.workers.errors import ConfigError

AZURE = Path(__file__).parents[4] / "shared/data/traces/AzureLLMInferenceTrace_conv_2023.csv"
CSV = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9305900,396,109\n"
    "2023-11-16 18:15:48.6805900,7,0\n"
    "2023-11-16 18:15:47.6805900,9,3\n"
)


def jobs_of(**changes):
    given = {
        "arrivals": "poisson",
        "rate": 4.0,
        "cv": 2.0,
        "speed": 1.0,
        "prompt": Lengths(8, 8),
        "output": Lengths(2, 5),
        "trace": None,
        "num_requests": 50,
        "duration_s": None,
        "seed": 7,
    }
    return make_jobs(**{**given, **changes})


@pytest.mark.parametrize("rate", [0.5, 20.0])
@pytest.mark.parametrize(
    ("kind", "cv", "distribution"),
    [
        ("poisson", 1.0, lambda rate: stats.expon(scale=1 / rate)),
        ("bursty", 1.0, lambda rate: stats.expon(scale=1 / rate)),
        ("bursty", 3.0, lambda rate: stats.gamma(1 / 9, scale=9 / rate)),
        ("bursty", 0.5, lambda rate: stats.gamma(4, scale=0.25 / rate)),
    ],
)
def test_gaps_follow_their_distribution(kind, cv, distribution, rate):
    drawn = list(islice(gaps(kind, rate, cv, np.random.default_rng(1)), 20_000))
    expected = distribution(rate)
    assert stats.kstest(drawn, expected.cdf).pvalue > 0.01
    assert np.mean(drawn) == pytest.approx(1 / rate, rel=0.08)
    assert np.std(drawn) / np.mean(drawn) == pytest.approx(cv, rel=0.08)


def test_constant_gaps_are_all_alike():
    jobs = jobs_of(arrivals="constant", rate=8.0, num_requests=5)
    assert [job.at_s for job in jobs] == [0.0, 0.125, 0.25, 0.375, 0.5]
    assert [job.at_s for job in jobs_of(arrivals="at-once", num_requests=3)] == [0.0] * 3


def test_same_seed_same_load_and_times_do_not_hang_on_lengths():
    assert jobs_of() == jobs_of()
    assert jobs_of() != jobs_of(seed=8)
    other_lengths = jobs_of(prompt=Lengths(1, 900))
    assert [job.at_s for job in other_lengths] == [job.at_s for job in jobs_of()]
    assert {job.output_tokens for job in jobs_of(num_requests=200)} == {2, 3, 4, 5}


def test_duration_and_number_limit_the_load():
    by_time = jobs_of(num_requests=None, duration_s=100.0)
    assert all(job.at_s <= 100 for job in by_time)
    assert 340 < len(by_time) < 460  # Poisson: a deviation of 20
    assert jobs_of(num_requests=10, duration_s=100.0) == by_time[:10]
    with pytest.raises(ConfigError, match="--num-requests"):
        jobs_of(num_requests=None)


def test_trace_in_csv(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(CSV)
    entries = read_trace(str(path))  # in order of time, without the answer of no tokens
    assert [(e.prompt_tokens, e.output_tokens) for e in entries] == [(374, 44), (9, 3), (396, 109)]
    assert [e.at_s for e in entries] == pytest.approx([0.0, 1.0, 4.25])
    replay = jobs_of(arrivals="trace", trace=entries, speed=2.0, num_requests=None, duration_s=9)
    assert [job.at_s for job in replay] == pytest.approx([0.0, 0.5, 2.125])
    assert len(jobs_of(arrivals="trace", trace=entries)) == 3  # played once
    cycled = jobs_of(arrivals="constant", trace=entries, rate=1.0, num_requests=4)
    assert cycled[3] == Job(3.0, 374, 44)


def test_trace_in_json(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text('[{"id": "a", "prompt_tokens": 11, "gen_tokens": 845}]')
    entries = read_trace(str(path))
    assert [(e.at_s, e.prompt_tokens, e.output_tokens) for e in entries] == [(None, 11, 845)]
    with pytest.raises(ConfigError, match="TIMESTAMP"):
        jobs_of(arrivals="trace", trace=entries)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "TIMESTAMP,ContextTokens\n1,2\n", "lacks the columns GeneratedTokens"),
        ("t.csv", CSV + "yesterday,1,2\n", "line 6"),
        ("t.csv", CSV + "2023-11-16 18:15:46,many,2\n", "line 6"),
        ("t.csv", CSV + "2023-11-16 18:15:46\n", "line 6"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("t.json", "{}", "must be a list"),
        ("t.json", '[{"prompt_tokens": 1}]', "item 0"),
        ("t.json", "[", "not JSON"),
        ("t.json", '[{"prompt_tokens": 1, "gen_tokens": null}]', "item 0"),
    ],
)
def test_bad_trace_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(str(tmp_path / name))


def test_missing_trace_is_named():
    with pytest.raises(ConfigError, match="/nowhere"):
        read_trace("/nowhere.csv")


@pytest.mark.skipif(not AZURE.is_file(), reason="the trace is not part of the project")
def test_a_published_trace_has_its_published_figures():
    jobs = jobs_of(
        arrivals="trace", trace=read_trace(str(AZURE)), num_requests=None, duration_s=1e9
    )
    assert len(jobs) == 19366
    between = [after.at_s - before.at_s for before, after in pairwise(jobs)]
    assert 1 / np.mean(between) == pytest.approx(5.53, abs=0.01)
    assert np.std(between) / np.mean(between) == pytest.approx(1.09, abs=0.01)
    assert np.percentile([job.prompt_tokens for job in jobs], 50) == 1020


def test_lengths():
    assert Lengths.parse("128") == Lengths(128, 128)
    assert Lengths.parse("16:512") == Lengths(16, 512)
    for wrong in ("", "0", "9:3", "1:", "a", "1:2:3"):
        with pytest.raises(ConfigError, match="length"):
            Lengths.parse(wrong)


def test_prompts_of_words_are_as_long_as_calibrated():
    prompts = WordPrompts.calibrated((16, 3 + 24), (144, 3 + 216))  # 3 tokens, and 1.5 a word
    assert (prompts.tokens_per_word, prompts.overhead) == (1.5, 3.0)
    rng = np.random.default_rng(0)
    assert len(prompts.make(303, rng).split()) == 200
    assert len(prompts.make(1, rng).split()) == 1  # a prompt is never empty
    assert prompts.make(60, np.random.default_rng(1)) == prompts.make(60, np.random.default_rng(1))
