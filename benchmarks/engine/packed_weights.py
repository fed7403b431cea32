"""Loads of a model: without packed weights on the disk, storing them, and reading them.

    python -m benchmarks.engine.packed_weights --json out.json
    python -m benchmarks.engine.packed_weights --model smollm2 --formats auto int8 int4

Each load is a process of its own, the three kinds in turn, with the model's files in the system's
page cache; the figures are medians over the rounds, of the load alone, without imports. Without
--model, a llama of 1.1 billion random parameters in bf16 is made for it, 2.2 GB on the disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import record
from penstock.workers.config import EngineConfig
from penstock.workers.engine.load import compile_operators, load_configured
from penstock.workers.packed.cache import PackedCache
from penstock.workers.weights.hub import resolve_model

KINDS = ("none", "stored", "read")
LAYERS = 22
SHAPE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32000, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def make_model(folder: Path) -> None:
    """TinyLlama's shapes, with random weights."""
    config = LlamaConfig(num_hidden_layers=LAYERS, **SHAPE)
    with torch.device("meta"):
        names = LlamaForCausalLM(config).state_dict()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (0.02 * torch.randn(meta.shape, generator=generator)).to(torch.bfloat16)
        if meta.dim() > 1
        else torch.ones(meta.shape, dtype=torch.bfloat16)
        for name, meta in names.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)


def load_once(model: str, format: str, folder: str) -> None:
    """One load in this process; its figures as JSON."""
    options: dict[str, Any] = {"weights": format, "packed_cache_gb": 100.0 if folder else 0.0}
    config = EngineConfig(model=model, packed_cache_dir=folder or None, **options)
    path = resolve_model(model)
    compile_operators()
    start_s, cpu_s = time.perf_counter(), time.process_time()
    cache = PackedCache.of(config, "cpu")
    decoder = load_configured(config, path, "cpu", progress=False, cache=cache)
    seconds = time.perf_counter() - start_s
    print(json.dumps({
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu_s,
        "peak_mib": status_mib("VmHWM"),
        "rest_mib": status_mib("VmRSS"),
        "weights_mib": decoder.weights.num_bytes / 2**20,
    }))  # fmt: skip


def status_mib(name: str) -> float:
    """Of this process's memory, as the kernel counts it since the program began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def in_a_process(model: str, format: str, folder: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.engine.packed_weights", "--model", model]
    command += ["--load", format, folder]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(model: str, format: str, rounds: int, scratch: Path) -> dict[str, Any]:
    """Medians of each kind, and the ratio of loads that read to those without, of each round."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    in_a_process(model, format, "")  # its files are in memory now
    for number in range(rounds):
        folder = str(scratch / f"{format}-{number}")
        for kind in KINDS:
            found[kind].append(in_a_process(model, format, "" if kind == "none" else folder))
        shutil.rmtree(folder, ignore_errors=True)
    row: dict[str, Any] = {"format": format, "weights_mib": round(found["none"][0]["weights_mib"])}
    for kind in KINDS:
        for figure in ("seconds", "cpu_s", "peak_mib", "rest_mib"):
            values = [each[figure] for each in found[kind]]
            row[f"{kind}_{figure}"] = round(statistics.median(values), 2)
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(found["none"], found["read"])]
    return row | {"ratio": round(statistics.median(ratios), 3)}


def measure_all(model: str, formats: Sequence[str], rounds: int, scratch: Path) -> list[Any]:
    rows = []
    for format in formats:
        rows.append(measure(model, format, rounds, scratch))
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder, GGUF file or smollm2; none: a llama of 1.1 B")
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load", nargs=2, metavar=("FORMAT", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load is not None:
        load_once(args.model, *args.load)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.model is None:
            make_model(folder)
        model = str(folder) if args.model is None else args.model
        rows = measure_all(model, args.formats, args.rounds, folder / "packed")
    name = args.model or "llama of 1.1 B random parameters, bf16"
    if args.json:
        results = {"model": name, "rounds": args.rounds, "rows": rows}
        record.write(args.json, __file__, results, threads=torch.get_num_threads())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
