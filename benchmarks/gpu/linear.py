"""Checks and timings of quantised linears and quantised rows for check.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import torch

from benchmarks.gpu.cases import DEVICE, HALF, Checks, Triples, Unit, Work
from penstock.kernels import quant
from penstock.kernels.quant import QuantizedWeight, WeightFormat
from penstock.kernels.triton import matmul as matmul_triton
from penstock.kernels.triton import rowwise as rowwise_triton
from penstock.kernels.triton import rowwise_quant as rowwise_quant_triton
from penstock.kernels.triton.matmul import GpuWeight

# int4: as files have it; int4_steps: as it is rounded at load, which multiplies int8 rows.
CodedFormat = WeightFormat | Literal["int4_steps"]
GpuFormat = CodedFormat | Literal["plain"]
FORMATS: tuple[CodedFormat, ...] = (*get_args(WeightFormat), "int4_steps")
WITH_PLAIN: tuple[GpuFormat, ...] = ("plain", *FORMATS)
# The units that multiply; others than these multiply 16-bit numbers.
UNITS: dict[str, Unit] = {"int8": "int8", "int4_steps": "int8", "fp8": "fp8"}
GROUPS = {"int4": quant.INT4_GROUP, "nf4": quant.NF4_GROUP}
# outputs x inputs
ODD = [(70, 200), (33, 129), (5, 30), (300, 384)]
LARGE = [(4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096)]


def on_cpu(weight: QuantizedWeight) -> QuantizedWeight:
    names = ("codes", "scales", "zeros", "steps", "offsets")
    parts = {name: part.cpu() for name in names if (part := getattr(weight, name)) is not None}
    return replace(weight, **parts)


def random_weight(format: CodedFormat, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    """Codes drawn as they are: a large weight in fp32 would not fit next to the others."""
    scale = num_inputs**-0.5
    if format == "int4_steps":
        return _random_steps(torch.rand(num_outputs, device=DEVICE) * scale / 64, num_inputs)
    if format in GROUPS:
        group = GROUPS[format]
        shape = (num_outputs, -(-num_inputs // 2))
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
        scales = torch.rand(num_outputs, -(-num_inputs // group), device=DEVICE) * scale / 4
        return QuantizedWeight(format, codes, scales, num_inputs, group)
    codes = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8, device=DEVICE)
    scales = torch.rand(num_outputs, device=DEVICE) * scale / 64
    if format == "fp8":
        codes = (codes.to(HALF) * 3).to(torch.float8_e4m3fn)
        scales /= 3
    rows_of = quant.INT8_GROUP if format == "int8" else None
    return QuantizedWeight(format, codes, scales, num_inputs, rows_of)


def _random_steps(scales: torch.Tensor, num_inputs: int) -> QuantizedWeight:
    group, num_outputs = quant.INT4_STEP_GROUP, len(scales)
    shape = (num_outputs, -(-num_inputs // 2))
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    steps = torch.randint(1, 18, (num_outputs, -(-num_inputs // group)), device=DEVICE)
    spare = 255 - 15 * steps  # of int8's range
    offsets = (torch.rand(steps.shape, device=DEVICE) * (spare + 1)).long().clamp(max=spare) - 128
    return QuantizedWeight(
        "int4", codes, scales, num_inputs, group, steps=steps.to(torch.uint8),
        offsets=offsets.to(torch.int8),
    )  # fmt: skip


def check_linear(format: CodedFormat, dtype: torch.dtype) -> Triples:
    for rows in (1, 3, 17, 64, 257):
        for num_outputs, num_inputs in ODD:
            weight = random_weight(format, num_outputs, num_inputs)
            bias = torch.randn(num_outputs, device=DEVICE).to(dtype)
            wide = torch.full((rows, num_inputs + 8), float("nan"), device=DEVICE).to(dtype)
            x = wide[:, :num_inputs].copy_(torch.randn(rows, num_inputs))
            packed = matmul_triton.pack(weight, bias)
            y = matmul_triton.linear(x, packed)
            want = quant.linear_reference(
                x.cpu(), on_cpu(weight), bias.cpu(), weight_only=not packed.takes_int8
            )
            yield f"{format} {rows} x {num_inputs} x {num_outputs}", y, want.to(DEVICE)


def check_plain(dtype: torch.dtype) -> Triples:
    for rows in (1, 17, 257):
        for num_outputs, num_inputs in ODD:
            weight = (torch.randn(num_outputs, num_inputs) * num_inputs**-0.5).to(DEVICE, dtype)
            x, bias = torch.randn(rows, num_inputs), torch.randn(num_outputs)
            x, bias = x.to(DEVICE, dtype), bias.to(DEVICE, dtype)
            y = matmul_triton.linear(x, matmul_triton.pack_plain(weight, bias))
            want = (x.double() @ weight.double().T + bias.double()).to(dtype)
            yield f"plain {rows} x {num_inputs} x {num_outputs}", y, want


def check_rows(dtype: torch.dtype) -> Triples:
    """Exact: expected and actual codes are 0 and the number of differences."""
    none = torch.zeros(1, device=DEVICE)
    for rows, dim in ((3, 63), (33, 500), (2, 4096)):
        x, residual = torch.randn(2, rows, dim).to(DEVICE, dtype)
        weight = torch.randn(dim).to(DEVICE, dtype)
        codes = torch.empty(rows, dim, dtype=torch.int8, device=DEVICE)
        scales = torch.empty(rows, 1, device=DEVICE)
        rowwise_quant_triton.quantize_rows(x, codes, scales)
        want = quant.quantize_rows_int8(x.cpu())
        yield f"int8 rows {rows} x {dim}", (codes.cpu() != want[0]).sum().to(DEVICE), none
        group = quant.INT8_GROUP
        by_group = torch.empty(rows, quant.num_groups(dim, group), device=DEVICE)
        rowwise_quant_triton.quantize_rows(x, codes, by_group, group)
        want = quant.quantize_rows_int8(x.cpu(), group)
        yield f"int8 {rows} x {dim}", (codes.cpu() != want[0]).sum().to(DEVICE), none
        rowwise_quant_triton.quantize_rows(x, codes, by_group, group, hadamard=True)
        want = quant.quantize_rows_int8(x.cpu(), group, hadamard=True)
        yield f"transformed {rows} x {dim}", (codes.cpu() != want[0]).sum().to(DEVICE), none
        bits = codes.view(torch.uint8)
        rowwise_quant_triton.quantize_rows(x, bits, scales)
        want = quant.quantize_rows_fp8(x.cpu())
        yield f"fp8 {rows} x {dim}", (bits.cpu() != want[0].view(torch.uint8)).sum(), none.cpu()
        y, _ = rowwise_triton.rms_norm(x, weight, 1e-5, residual, torch.empty_like(x))
        made = quant.Int8Rows(codes, by_group, group, dtype)
        total = torch.empty_like(x)
        rowwise_quant_triton.rms_norm_int8(x, weight, 1e-5, residual, made, total)
        want = quant.quantize_rows_int8(y.cpu(), group)
        yield f"norm {rows} x {dim}", (codes.cpu() != want[0]).sum().to(DEVICE), none


def random_packed(
    format: GpuFormat, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> GpuWeight:
    if format == "plain":
        weight = torch.randn(num_outputs, num_inputs, device=DEVICE) * num_inputs**-0.5
        return matmul_triton.pack_plain(weight.to(dtype))
    return matmul_triton.pack(random_weight(format, num_outputs, num_inputs))


CHECKS: Checks = {
    **{f"linear {format}": partial(check_linear, format) for format in FORMATS},
    "plain linear": check_plain,
    "quantised rows": check_rows,
}


def works(tiny: bool) -> Iterator[Work]:
    """Linears of 7-8B models, next to cuBLAS in 16 bits; then the rows they take."""
    shrink, batches = (64, (1, 3)) if tiny else (1, (1, 16, 64, 256))
    for num_outputs, num_inputs in LARGE:
        num_outputs, num_inputs = num_outputs // shrink, num_inputs // shrink
        for format in WITH_PLAIN:
            weight = random_packed(format, num_outputs, num_inputs, HALF)
            for rows in batches:
                yield _linear_work(weight, rows)
                if format == "plain":
                    yield _linear_work(weight, rows, cublas=True)
    for rows in batches:
        yield _norm_work(rows, 4096 // shrink)


def _linear_work(weight: GpuWeight, rows: int, *, cublas: bool = False) -> Work:
    x = torch.randn(rows, weight.in_features, device=DEVICE).to(HALF)
    out = torch.empty(rows, weight.out_features, device=DEVICE, dtype=HALF)
    name, run = f"linear {weight.format}", lambda: matmul_triton.linear(x, weight, out)
    if cublas:
        name, run = "linear 16 bit cuBLAS", lambda: torch.mm(x, weight.codes.T, out=out)
    return Work(
        name,
        f"{rows} x {weight.in_features} x {weight.out_features}",
        run,
        weight.num_bytes + 2 * (x.numel() + out.numel()),
        2 * rows * weight.in_features * weight.out_features,
        UNITS.get(weight.format, "bf16"),
    )


def _norm_work(rows: int, hidden: int) -> Work:
    x, residual = torch.randn(2, rows, hidden, device=DEVICE).to(HALF)
    weight = torch.ones(hidden, device=DEVICE, dtype=HALF)
    codes = torch.empty(rows, hidden, dtype=torch.int8, device=DEVICE)
    scales = torch.empty(rows, quant.num_groups(hidden, quant.INT8_GROUP), device=DEVICE)
    made = quant.Int8Rows(codes, scales, quant.INT8_GROUP, HALF)
    return Work(
        "norm + residual + int8",
        f"{rows} x {hidden}",
        lambda: rowwise_quant_triton.rms_norm_int8(x, weight, 1e-5, residual, made, residual),
        (3 * 2 + 1) * x.numel(),
    )
