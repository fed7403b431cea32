"""What a benchmark asks for: how many tokens each request has, when it is sent, and its words.

Pure arithmetic on a seeded generator: the same seed gives the same load.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from penstock.workers.errors import ConfigError

CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
JSON_KEYS = ("prompt_tokens", "gen_tokens")

# Short and common: with a space before it, each is one token of most vocabularies.
_WORDS = """
the of and to in a was that he it his is with as for had you not be her on at by which have or
from this him but all she they were my are me one their so an said them we who would been will
no when there if more out up into do any your what has man could other than our some very time
upon about may its only now like little then can made should did us such great before must two
these see know over much down after first good men own never most old shall day where those came
come himself way work life without go make well through being long say might how am too even
again many back here think every people went same last thought away under take found hand eyes
still place while just also young yet though against things get ever give god years off face
nothing right once another left part saw house world head three took new love always put night
each king between tell mind heart few because thing whom far
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class Job:
    """One request: seconds from the start of the run until it is sent, and its lengths."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace. `at_s` counts from the first; None where the trace has no times."""

    at_s: float | None
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """A number of tokens, or a range to draw from evenly, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """'128', or '16:512'. Raises ConfigError."""
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low))
        except ValueError:
            raise ConfigError(f"cannot read the length {text!r}: write 128, or 16:512") from None
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"the length {text!r} must be at least 1, the smaller number first")
        return lengths

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high, endpoint=True))


def read_trace(path: str) -> list[TraceEntry]:
    """A CSV file with TIMESTAMP, ContextTokens and GeneratedTokens, as of Azure's public traces, or
    a JSON list of objects with prompt_tokens and gen_tokens. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    rows = _json_rows(text, path) if path.endswith(".json") else _csv_rows(text, path)
    entries: list[TraceEntry] = []
    first_s = 0.0
    for where, at, prompt, output in rows:
        try:
            at_s = None if at is None else _seconds(at)
            num_prompt, num_output = int(prompt), int(output)
        except (ValueError, TypeError):
            raise ConfigError(f"{path}, {where}: cannot read {(at, prompt, output)}") from None
        if at_s is not None:
            first_s = at_s if not entries else first_s
            at_s -= first_s
        if num_prompt < 1 or num_output < 1:
            continue  # nothing to ask, or nothing to wait for
        entries.append(TraceEntry(at_s, num_prompt, num_output))
    if not entries:
        raise ConfigError(f"the trace {path} holds no requests")
    return sorted(entries, key=lambda entry: entry.at_s or 0.0)


def _csv_rows(text: str, path: str) -> Iterator[tuple[str, Any, Any, Any]]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in CSV_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"the trace {path} lacks the columns {', '.join(missing)}")
    for row in reader:
        at, prompt, output = (row[name] for name in CSV_COLUMNS)
        yield f"line {reader.line_num}", at, prompt, output


def _json_rows(text: str, path: str) -> Iterator[tuple[str, Any, Any, Any]]:
    try:
        items = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the trace {path} is not JSON: {error}") from None
    if not isinstance(items, list):
        raise ConfigError(f"the trace {path} must be a list of objects with {JSON_KEYS}")
    for i, item in enumerate(items):
        if not isinstance(item, dict) or any(key not in item for key in JSON_KEYS):
            raise ConfigError(f"{path}, item {i}: must be an object with {' and '.join(JSON_KEYS)}")
        yield f"item {i}", item.get("at_s"), item["prompt_tokens"], item["gen_tokens"]


def _seconds(at: Any) -> float:
    """Seconds of a timestamp: a date and time, or a plain number."""
    try:
        return float(at)
    except ValueError:
        return datetime.fromisoformat(str(at)).timestamp()


def gaps(kind: str, rate: float, cv: float, rng: np.random.Generator) -> Iterator[float]:
    """Seconds between arrivals with a mean of 1 / `rate`, without end.

    "poisson": exponential. "bursty": gamma with the coefficient of variation `cv`; 1 is Poisson,
    more is burstier. "constant": all alike. "at-once": none.
    """
    for _ in count():
        if kind == "poisson":
            yield float(rng.exponential(1 / rate))
        elif kind == "bursty":
            yield float(rng.gamma(1 / cv**2, cv**2 / rate))
        else:
            yield 1 / rate if kind == "constant" else 0.0


def make_jobs(
    *,
    arrivals: str,
    rate: float,
    cv: float,
    speed: float,
    prompt: Lengths,
    output: Lengths,
    trace: Sequence[TraceEntry] | None,
    num_requests: int | None,
    duration_s: float | None,
    seed: int,
) -> list[Job]:
    """The requests of a run, in order of their times; the first is sent at once.

    Lengths come from the `trace` where there is one, beginning anew when it ends; its arrivals
    (`arrivals` "trace") are played `speed` times as fast, and once. Raises ConfigError.
    """
    times, lengths = (np.random.default_rng((seed, stream)) for stream in (0, 1))
    if num_requests is None and (duration_s is None or arrivals == "at-once"):
        raise ConfigError("say how many requests to send: --num-requests")
    if arrivals == "trace":
        if trace is None or trace[0].at_s is None:
            raise ConfigError("--arrivals trace needs a --trace with TIMESTAMPs (CSV)")
        start_s = trace[0].at_s
        jobs: Iterator[Job] = (
            Job(((e.at_s or 0.0) - start_s) / speed, e.prompt_tokens, e.output_tokens)
            for e in trace
        )
    else:
        at = _running_sum(gaps(arrivals, rate, cv, times))
        if trace is not None:
            jobs = (Job(next(at), e.prompt_tokens, e.output_tokens) for e in cycle(trace))
        else:
            jobs = (Job(next(at), prompt.draw(lengths), output.draw(lengths)) for _ in count())
    chosen = []
    for job in islice(jobs, num_requests):
        if duration_s is not None and job.at_s > duration_s:
            break
        chosen.append(job)
    return chosen


def _running_sum(numbers: Iterator[float]) -> Iterator[float]:
    total = 0.0
    yield total
    for number in numbers:
        total += number
        yield total


@dataclass(frozen=True, slots=True)
class WordPrompts:
    """Prompts of random words. A prompt of w words has about `overhead` + w * `tokens_per_word`
    tokens; the server reports the true number."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    @classmethod
    def calibrated(cls, few: tuple[int, int], many: tuple[int, int]) -> WordPrompts:
        """From two prompts whose (words, tokens) are known."""
        slope = max((many[1] - few[1]) / (many[0] - few[0]), 0.1)
        return cls(slope, few[1] - slope * few[0])

    def make(self, num_tokens: int, rng: np.random.Generator) -> str:
        num_words = max(1, round((num_tokens - self.overhead) / self.tokens_per_word))
        return words(num_words, rng)


def words(num_words: int, rng: np.random.Generator) -> str:
    return " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=num_words))
