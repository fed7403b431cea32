"""Checks and timings of the MLP over chosen neurons for `check.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.gpu.cases import DEVICE, HALF, Checks, Triples, Work
from penstock.kernels.neurons import FLOATS, dequantize_neurons, quantize_neurons
from penstock.kernels.triton import neurons as neurons_triton

FORMATS = ("plain", "int8", "int4")
NAMES = {dtype: name for name, dtype in FLOATS.items()}


def stored_rows(values: Tensor, format: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, str]:
    """Rows as they lie in a pool, their values in fp32, and the format's name."""
    size = values.shape[1] // 3
    if format == "plain":
        rounded = values.to(dtype)
        return rounded.view(torch.uint8), rounded.float(), NAMES[dtype]
    stored = quantize_neurons(values, format)
    return stored, dequantize_neurons(stored, size, format), format


def check_mlp(format: str, dtype: torch.dtype) -> Triples:
    """Against the same sum in fp64, rows anywhere in the pool."""
    for size, inner in ((64, 20), (200, 90)):
        stored, values, name = stored_rows(torch.randn(inner, 3 * size) / size**0.5, format, dtype)
        order = torch.randperm(inner)
        pool = stored[order].contiguous().to(DEVICE)
        x = torch.randn(3, size).to(DEVICE, dtype)
        chosen = [(torch.rand(inner) < share).nonzero()[:, 0] for share in (0.1, 0.5, 1.0)]
        where = order.argsort()
        places = torch.cat([where[each] for each in chosen]).to(torch.int32)
        counts = [len(each) for each in chosen]
        found = neurons_triton.neuron_mlp(x, pool, name, places, counts, None, torch.empty_like(x))
        want = []
        for state, picked in zip(x.double().cpu(), chosen, strict=True):
            gate, up, down = values[picked].double().split(size, 1)
            want.append((silu(gate @ state) * (up @ state)) @ down)
        yield f"{size} x {inner}", found, torch.stack(want).to(DEVICE, dtype)


CHECKS: Checks = {f"neuron mlp {format}": partial(check_mlp, format) for format in FORMATS}


def works(tiny: bool) -> Iterator[Work]:
    """A fifth of the neurons of one expert of Qwen3-30B-A3B, for one token and for eight."""
    hidden, inner, num_experts = (64, 32, 2) if tiny else (2048, 768, 64)
    for format in FORMATS:
        stored, _, name = stored_rows(torch.randn(inner, 3 * hidden), format, HALF)
        pool = stored.repeat(num_experts, 1).to(DEVICE)
        for num_tokens in (1, 8):
            x = torch.randn(num_tokens, hidden, device=DEVICE).to(HALF)
            kept = torch.arange(0, inner, 5, dtype=torch.int32)
            places = kept.repeat(num_tokens)
            counts, out = [len(kept)] * num_tokens, torch.empty_like(x)
            call = partial(neurons_triton.neuron_mlp, x, pool, name, places, counts, None, out)
            num_bytes = len(kept) * pool.shape[1] + 4 * x.numel()
            flops = 6.0 * num_tokens * len(kept) * hidden
            case = f"{num_tokens} tokens, a fifth of {inner}"
            yield Work(f"neuron mlp {format}", case, call, num_bytes, flops, in_graph=False)
