"""Is it faster to multiply one token with the neurons that it keeps, wherever their rows lie?

Per expert and token, experts taking turns so that weights come from memory:

whole      all neurons of a packed expert: what moe_mode exact does.
rows       the kept neurons alone, from rows in a pool, as moe_mode sparse does: of the dtype that
           is computed in, and of copies in int8 and int4.

    python -m benchmarks.experts.compact --out OUT
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.experts.common import finish, parser_of
from penstock.kernels.moe.mlp import Expert, gated_mlp
from penstock.kernels.moe.rows import empty_expert, expert_bytes, neuron_rows, write_neurons
from penstock.kernels.neurons import FLOATS, PooledNeurons, neuron_mlp, quantize_neurons

CPU = torch.device("cpu")
SHAPES = {"built-in": (256, 352), "Qwen3-30B": (2048, 768), "OLMoE": (2048, 1024)}
POOL_MB = 256  # of experts that take turns: more than caches hold
COPIES = ("int8", "int4")


def made(rows: Tensor) -> Expert:
    """A packed expert of these neurons."""
    inner, hidden = rows.shape[0], rows.shape[1] // 3
    memory = torch.zeros(expert_bytes(hidden, inner, rows.dtype, CPU), dtype=torch.uint8)
    expert = empty_expert(hidden, inner, rows.dtype, memory)
    write_neurons(expert, rows, torch.arange(inner))
    return expert


def ways(hidden: int, inner: int, keep: float, dtype: str) -> dict[str, Callable[[], Any]]:
    """Each does the next expert for one token."""
    size = 3 * hidden * inner * FLOATS[dtype].itemsize
    num_experts = max(2, int(POOL_MB * 1e6 // size))
    gate, up = (torch.randn(inner, hidden) / 16 for _ in "gu")
    rows = neuron_rows(gate, up, torch.randn(hidden, inner) / 16).to(FLOATS[dtype])
    stored = {dtype: rows.view(torch.uint8)}
    stored |= {copies: quantize_neurons(rows, copies) for copies in COPIES}
    pools = {format: each.repeat(num_experts, 1) for format, each in stored.items()}
    experts = [made(rows) for _ in range(num_experts)]
    x = torch.randn(1, hidden).to(FLOATS[dtype])
    out, scratch = torch.empty_like(x), x.new_empty(1, 2 * inner)
    kept = (torch.rand(inner) < keep).nonzero()[:, 0].to(torch.int32)
    turn = iter(range(10**9))

    def whole() -> Tensor:
        return gated_mlp(x, *experts[next(turn) % num_experts], scratch, out)

    def chosen(format: str) -> Callable[[], Tensor]:
        def do() -> Tensor:
            places = kept + next(turn) % num_experts * inner
            return neuron_mlp(x, PooledNeurons(pools[format], format, places, [len(kept)]), out)

        return do

    return {"whole": whole, "rows": chosen(dtype), **{copies: chosen(copies) for copies in COPIES}}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for name, (hidden, inner) in SHAPES.items():
        for dtype in ("fp32", "bf16"):
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
                found.append({**facts, "dtype": dtype, **medians})
    return found


def lines(found: dict[str, Any]) -> list[str]:
    text = [
        "Microseconds of one expert for one token, median",
        "",
        f"{'shape':>10} {'hidden':>6} {'neurons':>7} {'dtype':>5} {'keep':>5} {'whole':>8} "
        f"{'rows':>8} {'int8':>8} {'int4':>8}",
    ]
    for row in found["rows"]:
        text.append(
            f"{row['name']:>10} {row['hidden']:>6} {row['inner']:>7} {row['dtype']:>5} "
            f"{row['keep']:>5.2f} {row['whole']:>8.0f} {row['rows']:>8.0f} {row['int8']:>8.0f} "
            f"{row['int4']:>8.0f}"
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
