"""The device `here`: what this machine's CPU reaches, measured with the kernels that serve.

Products of one row with weights of the model's size give the rate at which a format is read, those
of many rows the FLOP/s; decoding with the built-in model, beyond what its weights take, gives the
times of a layer and of a row besides. Some seconds in all. plan.py imports this where it is asked
for: it loads torch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import psutil
import torch

from penstock.kernels.attention import decode_attention
from penstock.kernels.matmul import linear, pack_linear
from penstock.kernels.quant import WeightFormat
from penstock.kernels.types import DecodeBatch, PagedKv
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.sizing import total_memory_bytes
from penstock.workers.evaluation.machine import cpu_name
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.planning.hardware import ATTENTION, WEIGHT_FORMATS, Device
from penstock.workers.planning.roofline import Roofline
from penstock.workers.request import Request, SamplingParams
from penstock.workers.weights.sources import planned

ROWS = (16, 256)  # of products that show FLOP/s: of a decode batch, and of a prompt
CONTEXT, BLOCK = 512, 16  # tokens of each sequence, and of a block, where attention is measured
READ_BYTES = 256e6  # of weights that take turns: more than caches hold
SECONDS = 0.3  # of each measurement, at least
FORMATS = ("fp32", "bf16", "int8", "int4")
PROMPT, NEW = 16, 64  # tokens of the built-in model's answer


@torch.inference_mode()
def measured_here(model: ModelConfig, threads: int) -> Device:
    """This machine's CPU with `threads` threads, for weights of the size of `model`.

    A core overlaps reading and computing in part: by products of 1 to 256 rows, root-sum-square
    of the two times is within 17 % of the measured time, their maximum within 28 %.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        flops: dict[str, float] = {}
        reads: dict[str, float] = {}
        for name in FORMATS:
            reads[name], rate = _rates(name, model.intermediate_size, model.hidden_size)
            flops.setdefault(WEIGHT_FORMATS[name].compute, rate)
        flops[ATTENTION] = _attention_rate(model)
        source = f"measured: {cpu_name()}, {threads} threads"
        bandwidth, memory = max(reads.values()), _memory_bytes()
        device = Device("here", flops, bandwidth, memory, source, reads, overlaps=False)
        layer_s, row_s = _besides(device)
        return replace(device, layer_s=layer_s, row_s=row_s)
    finally:
        torch.set_num_threads(before)


def _memory_bytes() -> float:
    """What a new process can have: the cache of files gives way to it."""
    return float(min(psutil.virtual_memory().available, total_memory_bytes()))


def _rates(name: str, columns: int, depth: int) -> tuple[float, float]:
    """Bytes/s of weights [columns, depth] in a format, and FLOP/s of products with them."""
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    format = None if name in ("fp32", "bf16") else cast(WeightFormat, name)
    weight = planned(torch.randn(columns, depth) / depth**0.5, format, dtype)
    num_bytes = columns * depth * WEIGHT_FORMATS[name].bytes
    weights = [pack_linear(weight) for _ in range(math.ceil(READ_BYTES / num_bytes))]

    def product_s(num_rows: int) -> float:
        x = torch.randn(num_rows, depth).to(dtype)
        return _median_s(lambda i: linear(x, weights[i % len(weights)]), len(weights))

    read_s = product_s(1)
    # Beyond the reading, as the roofline joins the two.
    row_s = [math.sqrt(max(product_s(n) ** 2 - read_s**2, 1e-18)) / n for n in ROWS]
    return num_bytes / read_s, 2 * columns * depth / statistics.geometric_mean(row_s)


def _attention_rate(model: ModelConfig) -> float:
    """FLOP/s of attention of a decode batch."""
    num, width = ROWS[0], CONTEXT // BLOCK
    shape = num * width, model.num_kv_heads, BLOCK, model.head_dim
    kv = PagedKv(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16())
    tables = torch.arange(num * width, dtype=torch.int32).view(num, width)
    batch = DecodeBatch(tables, torch.full((num,), CONTEXT, dtype=torch.int32), CONTEXT)
    q = torch.randn(num, model.num_heads, model.head_dim).bfloat16()
    seconds = _median_s(lambda _: decode_attention(q, kv, batch, scale=0.1), 3)
    return 4 * model.num_heads * model.head_dim * num * CONTEXT / seconds


def _median_s(do: Callable[[int], object], num_warm: int) -> float:
    for i in range(num_warm):
        do(i)
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < num_warm:
        began_s = time.perf_counter()
        do(len(times))
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def _besides(device: Device) -> tuple[float, float]:
    """Seconds of a layer, and of a row, beyond the roofline: of the small built-in model."""
    model = load_model("builtin", weights="bf16", device="cpu", progress=False)
    bound = Roofline(model.config, device, weights="bf16")
    beyond = [
        max(0.0, _decode_s(model, n) - bound.decode(n, PROMPT + NEW // 2).seconds)
        for n in (1, ROWS[0])
    ]
    row_s = max(0.0, beyond[1] - beyond[0]) / (ROWS[0] - 1)
    return max(0.0, beyond[0] - row_s) / model.config.num_layers, row_s


def _decode_s(model: Decoder, batch: int) -> float:
    """Seconds of the median step that decodes a whole batch."""
    engine = Engine(EngineConfig(num_blocks=128, max_num_seqs=batch, prefix_cache=False), model)
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    for i in range(batch):
        engine.add(Request(f"plan{i}", tuple(range(5 + i, 5 + i + PROMPT)), params))
    times = []
    while engine.has_work():
        began_s = time.perf_counter()
        num_new = sum(len(delta.token_ids) for delta in engine.step())
        if num_new == batch:
            times.append(time.perf_counter() - began_s)
    engine.close()
    return statistics.median(times[1:])
