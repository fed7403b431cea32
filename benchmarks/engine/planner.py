"""Is `penstock plan --device here` right? Predicted against measured decoding, on this machine.

Measures the machine as the command does, predicts tokens/s of a step's whole batch, and has the
engine decode such batches: models and formats of SHAPES, greedy, prompts of --prompt tokens.

    python -m benchmarks.engine.planner --gguf FILE --out OUT
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import record
from benchmarks.engine.offline import save_random_checkpoint
from penstock.deployments.cli.planning.measure import measured_here
from penstock.workers.config import EngineConfig, WeightFormat
from penstock.workers.engine.engine import Engine
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import load_model
from penstock.workers.planning.hardware import Device
from penstock.workers.planning.roofline import Roofline
from penstock.workers.request import Request, SamplingParams


@dataclass(frozen=True)
class Shape:
    """One decode batch: model "smollm2" or "B" (the shape of Qwen2.5-0.5B, random weights)."""

    model: str
    weights: WeightFormat
    batch: int


SHAPES = (
    Shape("smollm2", "bf16", 1),
    Shape("smollm2", "bf16", 16),
    Shape("smollm2", "int8", 1),
    Shape("B", "bf16", 1),
    Shape("B", "bf16", 8),
    Shape("B", "int8", 1),
    Shape("B", "int4", 1),
    Shape("B", "int8", 16),
)


def decode_ms(engine: Engine, batch: int, prompt: int, num_new: int) -> float:
    """The median step in which all of the batch decode."""
    params = SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True)
    for i in range(batch):
        ids = [5 + (7 * i + 3 * j) % 1000 for j in range(prompt)]
        engine.add(Request(f"r{i}", tuple(ids), params))
    times = []
    while engine.has_work():
        began_s = time.perf_counter()
        deltas = engine.step()
        if sum(len(each.token_ids) for each in deltas) == batch:
            times.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(times[2:])


def measure(shape: Shape, folder: str, device: Device, args: argparse.Namespace) -> dict[str, Any]:
    model = load_model(folder, weights=shape.weights, device="cpu", progress=False)
    config = EngineConfig(
        num_blocks=shape.batch * (args.prompt + args.new) // 16 + 64, max_num_seqs=shape.batch,
        max_num_batched_tokens=512, prefix_cache=False, async_scheduling="off",
    )  # fmt: skip
    engine = Engine(config, model)
    measured = decode_ms(engine, shape.batch, args.prompt, args.new)
    engine.close()
    plan = Roofline(model.config, device, weights=shape.weights)
    predicted = 1e3 * plan.decode(shape.batch, args.prompt + args.new // 2).seconds
    return {
        "model": shape.model,
        "weights": shape.weights,
        "batch": shape.batch,
        "predicted_tokens_per_s": 1e3 * shape.batch / predicted,
        "measured_tokens_per_s": 1e3 * shape.batch / measured,
        "ratio": measured / predicted,
    }


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    text = ["   model weights batch  predicted  measured  ratio  (tokens/s)"]
    for row in rows:
        text.append(
            f"{row['model']:>8} {row['weights']:>7} {row['batch']:>5} "
            f"{row['predicted_tokens_per_s']:>10.1f} {row['measured_tokens_per_s']:>9.1f} "
            f"{row['ratio']:>6.2f}"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, required=True, help="SmolLM2's file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--out", type=Path, help="path without a suffix")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        save_random_checkpoint(Path(folder), torch.bfloat16)
        models = {"smollm2": str(args.gguf), "B": folder}
        devices = {
            name: measured_here(ModelConfig.from_pretrained(Path(path)), args.threads)
            for name, path in models.items()
        }
        rows = [measure(each, models[each.model], devices[each.model], args) for each in SHAPES]
    print("\n".join(lines(rows)))
    if args.out is not None:
        path = args.out.with_name(args.out.name + ".json")
        found = {"devices": {name: asdict(each) for name, each in devices.items()}, "rows": rows}
        record.write(path, __file__, found, threads=args.threads)


if __name__ == "__main__":
    main()
