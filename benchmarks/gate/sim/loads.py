"""Loads of the simulator: who asks for what, when, and how long the answers become.

Lengths come from traces (Azure's chat service; the 1,024 requests with text of PPL's benchmark) or,
for long reasoning, from a log-normal distribution. Arrivals are drawn anew: Poisson, or
Gamma with a higher coefficient of variation. `max_tokens` is what a client writes and has
nothing to do with the true length, but cuts it. No prompt with text comes
twice in a run: a predictor would know it by heart.
Knows nothing of workers or policies.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.gate.sim.worker import Job, StepModel, WorkerShape
from penstock.deployments.gate.forecast.prefix_affinity import MAX_MARKS, SHORTEST
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.text_digest import TextDigest, digest_text

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"
TEXTS, LENGTHS = "ppl_samples_1024.json", "ppl_samples_1024_lengths.json"
AZURE = "AzureLLMInferenceTrace_conv_2023.csv"

# Assumed step times of such machines, not measured by us; pools: what the weights leave free.
GPUS = {
    "7b-int8-a100-80g": WorkerShape(StepModel(9e-3, 0.0, 0.33e-6, 25e-6), num_blocks=4096),
    "13b-fp16-a100-40g": WorkerShape(
        StepModel(20e-3, 0.0, 0.53e-6, 130e-6), num_blocks=981, budget=512
    ),
}


class MissingTraceError(SystemExit):
    """A trace is not there; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer is, in seconds."""

    ttft: float = 10.0
    tpot: float = 0.06  # mean
    gap: float = 1.5  # longest


@dataclass(frozen=True, slots=True)
class Source:
    """Requests of one kind."""

    kind: str  # "azure", "ppl", "reasoning", "words"
    share: float = 1.0
    tenants: tuple[str, ...] = ("",)
    max_tokens: int = 1024
    num_prefixes: int = 0  # beginnings that prompts share, the k-th in 1/k of the requests
    prefix_tokens: int = 0  # of each, before what the trace has


@dataclass(frozen=True, slots=True)
class Load:
    """A named load: sources, pace, machine and the service's limits."""

    what: str
    sources: tuple[Source, ...]
    rate: float  # requests a second, for one worker
    gpu: str
    slo: Slo = field(default_factory=Slo)
    cv: float = 1.0  # of the gaps between arrivals; 1: Poisson
    num_requests: int = 1500
    leaving: float = 0.0  # share of clients that leave at some token of their answer
    longest_wait_s: float | None = None  # the gate refuses requests that would wait longer
    settled: float = 0.2  # of the requests, that come first and are not counted


@dataclass(frozen=True, slots=True)
class Shape:
    """Prompt and natural answer, in tokens, and what the text says."""

    prompt: int
    natural: int
    text: TextDigest | None = None


def jobs_of(
    load: Load, seed: int, folder: Path, *, workers: int = 1, scale: float = 1.0
) -> list[Job]:
    """The requests of one run, in the order of their arrival. The same seed, the same requests."""
    rng = np.random.default_rng(seed)
    num = load.num_requests * workers
    shares = np.array([each.share for each in load.sources])
    kinds = rng.choice(len(shares), num, p=shares / shares.sum())
    shape = 1.0 / load.cv**2
    gaps = rng.gamma(shape, 1.0 / (shape * load.rate * workers * scale), num)
    times = np.cumsum(gaps)
    drawn = [
        iter(shapes_of(each.kind, int((kinds == i).sum()), rng, folder))
        for i, each in enumerate(load.sources)
    ]
    jobs = []
    for number, (at, kind) in enumerate(zip(times.tolist(), kinds.tolist())):
        source, shape_of = load.sources[kind], next(drawn[kind])
        tenant = source.tenants[int(rng.integers(len(source.tenants)))]
        length, ended = min(shape_of.natural, source.max_tokens), "stop"
        if shape_of.natural > source.max_tokens:
            ended = "length"
        if rng.random() < load.leaving:
            length, ended = int(rng.integers(1, length + 1)), "cancel"
        prompt, prefix = shape_of.prompt, _prefix_of(source, rng)
        prompt += source.prefix_tokens if prefix else 0
        features = Features(
            "model",
            tenant=tenant,
            prompt_tokens=prompt,
            max_tokens=source.max_tokens,
            text=shape_of.text,
        )
        jobs.append(
            Job(
                f"r{number}",
                at,
                prompt,
                length,
                ended,
                source.max_tokens,
                tenant,
                features,
                prefix=prefix,
                shared=source.prefix_tokens if prefix else 0,
            )
        )
    return jobs


def _prefix_of(source: Source, rng: np.random.Generator) -> tuple[int, ...]:
    """Marks of one of the source's beginnings, one of each length as in prefix_affinity.py."""
    if not source.num_prefixes:
        return ()
    shares = 1.0 / np.arange(1, source.num_prefixes + 1)
    drawn = int(rng.choice(source.num_prefixes, p=shares / shares.sum()))
    num_marks = (source.prefix_tokens // SHORTEST).bit_length()
    return tuple(drawn * MAX_MARKS + i for i in range(min(num_marks, MAX_MARKS)))


def shapes_of(kind: str, num: int, rng: np.random.Generator, folder: Path) -> list[Shape]:
    """`num` requests of a kind, drawn by `rng`."""
    if kind == "reasoning":
        natural = np.exp(rng.normal(np.log(1500.0), 0.9, num))
        prompts = np.exp(rng.normal(np.log(200.0), 1.0, num))
        return [
            Shape(int(np.clip(p, 8, 4000)), max(int(n), 1))
            for p, n in zip(prompts.tolist(), natural.tolist())
        ]
    if kind == "words":
        natural = np.exp(rng.normal(np.log(250.0), 0.9, num))
        sizes = np.clip(np.exp(rng.normal(np.log(60.0), 0.8, num)), 4, 600).astype(int)
        return [
            Shape(2 * size, max(int(n), 1), digest_text(_words(size, rng)))
            for size, n in zip(sizes.tolist(), natural.tolist())
        ]
    if kind == "ppl":
        texts = read_texts(folder)
        if num > len(texts):
            raise SystemExit(
                f"this run wants {num} prompts with text and there are {len(texts)}: take a load "
                "without text, or fewer requests"
            )
        return [texts[i] for i in rng.permutation(len(texts))[:num].tolist()]
    rows = read_azure(folder)
    return [rows[i] for i in rng.integers(len(rows), size=num).tolist()]


def _words(num: int, rng: np.random.Generator) -> str:
    """A prompt of made-up words, few of them frequent, as in a language. It tells nothing."""
    return " ".join(f"w{each}" for each in (rng.zipf(1.3, num) % 20_000).tolist())


@cache
def read_texts(folder: Path) -> list[Shape]:
    texts = json.loads(_trace(folder, TEXTS).read_text())
    lengths = {each["id"]: each for each in json.loads(_trace(folder, LENGTHS).read_text())}
    return [
        Shape(
            max(lengths[each["id"]]["prompt_tokens"], 1),
            max(lengths[each["id"]]["gen_tokens"], 1),
            digest_text(each["conversations"][0]["value"]),
        )
        for each in texts
    ]


@cache
def read_azure(folder: Path) -> list[Shape]:
    with _trace(folder, AZURE).open(newline="") as file:
        rows = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)]
    return [Shape(prompt, natural) for prompt, natural in rows if prompt > 0 and natural > 0]


def _trace(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.exists():
        raise MissingTraceError(
            f"{path} is missing: name the folder of the traces with --data "
            "(docs/design/prediction.md "
            "says where they come from), or take --load reasoning, which needs none"
        )
    return path


_CHAT = tuple(f"chat-{i}" for i in range(4))
LOADS = {
    "words": Load(
        "answers of 250 tokens at the median to prompts of made-up words: needs no trace",
        (Source("words", tenants=_CHAT, max_tokens=2048),),
        rate=5.0,
        gpu="7b-int8-a100-80g",
    ),
    "reasoning": Load(
        "long answers (log-normal, median 1,500), max_tokens 16k, near saturation",
        (Source("reasoning", max_tokens=16_384),),
        rate=0.42,
        gpu="7b-int8-a100-80g",
    ),
    "overload": Load(
        "the same, half as much again as can be served",
        (Source("reasoning", max_tokens=16_384),),
        rate=0.8,
        gpu="7b-int8-a100-80g",
        longest_wait_s=8.0,
    ),
    "generous": Load(
        "PPL's requests with their text, max_tokens 2,048 whatever they need",
        (Source("ppl", max_tokens=2048),),
        rate=4.0,
        gpu="13b-fp16-a100-40g",
        num_requests=1024,
    ),
    "chat": Load(
        "Azure's chat trace, max_tokens 1,024: prompts dominate",
        (Source("azure", max_tokens=1024),),
        rate=6.0,
        gpu="7b-int8-a100-80g",
    ),
    "prefixes": Load(
        "the same after one of 64 shared beginnings of 2,048 tokens",
        (Source("azure", max_tokens=1024, num_prefixes=64, prefix_tokens=2048),),
        rate=2.5,
        gpu="7b-int8-a100-80g",
        longest_wait_s=8.0,
    ),
    "bursts": Load(
        "the same in bursts: Gamma arrivals with a CV of 3, some clients leave",
        (Source("azure", max_tokens=1024),),
        rate=4.5,
        gpu="7b-int8-a100-80g",
        cv=3.0,
        leaving=0.1,
    ),
    "mixed": Load(
        "chat of four tenants and reasoning of one, on one worker",
        (
            Source("azure", 0.8, _CHAT, 1024),
            Source("reasoning", 0.2, ("reasoning",), 16_384),
        ),
        rate=1.6,
        gpu="7b-int8-a100-80g",
    ),
    "noisy": Load(
        "one tenant sends ten times as much as each of nine others, in overload",
        (
            Source("azure", 10.0, ("noisy",), 1024),
            Source("azure", 9.0, tuple(f"quiet-{i}" for i in range(9)), 1024),
        ),
        rate=9.0,
        gpu="7b-int8-a100-80g",
        longest_wait_s=60.0,
    ),
}
