"""Prefill of long prompts: seconds and memory of Penstock, OpenVINO GenAI and llama.cpp in turn.

    python -m venv ov && ov/bin/pip install openvino openvino-genai
    python -m venv lc && lc/bin/pip install llama-cpp-python      # compiles for ten minutes
    python -m benchmarks.engine.long_prompt --openvino ov/bin/python --llama-cpp lc/bin/python \
        --prompts 2048 8192 32768 --threads 2 --json out.json

The model is the first layer (--layers) of SmolLM2-135M-Instruct with its embedding and head. All
systems read one GGUF file, in F16 (Penstock, which makes int8 of it) or Q8_0 (the others). One
prompt of random ids, one new token, 512 tokens a step (--chunks: others for Penstock), and a cache
for just these tokens. Each system runs in a process of its own, and a figure is the median of the
rounds. Needs `pip install gguf`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import record
from benchmarks.peers.case import Case, version_of
from benchmarks.peers.convert import write_layers
from penstock.workers.memory.arena import BlockLayout
from penstock.workers.memory.kv_format import kv_format
from penstock.workers.model_config import ModelConfig
from penstock.workers.weights.hub import resolve_model

CHUNK, BLOCK_SIZE = 512, 16
LONGEST = 40_960  # what the made file says of its context
MARGIN = 64  # tokens of room beside the prompt: of the warm-up, and the new one


@dataclass(frozen=True, slots=True)
class Run:
    """A case with some prompt tokens a step."""

    case: Case
    chunk: int

    @property
    def name(self) -> str:
        return self.case.name if self.chunk == CHUNK else f"{self.case.name}, {self.chunk} a step"


def runs(args: argparse.Namespace, plain: Path, rounded: Path) -> list[Run]:
    """All that is compared, the first of which is the base of ratios."""

    def case(system: str, format: str, python: str, file: Path, **settings: Any) -> Case:
        runner = f"run_{system.lower().replace('.', '_')}"
        return Case(system, format, python, runner, str(file), 0.0, 0.0, settings)

    found = []
    if args.openvino:
        # It computes, and caches, in bf16 where the CPU has instructions for it.
        name, kind = "KV fp32", "f32"
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            name, kind = "KV bf16", "bf16"
        found += [case("OpenVINO", "KV u8", args.openvino, rounded, kv="u8"),
                  case("OpenVINO", name, args.openvino, rounded, kv=kind)]  # fmt: skip
    if args.llama_cpp:
        found += [case("llama.cpp", "KV q8_0", args.llama_cpp, rounded, kv="q8_0"),
                  case("llama.cpp", "KV fp16", args.llama_cpp, rounded, kv="F16")]  # fmt: skip
    own = [
        case("Penstock", "KV int8", sys.executable, plain, weights="int8", kv="int8"),
        case("Penstock", "KV bf16", sys.executable, plain, weights="int8"),
    ]
    chunked = [Run(own[0], chunk) for chunk in args.chunks if chunk != CHUNK]
    return [*(Run(each, CHUNK) for each in (*found, *own)), *chunked]


def planned_mib(file: Path, run: Run, room: int) -> float | None:
    """MiB of Penstock's KV blocks, by their layout; None for the other systems."""
    if run.case.system != "Penstock":
        return None
    config = ModelConfig.from_pretrained(file)
    of = kv_format(run.case.settings.get("kv", "auto"), "auto", config.head_dim, torch.bfloat16)
    layout = BlockLayout(
        config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim, of.dtype, of.group
    )
    return -(-room // BLOCK_SIZE) * layout.block_bytes / 2**20


def measured(
    compared: Sequence[Run], length: int, threads: int, rounds: int, plain: Path
) -> list[dict[str, Any]]:
    """A row for each run. `ratio` is to the first one, the median over rounds."""
    ids = random.Random(length).choices(range(100, 40_000), k=length)
    workloads = {"prompt": [{"prompt_ids": ids, "num_new": 1}]}
    room = length + MARGIN
    answers: dict[str, list[dict[str, Any]]] = {run.name: [] for run in compared}
    for number in range(rounds):
        for run in compared if number % 2 else compared[::-1]:
            job = {"threads": threads, "room": room, "chunk": run.chunk, "workloads": workloads}
            answer = run.case.run(job)
            if answer["prompt"]["num"] != 1:
                raise RuntimeError(f"{run.name}: {answer['prompt']['num']} tokens, not 1")
            answers[run.name].append(answer)
            print(length, threads, run.name, round(answer["prompt"]["first_s"], 2), flush=True)
    base = answers[compared[0].name]
    return [
        {
            "run": run.name,
            "tokens": length,
            "threads": threads,
            **_figures(answers[run.name], base),
            "planned_kv_mib": planned_mib(plain, run, room),
        }
        for run in compared
    ]


def _figures(own: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, float]:
    seconds = [each["prompt"]["first_s"] for each in own]
    ratios = [a / each["prompt"]["first_s"] for a, each in zip(seconds, base, strict=True)]
    memory = [each["memory"] for each in own]
    return {
        "seconds": statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "peak_mib": statistics.median(each["peak_mib"] for each in memory),
        "grown_mib": statistics.median(each["peak_mib"] - each["before_mib"] for each in memory),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--openvino", metavar="PYTHON", help="of an environment that has it")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="the same of llama-cpp-python")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--chunks", type=int, nargs="+", default=[CHUNK], help="tokens a step")
    parser.add_argument("--layers", type=int, default=1, help="of the model (default: 1)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if max(args.prompts) + MARGIN > LONGEST:
        parser.error(f"--prompts: at most {LONGEST - MARGIN} tokens")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plain, rounded = Path(folder, "F16.gguf"), Path(folder, "Q8_0.gguf")
        for file in (plain, rounded):
            write_layers(resolve_model("smollm2"), args.layers, LONGEST, file.stem, file)
        compared = runs(args, plain, rounded)
        for length in args.prompts:
            for threads in args.threads:
                rows += measured(compared, length, threads, args.rounds, plain)
    for row in rows:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    if args.json:
        known = (("openvino-genai", args.openvino), ("llama-cpp-python", args.llama_cpp))
        versions = {package: version_of(python, package) for package, python in known if python}
        results = {"layers": args.layers, "rounds": args.rounds, "versions": versions, "rows": rows}
        record.write(args.json, __file__, results, threads=max(args.threads))


if __name__ == "__main__":
    main()
