"""A model with linear attention, and one with full attention in all layers, beside transformers on
the same random weights: time of a prompt and of a token, by the length before it.

    python -m benchmarks.engine.hybrid --threads 1 --rounds 3

The shape is that of Qwen3.5 with fewer and smaller layers. Programs take turns; medians over the
rounds. transformers computes prompts by its chunk form in PyTorch (without the kernels of
flash-linear-attention, which need a GPU), and tokens one by one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common import record
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 16384,
}  # fmt: skip
KINDS = {"hybrid": "linear_attention", "full attention": "full_attention"}
LENGTHS = (512, 2048)
NEW = 24
SPREAD = 0.02  # of the random weights
Run = Callable[[list[int]], tuple[float, float]]  # a prompt -> seconds to first token, a token


def made(kind: str, folder: Path) -> Path:
    """A checkpoint in which three layers of four are of `kind`."""
    num = SHAPE["num_hidden_layers"]
    types = ["full_attention" if i % 4 == 3 else KINDS[kind] for i in range(num)]
    config = transformers.AutoConfig.for_model("qwen3_5_text", **SHAPE, layer_types=types)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, SPREAD) if weight.dim() > 1 else weight.fill_(0.1 * ("A_" in name))
    model.save_pretrained(folder)
    return folder


def penstock(folder: Path, weights: Any) -> Run:
    model = load_model(str(folder), weights=weights, progress=False)
    longest = max(LENGTHS) + NEW
    config = EngineConfig(
        num_blocks=2 + longest // 16, max_num_seqs=1, max_num_batched_tokens=max(LENGTHS),
        weights=weights, prefix_cache=False,
    )  # fmt: skip
    engine = Engine(config, model)

    def run(prompt: list[int]) -> tuple[float, float]:
        params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        engine.add(Request("r", tuple(prompt), params))
        times = [time.perf_counter()]
        while engine.has_work():
            times += [time.perf_counter() for delta in engine.step() if delta.token_ids]
        return times[1] - times[0], (times[-1] - times[1]) / (NEW - 1)

    return run


def reference(folder: Path, dtype: torch.dtype) -> Run:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def run(prompt: list[int]) -> tuple[float, float]:
        times = [time.perf_counter()]
        out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        for _ in range(NEW):
            best = out.logits[:, -1].argmax(-1, keepdim=True)
            times.append(time.perf_counter())
            out = model(best, past_key_values=out.past_key_values, use_cache=True)
        return times[1] - times[0], (times[-1] - times[1]) / (NEW - 1)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1, help="of each program (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of all programs (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        runs: dict[tuple[str, str], Run] = {}
        for kind in KINDS:
            folder = made(kind, Path(scratch) / kind.replace(" ", "-"))
            runs[kind, "Penstock fp32"] = penstock(folder, "fp32")
            runs[kind, "Penstock int8"] = penstock(folder, "int8")
            runs[kind, "transformers fp32"] = reference(folder, torch.float32)
        for length in LENGTHS:
            prompt = [5 + i * 7919 % 8000 for i in range(length)]
            taken: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in runs}
            for _ in range(args.rounds):
                for key, run in runs.items():
                    taken[key].append(run(prompt))
            for (kind, program), found in taken.items():
                first_s, token_s = (statistics.median(each) for each in zip(*found))
                row = {"kind": kind, "program": program, "prompt": length}
                rows.append(row | {"first_ms": 1e3 * first_s, "token_ms": 1e3 * token_s})
                print(
                    f"{kind:15} {program:18} {length:6} tokens: first token {1e3 * first_s:8.0f} ms"
                    f", then {1e3 * token_s:6.1f} ms a token",
                    flush=True,
                )
    if args.json:
        record.write(Path(args.json), __file__, {"rows": rows}, threads=args.threads)


if __name__ == "__main__":
    main()
