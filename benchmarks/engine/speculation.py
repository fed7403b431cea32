"""Speculation on and off in turn: tokens a second by kind of text and number of requests.

    python -m benchmarks.engine.speculation --weights int8 --seconds 230 --json out.json
    python -m benchmarks.engine.speculation --proposer --json out.json

SmolLM2-135M-Instruct, greedy; the first step, which computes the prompts, is not counted. Each
round has other prompts; an engine without drafts, one with `lookup` and one with `suffix` answer
them in turn, and their ids must agree. `suffix` has seen answers to other prompts. A figure is
the median over rounds of the ratio within the round. --proposer measures drafts alone: time and
memory for 64 texts of 8,192 tokens.

--llama-cpp adds llama.cpp's answers to the same prompts, one at a time: without drafts, and with
the prompt lookup of llama-cpp-python, of 2 tokens (its advice for CPUs) and of 10 (its default).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import record
from benchmarks.engine.speculation_peers import LLAMA_MODES, NEW, LlamaCpp
from benchmarks.engine.speculation_prompts import KINDS, NUM, SPEC, prompts
from benchmarks.engine.speculation_rows import Run, Runs, row
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.option_groups.speculation import Speculation
from penstock.workers.request import Request, SamplingParams
from penstock.workers.speculation.draft import Text
from penstock.workers.speculation.proposers import Lookup, Suffix
from penstock.workers.structured.grammar import GrammarCompiler, GrammarMatcher
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model

MODEL = "smollm2"
MODES: tuple[Speculation, ...] = ("off", "lookup", "suffix")
SEEN = 4  # prompts of a kind, the last ones, whose answers `suffix` knows


class Bench:
    """The engines, which share one model, and what they are asked."""

    def __init__(self, weights: str, kinds: list[str], threads: int):
        torch.set_num_threads(threads)
        folder = resolve_model(MODEL)
        self.model = load_model(folder, weights=weights, progress=False)
        self.tokenizer = Tokenizer.load(folder)
        self.engines = {mode: self._engine(mode, weights) for mode in MODES}
        self.compiler = GrammarCompiler(
            self.tokenizer.to_json,
            vocab_size=self.model.config.vocab_size,
            eos_token_ids=self.model.config.eos_token_ids,
        )
        self.prompts = {
            kind: [tuple(self.tokenizer.encode(text)) for text in prompts(kind)] for kind in KINDS
        }
        self.seen = {kind: self._answers_seen(kind) for kind in kinds}

    def _engine(self, mode: Speculation, weights: str) -> Engine:
        config = EngineConfig(
            model=MODEL, weights=weights, num_blocks=1024, max_num_batched_tokens=8192,  # type: ignore[arg-type]
            speculate=mode,
        )  # fmt: skip
        return Engine(config, self.model)

    def _answers_seen(self, kind: str) -> list[list[int]]:
        own = range(len(self.prompts[kind]) - SEEN, len(self.prompts[kind]))
        return self.run("off", kind, own).ids

    def run(self, mode: Speculation, kind: str, which: range) -> Run:
        engine, found = self.engines[mode], Run()
        ids: dict[str, list[int]] = {str(i): [] for i in which}
        drafting = engine.scheduler.drafting
        before = (0, 0)
        if drafting is not None:
            drafting.proposer = self._proposer(mode, kind)
            before = _counts(engine)
        for i in which:
            spec = SPEC if kind == "json" else None
            params = SamplingParams(temperature=0.0, max_tokens=NEW, structured=spec)
            matcher: GrammarMatcher | None = None
            if spec is not None:
                matcher = self.compiler.matcher(spec)
            engine.add(Request(str(i), self.prompts[kind][i], params), matcher)
        began_s = None
        while engine.has_work():
            for delta in engine.step():
                if delta.error is not None:
                    raise RuntimeError(f"{kind} {delta.request_id}: {delta.error}")
                ids[delta.request_id] += delta.token_ids
            if began_s is None:
                began_s = time.perf_counter()
            else:
                found.num_steps += 1
        assert began_s is not None
        found.seconds = time.perf_counter() - began_s
        found.ids = list(ids.values())
        if drafting is not None:
            after = _counts(engine)
            found.num_drafts, found.num_accepted = after[0] - before[0], after[1] - before[1]
        return found

    def _proposer(self, mode: Speculation, kind: str) -> Lookup:
        """A new one: it has not seen the answers of earlier rounds."""
        if mode == "lookup":
            return Lookup()
        proposer = Suffix()
        for i, answer in enumerate(getattr(self, "seen", {}).get(kind, [])):
            proposer.end(Text(f"seen {i}", array("i", [0, *answer]), 1))
        return proposer


def _counts(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return sum(stats.num_draft_tokens.values()), sum(stats.num_accepted_tokens.values())


def measured(
    bench: Bench, kinds: list[str], batches: list[int], seconds: float, peer: LlamaCpp | None
) -> list[dict[str, Any]]:
    """A row for each kind, number of requests and mode, over all rounds there is time for. `peer`
    answers the prompts of one request, but for those with a grammar."""
    cells = [(kind, batch) for batch in batches for kind in kinds]
    runs: Runs = {}
    end_s, num_rounds = time.perf_counter() + seconds, 0
    for batch in batches:  # the first run of a size allocates and records
        for mode in MODES:
            bench.run(mode, kinds[0], range(batch))
    num_unseen = NUM - SEEN
    while time.perf_counter() < end_s or num_rounds < 2:
        for kind, batch in cells:
            shift, first = num_rounds % len(MODES), num_rounds * batch % num_unseen
            which = range(first, min(first + batch, num_unseen))
            for mode in (*MODES[shift:], *MODES[:shift]):
                runs.setdefault((kind, batch, mode), []).append(bench.run(mode, kind, which))
        if peer is not None:
            asked = {k: bench.prompts[k][num_rounds % num_unseen] for k in kinds if k != "json"}
            for name, answers in peer.answers(asked).items():
                for kind, run in answers.items():
                    runs.setdefault((kind, 1, name), []).append(run)
        num_rounds += 1
    own = [row(runs, *cell, mode, "off", is_exact=True) for cell in cells for mode in MODES]
    if peer is None:
        return own
    return own + [
        row(runs, kind, 1, mode, "llama.cpp off", is_exact=False)
        for kind in kinds
        for mode in LLAMA_MODES
        if kind != "json"
    ]


def proposer_costs(num_texts: int, num_tokens: int) -> dict[str, Any]:
    """Of texts that repeat themselves in part: time to index, to propose once, and bytes."""
    rng = random.Random(0)
    proposer, texts = Suffix(), []
    for i in range(num_texts):
        words = [rng.randrange(49152) for _ in range(num_tokens // 2)]
        token_ids = array("i", words + [rng.choice(words) for _ in range(num_tokens - len(words))])
        texts.append(Text(str(i), token_ids, len(token_ids)))
    for i in range(200):
        answer = [rng.randrange(49152) for _ in range(512)]
        proposer.end(Text(f"earlier {i}", array("i", [0, *answer]), 1))
    began_s = time.perf_counter()
    for text in texts:
        proposer.propose(text, 15)
    index_s = (time.perf_counter() - began_s) / num_texts
    times = []
    for _ in range(200):
        for text in texts:
            at = rng.randrange(num_tokens // 2)
            text.token_ids.append(text.token_ids[at])
            began_s = time.perf_counter()
            proposer.propose(text, 15)
            times.append(time.perf_counter() - began_s)
    return {
        "texts": num_texts,
        "tokens": num_tokens,
        "first_ms": 1e3 * index_s,
        "propose_us": 1e6 * statistics.median(times),
        "propose_p99_us": 1e6 * sorted(times)[int(0.99 * len(times))],
        "own_bytes": proposer.num_bytes,
        "answer_bytes": proposer.num_answer_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", choices=("bf16", "int8", "int4", "fp32"), default="int8")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="with llama-cpp-python; --requests 1")
    parser.add_argument("--proposer", action="store_true", help="drafts alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.llama_cpp and 1 not in args.requests:
        parser.error("--llama-cpp answers one prompt at a time: --requests must have 1")
    if args.proposer:
        results = proposer_costs(64, 8192)
        print(results)
    else:
        bench = Bench(args.weights, args.kinds, args.threads)
        try:
            with tempfile.TemporaryDirectory() as folder:
                peer = None
                if args.llama_cpp:
                    peer = LlamaCpp(args.llama_cpp, Path(folder), bench.model.config, args.threads)
                rows = measured(bench, args.kinds, args.requests, args.seconds, peer)
        finally:
            bench.compiler.close()
        for each in rows:
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in each.items()})
        results = {"weights": args.weights, "new": NEW, "rows": rows}
    if args.json is not None:
        record.write(args.json, __file__, results, threads=args.threads)


if __name__ == "__main__":
    main()
