"""Is it faster to multiply one token with its kept neurons alone, gathered into a small expert?

`moe_mode: sparse` loads only the neurons that a token keeps, but multiplies with the whole expert
and masks the others. Per expert and token, experts taking turns so that weights come from memory:

whole      what sparse does: gate and up of all neurons, a mask, down over all of them.
compact    the kept rows are taken from the expert file, written into a small packed expert, and
           multiplied there: the least that there is to read.
product    of that, the product alone, from cache: what a kernel that gathers as it multiplies
           could not reach.

    python -m benchmarks.experts.compact --out OUT
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.experts.common import finish, parser_of
from penstock.kernels.expert_rows import empty_expert, expert_bytes, neuron_rows, write_neurons
from penstock.kernels.moe import Expert, gated_mlp

CPU = torch.device("cpu")
SHAPES = {"built-in": (256, 352), "Qwen3-30B": (2048, 768), "OLMoE": (2048, 1024)}
POOL_MB = 256  # of experts that take turns: more than caches hold


def made(hidden: int, inner: int, dtype: torch.dtype) -> Expert:
    memory = torch.zeros(expert_bytes(hidden, inner, dtype, CPU), dtype=torch.uint8)
    return empty_expert(hidden, inner, dtype, memory)


def ways(hidden: int, inner: int, keep: float, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Each does the next expert for one token."""
    num_experts = max(2, int(POOL_MB * 1e6 // (3 * hidden * inner * dtype.itemsize)))
    gate, up = (torch.randn(inner, hidden, dtype=dtype) / 16 for _ in "gu")
    rows = neuron_rows(gate, up, torch.randn(hidden, inner, dtype=dtype) / 16)
    all_rows = [rows.clone() for _ in range(num_experts)]
    experts = [made(hidden, inner, dtype) for _ in range(num_experts)]
    for expert, own in zip(experts, all_rows):
        write_neurons(expert, own, torch.arange(inner))
    x = torch.randn(1, hidden, dtype=dtype)
    out, scratch = torch.empty_like(x), torch.empty(1, 2 * inner, dtype=dtype)
    kept = torch.rand(1, inner) < keep
    few = int(kept.sum())
    small, staging = made(hidden, few, dtype), torch.empty(few, 3 * hidden, dtype=dtype)
    dense = torch.arange(few)
    turn = iter(range(10**9))

    def whole() -> Tensor:
        gate_up, down = experts[next(turn) % num_experts]
        return gated_mlp(x, gate_up, down, scratch, out, active=kept)

    def product() -> Tensor:
        return gated_mlp(x, *small, scratch[:, : 2 * few], out)

    def compact() -> Tensor:
        source = all_rows[next(turn) % num_experts].view(torch.uint8).numpy()
        wanted = np.flatnonzero(kept[0].numpy())
        np.take(source, wanted, axis=0, out=staging.view(torch.uint8).numpy(), mode="clip")
        write_neurons(small, staging, dense)
        return product()

    same, turn = whole().clone(), iter(range(10**9))  # from the first expert on again
    torch.testing.assert_close(compact(), same, atol=2e-2, rtol=2e-2)
    return {"whole": whole, "compact": compact, "product": product}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for name, (hidden, inner) in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            for keep in args.keep:
                doing = ways(hidden, inner, keep, dtype)
                times: dict[str, list[float]] = {way: [] for way in doing}
                for _ in range(args.turns):
                    for way, do in doing.items():
                        began_s = time.perf_counter()
                        do()
                        times[way].append(1e6 * (time.perf_counter() - began_s))
                medians = {way: statistics.median(each) for way, each in times.items()}
                facts = {"name": name, "hidden": hidden, "inner": inner, "keep": keep}
                found.append({**facts, "dtype": str(dtype).removeprefix("torch."), **medians})
    return found


def lines(found: dict[str, Any]) -> list[str]:
    text = [
        "Microseconds of one expert for one token, median",
        "",
        f"{'shape':>10} {'hidden':>6} {'neurons':>7} {'dtype':>9} {'keep':>5} {'whole':>8} "
        f"{'compact':>8} {'product':>8}",
    ]
    for row in found["rows"]:
        text.append(
            f"{row['name']:>10} {row['hidden']:>6} {row['inner']:>7} {row['dtype']:>9} "
            f"{row['keep']:>5.2f} {row['whole']:>8.0f} {row['compact']:>8.0f} "
            f"{row['product']:>8.0f}"
        )
    return text


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.1, 0.2, 0.5])
    parser.add_argument("--turns", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        finish(__file__, args, {"rows": measure(args)}, lines)


if __name__ == "__main__":
    main()
