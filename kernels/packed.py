"""A packed linear taken apart into tensors and plain values, and put together again.

What is taken apart is valid only where packing the same weight would give the same bytes: devices,
and CPUs with different vectors, read different layouts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from penstock.kernels.cpu.matmul import NativeWeight
from penstock.kernels.cpu.matmul_int4 import NativeInt4
from penstock.kernels.types import FLOAT_FORMATS, PackedLinear

BIAS = "bias of the product"  # where the payload has none of its own
_RECORDS: dict[str, Any] = {each.__name__: each for each in (NativeWeight, NativeInt4)}
_DTYPES = {name: dtype for dtype, name in FLOAT_FORMATS.items()}


def tensors_of(packed: PackedLinear) -> dict[str, Tensor]:
    """By the payload's field, or "" where the payload is a tensor itself; and BIAS."""
    if isinstance(packed.payload, Tensor):
        found = {"": packed.payload}
    else:
        fields = (each.name for each in dataclasses.fields(packed.payload))
        values = {name: getattr(packed.payload, name) for name in fields}
        found = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if packed.bias is not None and "bias" not in found:
        found[BIAS] = packed.bias
    return found


def with_tensors(packed: PackedLinear, tensors: dict[str, Tensor]) -> PackedLinear:
    """The same packed linear with other tensors, by the same names."""
    bias = tensors.get(BIAS, tensors.get("bias"))
    if isinstance(packed.payload, Tensor):
        return dataclasses.replace(packed, payload=tensors[""], bias=bias)
    own = {name: tensor for name, tensor in tensors.items() if name != BIAS}
    payload = dataclasses.replace(packed.payload, **own)
    return dataclasses.replace(packed, payload=payload, bias=bias)


def can_be_described(packed: PackedLinear) -> bool:
    """Only the native library's layouts: they have no parts that torch alone can read."""
    return packed.layout == "native"


def described(packed: PackedLinear) -> dict[str, Any]:
    """All but the tensors, as JSON has it."""
    linear = _plain_fields(packed, but=("payload", "bias"))
    bias = None if packed.bias is None else FLOAT_FORMATS[packed.bias.dtype]
    if isinstance(packed.payload, Tensor):
        return {"linear": linear, "bias": bias, "record": None}
    kind = type(packed.payload).__name__
    assert kind in _RECORDS, kind
    tensors = tensors_of(packed)
    record = {"kind": kind, **_plain_fields(packed.payload, but=tuple(tensors))}
    return {"linear": linear, "bias": bias, "record": record}


def from_description(facts: dict[str, Any], tensors: dict[str, Tensor]) -> PackedLinear:
    """The packed linear of which `described` and `tensors_of` returned these.

    Raises KeyError or TypeError where the two do not fit together.
    """
    record, bias = facts["record"], None
    if facts["bias"] is not None:  # the payload's own is wider
        bias = tensors[BIAS if BIAS in tensors else "bias"].to(_DTYPES[facts["bias"]])
    payload: Any = tensors[""] if record is None else None
    if record is not None:
        own = {name: tensor for name, tensor in tensors.items() if name != BIAS}
        plain = {name: value for name, value in record.items() if name != "kind"}
        payload = _RECORDS[record["kind"]](**plain, **own)
    return PackedLinear(payload=payload, bias=bias, **facts["linear"])


def _plain_fields(record: Any, but: tuple[str, ...]) -> dict[str, Any]:
    names = (each.name for each in dataclasses.fields(record))
    return {name: getattr(record, name) for name in names if name not in but}
