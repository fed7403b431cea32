"""Decode of a Llama-3-8B-shaped random model: our engine against transformers' `generate`.

    python -m benchmarks.gpu.decode [--weights bf16 int8] [--kv auto] [--batch 32] [--tiny]

One process, one device, shapes alike and weights random (each side draws its own), bf16, greedy,
ends of sequence ignored. Prompts are all as long as each other, so that transformers pads nothing.
Both are timed twice: until every request has its first token, and to the last; the rate of decode
is that of the tokens between. Our engine runs in four ways: plain, with decode graphs, with steps
launched ahead, and with both; below each, the host's milliseconds of a step by phase, and how many
answers are those of the first way: all, as a row's sums do not depend on its batch. `--tiny` takes
a shape for any CPU, to show that the program works, without graphs: its figures say nothing about
a GPU. Needs no Ray.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import transformers

from benchmarks.common import record
from penstock.workers.config import EngineConfig, KvFormat, WeightFormat
from penstock.workers.engine.engine import Engine
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import build_random
from penstock.workers.option_groups.batching import Switch
from penstock.workers.request import Request, SamplingParams

Prompts = Sequence[Sequence[int]]
Answers = dict[str, list[int]]
# cuda_graphs, async_scheduling
WAYS: dict[str, tuple[Switch, Switch]] = {
    "plain": ("off", "off"),
    "graphs": ("on", "off"),
    "ahead": ("off", "on"),
    "both": ("on", "on"),
}


@dataclass(frozen=True)
class Figures:
    """Of one engine, medians of its runs."""

    name: str
    first_s: float  # until all have their first token
    total_s: float
    num_sequences: int
    num_new: int
    phases_ms: dict[str, float] = field(default_factory=dict)  # of a step, host time
    num_same: int = 0  # answers that are those of the first way

    @property
    def decode_tokens_per_s(self) -> float:
        return self.num_sequences * (self.num_new - 1) / (self.total_s - self.first_s)


def shape_of(tiny: bool) -> transformers.LlamaConfig:
    heads, hidden, inner, layers, vocab = (
        (8, 128, 448, 2, 1024) if tiny else (32, 4096, 14336, 32, 128256)
    )
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        vocab_size=vocab,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        eos_token_id=None,
        bos_token_id=None,
        dtype="bfloat16",  # else all but quantised weights would be fp32
    )


def time_transformers(
    shape: transformers.LlamaConfig, device: str, prompts: Prompts, num_new: int, runs: int
) -> Figures:
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts, device=device)

    def seconds(count: int) -> float:
        wait(device)
        start = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                min_new_tokens=count, max_new_tokens=count,
            )  # fmt: skip
        wait(device)
        assert made.shape[1] == ids.shape[1] + count
        return time.perf_counter() - start

    seconds(3)  # warm-up
    first, total = (statistics.median(seconds(n) for _ in range(runs)) for n in (1, num_new))
    return Figures("transformers bf16", first, total, len(prompts), num_new)


def engine_figures(
    shape: transformers.LlamaConfig, device: str, prompts: Prompts, num_new: int, runs: int,
    weights: WeightFormat, kv: KvFormat, ways: Sequence[str], profile: bool,
) -> Iterator[Figures]:  # fmt: skip
    """Of `ways` to run it, on one set of weights."""
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        facts = ModelConfig.from_pretrained(Path(folder))
    model = build_random(facts, weights, device=device)
    assert model.dtype == torch.bfloat16, model.dtype
    first: Answers = {}
    for way in ways:
        cuda_graphs, async_scheduling = WAYS[way]
        if device == "cpu" and cuda_graphs == "on":
            continue
        config = EngineConfig(
            weights=weights,
            max_num_seqs=len(prompts),
            max_model_len=len(prompts[0]) + num_new,
            prefix_cache=False,
            cuda_graphs=cuda_graphs,
            async_scheduling=async_scheduling,
            kv=kv,
            kv_cache_gb=None if device == "cuda" else 0.25,
        )
        figures, answers = time_engine(Engine(config, model), prompts, num_new, runs, profile)
        first = first or answers
        same = sum(first[name] == ids for name, ids in answers.items())
        yield replace(figures, name=f"{weights}, kv {kv}, {way}", num_same=same)
        gc.collect()  # the arena goes before the next one comes
        if device == "cuda":
            torch.cuda.empty_cache()


def print_kernels(engine: Engine, prompts: Prompts, num_new: int) -> None:
    """Where the device's time goes in answers of `num_new` tokens, prompts included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        _drain(engine, prompts, num_new)
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=60))


def time_engine(
    engine: Engine, prompts: Prompts, num_new: int, runs: int, profile: bool
) -> tuple[Figures, Answers]:
    _drain(engine, prompts, 3)  # warm-up: kernels are compiled here
    if profile:
        print_kernels(engine, prompts, min(16, num_new))
    before, timed, answers = engine.stats(), [], Answers()
    for _ in range(runs):
        *seconds, answers = _drain(engine, prompts, num_new)
        timed.append(seconds)
    after = engine.stats()
    engine.close()
    num_steps = after.num_steps - before.num_steps
    phases_ms = {
        phase: 1e3 * (total - before.step_seconds[phase]) / num_steps
        for phase, total in after.step_seconds.items()
    }
    first, total = (statistics.median(each) for each in zip(*timed, strict=True))
    return Figures("", first, total, len(prompts), num_new, phases_ms), answers


def _drain(engine: Engine, prompts: Prompts, num_new: int) -> tuple[float, float, Answers]:
    """Seconds to the last request's first token, and to the end; and the answers."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    start, first_s, answers = time.perf_counter(), 0.0, Answers()
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"r{i}", tuple(prompt), params))
    while engine.has_work():
        for delta in engine.step():
            answers.setdefault(delta.request_id, []).extend(delta.token_ids)
        if len(answers) == len(prompts) and not first_s:
            first_s = time.perf_counter() - start
    assert all(len(ids) == num_new for ids in answers.values()), "a request ended early"
    return first_s, time.perf_counter() - start, answers


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", nargs="+", default=["bf16", "int8"])
    parser.add_argument("--kv", default="auto", help="number format of the KV cache")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--no-transformers", action="store_true", help="ratios to the first engine")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--new", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--profile", action="store_true", help="print each engine's kernels by time"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, metavar="PATH")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not given.tiny:
        parser.error(
            "no CUDA card here: an 8B model is not for this CPU. --tiny shows that it works"
        )
    transformers.logging.set_verbosity_error()
    shape, rng = shape_of(given.tiny), random.Random(0)
    prompts = [
        [rng.randrange(shape.vocab_size) for _ in range(given.prompt)] for _ in range(given.batch)
    ]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU (nothing is claimed)"
    print(
        f"{name}: batch {given.batch}, {given.prompt} + {given.new} tokens, median of {given.runs}"
    )
    print(f"{'':<26}{'first s':>9}{'total s':>9}{'decode tok/s':>14}{'ratio':>8}{'ms a step':>11}")
    found: list[Figures] = []
    if not given.no_transformers:
        found.append(time_transformers(shape, device, prompts, given.new, given.runs))
        show(found[0], found[0])
    for weights in given.weights:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        for figures in engine_figures(
            shape,
            device,
            prompts,
            given.new,
            given.runs,
            weights,
            given.kv,
            given.ways,
            given.profile,
        ):
            found.append(figures)
            show(figures, found[0])
    if given.json:
        rows = [
            asdict(f)
            | {"decode_tokens_per_s": f.decode_tokens_per_s}
            | {"batch_ms": 1e3 * f.num_sequences / f.decode_tokens_per_s}
            for f in found
        ]
        size = {"batch": given.batch, "prompt": given.prompt, "new": given.new}
        record.write(given.json, __file__, {"device": name, **size, "engines": rows})


def show(figures: Figures, base: Figures) -> None:
    rate = figures.decode_tokens_per_s
    print(
        f"{figures.name:<26}{figures.first_s:>9.3f}{figures.total_s:>9.3f}{rate:>14.1f}"
        f"{rate / base.decode_tokens_per_s:>8.2f}{1e3 * figures.num_sequences / rate:>11.2f}",
        flush=True,
    )
    if figures.phases_ms:
        phases = ", ".join(f"{name} {ms:.2f}" for name, ms in figures.phases_ms.items())
        print(
            f"  {phases}; {figures.num_same} of {figures.num_sequences} answers as the first way's"
        )


if __name__ == "__main__":
    main()
