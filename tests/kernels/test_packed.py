"""A packed linear that was taken apart and put together again multiplies to the same bits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.matmul import linear, pack_linear
from penstock.kernels.packed import (
    can_be_described,
    described,
    from_description,
    tensors_of,
)
from penstock.kernels.quant import for_plain_rows, quantize_weight
from penstock.kernels.rowwise import hadamard
from penstock.kernels.types import PackedLinear


def again(packed: PackedLinear) -> PackedLinear:
    """By way of JSON and of bytes, as a file has them."""
    facts = json.loads(json.dumps(described(packed)))
    tensors = {
        name: torch.frombuffer(bytearray(each.view(-1).view(torch.uint8).numpy()), dtype=each.dtype)
        .view(each.shape)
        for name, each in tensors_of(packed).items()
    }  # fmt: skip
    return from_description(facts, tensors)


def assert_same(one: PackedLinear, other: PackedLinear, x: torch.Tensor) -> None:
    assert described(one) == described(other) and one.row_form == other.row_form
    assert torch.equal(linear(x, one), linear(x, other))


@given(
    num_rows=st.integers(1, 5),
    num_outputs=st.integers(1, 90),
    blocks=st.integers(1, 3),
    format=st.sampled_from(["int8", "int4", "nf4", "fp8", "plain int4", "fp32", "bf16"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_bias=st.booleans(),
)
def test_every_format_comes_back(
    num_rows: int,
    num_outputs: int,
    blocks: int,
    format: str,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    generator = torch.Generator().manual_seed(num_outputs)
    depth = 64 * blocks
    weight = torch.randn(num_outputs, depth, generator=generator)
    x = torch.randn(num_rows, depth, generator=generator)
    bias = torch.randn(num_outputs, generator=generator) if has_bias else None
    if format in ("fp32", "bf16"):
        plain = {"fp32": torch.float32, "bf16": torch.bfloat16}[format]
        bias = None if bias is None else bias.to(plain)
        packed, x = pack_linear(weight.to(plain), bias), x.to(plain)
    else:
        kind: Any = "int4" if "int4" in format else format
        turned = hadamard if format in ("int8", "int4") else None
        quantized = quantize_weight(weight, kind, 16, hadamard=turned)
        if format == "plain int4":
            quantized = for_plain_rows(quantized)
        bias, x = None if bias is None else bias.to(dtype), x.to(dtype)
        packed = pack_linear(quantized, bias)
    assert can_be_described(packed)
    found = again(packed)
    assert_same(found, packed, x)
    assert (found.bias is None) == (bias is None)
    if bias is not None and found.bias is not None:
        assert found.bias.dtype == bias.dtype and torch.equal(found.bias, bias)


def test_what_torch_alone_can_read_is_not_described() -> None:
    packed = pack_linear(torch.randn(8, 16).half())
    assert not can_be_described(packed)


def test_what_does_not_fit_together_is_an_error() -> None:
    packed = pack_linear(quantize_weight(torch.randn(8, 64), "int8"))
    facts, tensors = described(packed), tensors_of(packed)
    with pytest.raises(KeyError):
        from_description({**facts, "record": {**facts["record"], "kind": "Unknown"}}, tensors)
    with pytest.raises(TypeError):
        from_description(facts, {**tensors, "more": torch.zeros(1)})
