"""Speculation on and off in turn: tokens a second by kind of text and number of requests.

    python -m benchmarks.engine.speculation --weights int8 --seconds 230 --json out.json
    python -m benchmarks.engine.speculation --weights bf16 --off-grid --modes off suffix draft
    python -m benchmarks.engine.speculation --proposer --json out.json

SmolLM2-135M-Instruct, greedy; the first step, which computes the prompts, is not counted. Each
round has other prompts; engines with each of --modes answer them in turn, and their ids must
agree. `suffix` has seen answers to other prompts; `draft` is the model itself in --draft-weights,
and has seen nothing. A figure is the median over rounds of the ratio within the round. --proposer
measures drafts alone: time and memory for 64 texts of 8,192 tokens.

--off-grid: the model as a checkpoint whose weights do not lie on a 4-bit grid, as those of the
published file do (common/off_grid.py): a draft model in int4 is then no copy.

--llama-cpp adds llama.cpp's answers to the same prompts, one at a time: without drafts, and with
the prompt lookup of llama-cpp-python, of 2 tokens (its advice for CPUs) and of 10 (its default).
--vllm adds vLLM's, of as many prompts at once: without drafts, and with its n-gram drafts.
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
from benchmarks.common.off_grid import write_off_grid
from benchmarks.engine.speculation_peers import NEW, LlamaCpp, Peer, Vllm
from benchmarks.engine.speculation_prompts import KINDS, NUM, SPEC, prompts
from benchmarks.engine.speculation_rows import Run, Runs, row
from penstock.workers.config import EngineConfig
from penstock.workers.engine.draft import load_draft
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
MODES: tuple[Speculation, ...] = ("off", "lookup", "suffix", "draft")
SEEN = 4  # prompts of a kind, the last ones, whose answers `suffix` knows


class Bench:
    """The engines, which share one model, and what they are asked."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        torch.set_num_threads(args.threads)
        self.folder = folder
        self.modes: list[Speculation] = args.modes
        self.model = load_model(folder, weights=args.weights, progress=False)
        self.tokenizer = Tokenizer.load(folder)
        self.engines = {mode: self._engine(mode, args) for mode in self.modes}
        self.compiler = GrammarCompiler(
            self.tokenizer.to_json,
            vocab_size=self.model.config.vocab_size,
            eos_token_ids=self.model.config.eos_token_ids,
        )
        self.prompts = {
            kind: [tuple(self.tokenizer.encode(text)) for text in prompts(kind)] for kind in KINDS
        }
        self.seen = {kind: self._answers_seen(kind) for kind in args.kinds}

    def _engine(self, mode: Speculation, args: argparse.Namespace) -> Engine:
        config = EngineConfig(
            model=str(self.folder), weights=args.weights, num_blocks=1024,
            max_num_batched_tokens=8192, speculate=mode, draft_weights=args.draft_weights,
        )  # fmt: skip
        draft = load_draft(config, self.folder, "cpu", self.model)
        return Engine(config, self.model, draft=draft)

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
        if mode == "draft":
            return proposer
        for i, answer in enumerate(getattr(self, "seen", {}).get(kind, [])):
            proposer.end(Text(f"seen {i}", array("i", [0, *answer]), 1))
        return proposer


def _counts(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return sum(stats.num_draft_tokens.values()), sum(stats.num_accepted_tokens.values())


def measured(
    bench: Bench, kinds: list[str], batches: list[int], seconds: float, peers: list[Peer]
) -> list[dict[str, Any]]:
    """A row for each kind, number of requests and mode, over all rounds there is time for."""
    cells = [(kind, batch) for batch in batches for kind in kinds]
    runs: Runs = {}
    end_s, num_rounds = time.perf_counter() + seconds, 0
    for batch in batches:  # the first run of a size allocates and records
        for mode in bench.modes:
            bench.run(mode, kinds[0], range(batch))
    while time.perf_counter() < end_s or num_rounds < 2:
        for kind, batch in cells:
            shift, which = num_rounds % len(bench.modes), _asked(batch, num_rounds)
            for mode in (*bench.modes[shift:], *bench.modes[:shift]):
                runs.setdefault((kind, batch, mode), []).append(bench.run(mode, kind, which))
        asked = {
            (kind, batch): [bench.prompts[kind][i] for i in _asked(batch, num_rounds)]
            for kind, batch in cells
        }
        for peer in peers:
            for name, answers in peer.answers(asked).items():
                for (kind, batch), run in answers.items():
                    runs.setdefault((kind, batch, name), []).append(run)
        num_rounds += 1
    own = [row(runs, *cell, mode, "off", is_exact=True) for cell in cells for mode in bench.modes]
    return own + [
        row(runs, *cell, mode, peer.base, is_exact=False)
        for cell in cells
        for peer in peers
        for mode in peer.modes
        if (*cell, mode) in runs
    ]


def _asked(batch: int, num_rounds: int) -> range:
    """The prompts of a round."""
    first = num_rounds * batch % (NUM - SEEN)
    return range(first, min(first + batch, NUM - SEEN))


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


def _rows(args: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    model = resolve_model(MODEL)
    if args.off_grid:
        model = work / "off-grid"
        write_off_grid(resolve_model(MODEL), model)
    bench = Bench(model, args)
    peers: list[Peer] = []
    if args.llama_cpp:
        peers.append(LlamaCpp(args.llama_cpp, model, work, bench.model.config, args))
    if args.vllm:
        peers.append(Vllm(args.vllm, model, bench.model.config, args))
    try:
        return measured(bench, args.kinds, args.requests, args.seconds, peers)
    finally:
        bench.compiler.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", choices=("bf16", "int8", "int4", "fp32"), default="int8")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES[:3]))
    parser.add_argument("--draft-weights", choices=("int4", "int8"), default="int4")
    parser.add_argument("--off-grid", action="store_true", help="a checkpoint of other weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="with llama-cpp-python; --requests 1")
    parser.add_argument("--vllm", metavar="PYTHON", help="with vLLM; needs --off-grid")
    parser.add_argument("--proposer", action="store_true", help="drafts alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.llama_cpp and 1 not in args.requests:
        parser.error("--llama-cpp answers one prompt at a time: --requests must have 1")
    if args.vllm and not args.off_grid:
        parser.error("--vllm loads a checkpoint: --off-grid makes one")
    if "off" not in args.modes:
        parser.error("--modes must have off, against which the others are measured")
    if args.proposer:
        results = proposer_costs(64, 8192)
        print(results)
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = _rows(args, Path(folder))
        for each in rows:
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in each.items()})
        results = {"weights": args.weights, "new": NEW, "rows": rows}
        if "draft" in args.modes:
            results["draft_weights"] = args.draft_weights
    if args.json is not None:
        record.write(args.json, __file__, results, threads=args.threads)


if __name__ == "__main__":
    main()
