"""Time of a decode step and of a prompt: one process, two ranks, and two pipeline stages.

    python -m benchmarks.engine.group --model FILE --out group.json
    python -m benchmarks.engine.group --experts --out experts.json

Engines take turns; medians over the rounds, greedy. `--experts`: a made-up model with routed
experts and random weights; its ranks have columns of all experts, or whole ones. Beside the times:
gathers of a decode step, and the bytes that the first rank receives in one, both as counted and by
the formula of `penstock plan`, and the part of the time for which the ranks wait for one another.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import record
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.load import load_engine
from penstock.workers.planning.group import Group
from penstock.workers.request import Request, SamplingParams

FORMATS = ("bf16", "int8")
BATCHES, ROUNDS, PROMPT, NEW, LONG = (1, 8), 5, 100, 48, 512
EXPERTS: dict[str, Any] = {  # of each layer; a third of OLMoE's width
    "vocab_size": 8192, "hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 512, "norm_topk_prob": True, "max_position_embeddings": 2048,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """How one model is divided; `threads` of all its processes."""

    name: str
    threads: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.options.get("tensor_parallel_size", 1)

    @property
    def num_stages(self) -> int:
        return self.options.get("pipeline_parallel_size", 1)


def kinds(has_experts: bool) -> list[Kind]:
    two = {"tensor_parallel_size": 2}
    found = [Kind("1 process, 1 thread", 1), Kind("1 process, 2 threads", 2)]
    if has_experts:
        found.append(Kind("2 ranks, columns", 2, two))
        found.append(Kind("2 ranks, whole experts", 2, {**two, "enable_expert_parallel": True}))
    else:
        found.append(Kind("2 ranks", 2, two))
    return [*found, Kind("2 stages", 2, {"pipeline_parallel_size": 2})]


def add(engine: Engine, batch: int) -> None:
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    for i in range(batch):
        engine.add(Request(f"r{i}", tuple(range(5 + i, 5 + i + PROMPT)), params))


def step_ms(engine: Engine, batch: int) -> float:
    """Median of the steps in which all of `batch` requests decode."""
    add(engine, batch)
    times = []
    while engine.has_work():
        began_s = time.perf_counter()
        num_new = sum(len(delta.token_ids) for delta in engine.step())
        if num_new == batch:
            times.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(times[2:])


def prompt_ms(engine: Engine) -> float:
    """Until the first token after a prompt of LONG tokens, in steps of as many."""
    ids = tuple(5 + i % 200 for i in range(LONG))
    engine.add(Request("p", ids, SamplingParams(max_tokens=1, temperature=0)))
    began_s = time.perf_counter()
    while engine.has_work():
        engine.step()
    return 1e3 * (time.perf_counter() - began_s)


def engine_of(model: str, weights: Any, kind: Kind) -> Engine:
    return load_engine(
        EngineConfig(
            model=model, weights=weights, device="cpu", threads=kind.threads, num_blocks=256,
            max_num_seqs=8, max_num_batched_tokens=LONG, prefix_cache=False, **kind.options,
        )
    )  # fmt: skip


def exchanged(engine: Engine, kind: Kind, batch: int) -> dict[str, Any]:
    """Of one decode step of `batch` rows; empty without ranks that gather."""
    if kind.num_ranks == 1:
        return {}
    group = Group(2, whole_experts="enable_expert_parallel" in kind.options)
    model = engine.model.whole_config
    add(engine, batch)
    while sum(len(delta.token_ids) for delta in engine.step()) < batch:
        pass
    before, steps = engine.stats().ranks, engine.totals.num_steps
    began_s = time.perf_counter()
    while engine.has_work():
        engine.step()
    took_s = time.perf_counter() - began_s
    after, steps = engine.stats().ranks, engine.totals.num_steps - steps
    return {
        "gathers": (after[0].num_gathers - before[0].num_gathers) / steps,
        "gathers_by_formula": group.calls(model),
        "received_bytes": (after[0].received_bytes - before[0].received_bytes) / steps,
        "received_bytes_by_formula": group.sent_bytes(model, batch, batch, 2),
        "waited": [(b.wait_s - a.wait_s) / took_s for a, b in zip(before, after)],
    }


def measured(model: str, weights: str, divided: list[Kind]) -> list[dict[str, Any]]:
    measures: dict[str, Callable[[Engine], float]] = {
        f"{batch} request{'s' * (batch > 1)}, a step": partial(step_ms, batch=batch)
        for batch in BATCHES
    }
    measures[f"a prompt of {LONG} tokens"] = prompt_ms
    engines = {kind.name: engine_of(model, weights, kind) for kind in divided}
    times: dict[tuple[str, str], list[float]] = {}
    for what, measure in measures.items():
        for _ in range(ROUNDS):
            for kind in divided:
                torch.set_num_threads(kind.threads // (kind.num_ranks * kind.num_stages))
                times.setdefault((kind.name, what), []).append(measure(engines[kind.name]))
        text = ", ".join(f"{kind.name} {middle(times[kind.name, what])}" for kind in divided)
        print(f"{weights}, {what}, ms: {text}", flush=True)
    rows = []
    for kind in divided:
        torch.set_num_threads(kind.threads // (kind.num_ranks * kind.num_stages))
        rows.append(
            {
                "weights": weights,
                "kind": kind.name,
                "ms": {what: times[kind.name, what] for what in measures},
                "exchanged": {n: exchanged(engines[kind.name], kind, n) for n in BATCHES},
            }
        )
        print(f"{weights}, {kind.name}: {rows[-1]['exchanged']}", flush=True)
    for engine in engines.values():
        engine.close()
    return rows


def middle(times: list[float]) -> str:
    return f"{statistics.median(times):.2f}"


def made_up(folder: str) -> str:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **EXPERTS, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="folder, GGUF file or built-in model")
    model.add_argument("--experts", action="store_true", help="the made-up model with experts")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = made_up(folder) if args.experts else args.model
        rows = [row for each in FORMATS for row in measured(name, each, kinds(args.experts))]
    if args.out is not None:
        record.write(args.out, __file__, {"rows": rows}, threads=2)


if __name__ == "__main__":
    main()
