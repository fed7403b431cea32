"""Tables for the roofline: peak figures of devices, and the bytes of a number in each format.

Vendors' dense figures (many pages print the sparse ones, which are twice as high). None of them was
measured here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.workers.errors import ConfigError, InvariantError


@dataclass(frozen=True, slots=True)
class WeightCost:
    """The bytes of a linear layer's weights, and the format in which its products are computed.

    As in `kernels/quant.py`: all scales are fp32. `bytes` includes the scales of groups.
    """

    bytes: float  # per weight
    compute: str  # a key of Device.flops
    other_bytes: int = 2  # per weight of norms, biases and routers, which are never quantised
    row_bytes: int = 0  # per output channel: its scale


@dataclass(frozen=True, slots=True)
class KvCost:
    """The bytes of a number in K and V; `has_scales`: one fp16 scale for each group of a head."""

    bytes: int
    has_scales: bool = False


WEIGHT_FORMATS = {
    "fp32": WeightCost(4, "fp32", 4),
    "bf16": WeightCost(2, "bf16"),
    "int8": WeightCost(1, "int8", row_bytes=4),  # W8A8
    "fp8": WeightCost(1, "fp8", row_bytes=4),
    "int4": WeightCost(0.5 + 2 / 16, "int8", row_bytes=4),  # a step and an offset for 16
    "nf4": WeightCost(0.5 + 4 / 64, "bf16"),  # weight-only, a scale for 64
    "int8g": WeightCost(1 + 4 / 32, "bf16"),  # weight-only, a scale for 32: of GGUF files
    "fp8g": WeightCost(1 + 4 / 128, "bf16"),  # weight-only, a scale for 128
    "mxfp4": WeightCost(0.5 + 4 / 32, "bf16"),  # weight-only, a scale for 32
}
ATTENTION = "attention"  # a key of Device.flops
KV_FORMATS = {
    "fp32": KvCost(4),
    "bf16": KvCost(2),
    "fp8": KvCost(1, has_scales=True),
    "int8": KvCost(1, has_scales=True),
}


@dataclass(frozen=True, slots=True)
class Device:
    """The figures of one device: FLOP/s by format of the operands, bytes/s, bytes.

    A format that `flops` lacks is computed in the next wider format that it has. A measured device
    may have more: the rate of ATTENTION among `flops`; `reads`, bytes/s at which a product with one
    row reads weights in a format; `layer_s` and `row_s`, what a layer and a
    row of a step take besides; and not `overlaps`, if
    reading and computing hide behind one another in part only.
    """

    name: str
    flops: dict[str, float]
    bandwidth: float
    memory_bytes: float
    source: str
    reads: dict[str, float] = field(default_factory=dict)
    layer_s: float = 0.0
    row_s: float = 0.0
    overlaps: bool = True

    def __post_init__(self) -> None:
        for name in ("bandwidth", "memory_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"{self.name}: {name} must be positive; got {getattr(self, name)}"
                )
        if "fp32" not in self.flops or min(self.flops.values()) <= 0:
            raise ConfigError(f"{self.name}: flops needs positive figures, and one for fp32")

    def peak(self, compute: str) -> float:
        """FLOP/s on operands in the format `compute`."""
        for name in (compute, "bf16", "fp32"):
            if name in self.flops:
                return self.flops[name]
        raise InvariantError(f"{self.name} has no fp32")

    def read(self, weights: str) -> float:
        """Bytes/s at which weights in a format are read."""
        return self.reads.get(weights, self.bandwidth)

    def at(self, compute_share: float, bandwidth_share: float) -> Device:
        """The same device, reaching only these shares of its peaks."""
        for name, share in (("compute", compute_share), ("bandwidth", bandwidth_share)):
            if not 0 < share <= 1:
                raise ConfigError(f"share of peak {name} must be in (0, 1]; got {share}")
        flops = {name: peak * compute_share for name, peak in self.flops.items()}
        reads = {name: rate * bandwidth_share for name, rate in self.reads.items()}
        return replace(self, flops=flops, bandwidth=self.bandwidth * bandwidth_share, reads=reads)


def _flops(fp32: float, bf16: float, int8: float, fp8: float | None = None) -> dict[str, float]:
    peaks = {"fp32": fp32, "bf16": bf16, "int8": int8} | ({"fp8": fp8} if fp8 else {})
    return {name: tera * 1e12 for name, tera in peaks.items()}


DEVICES = {
    "H200": Device("H200", _flops(67, 989, 1979, 1979), 4.8e12, 141e9, "NVIDIA H200 SXM"),
    "H100": Device("H100", _flops(67, 989, 1979, 1979), 3.35e12, 80e9, "NVIDIA H100 SXM"),
    "A100": Device("A100", _flops(19.5, 312, 624), 2.039e12, 80e9, "NVIDIA A100-80G SXM"),
    "L4": Device("L4", _flops(30.3, 121, 242, 242), 300e9, 24e9, "NVIDIA L4"),
    "4090": Device(
        "4090", _flops(82.6, 165.2, 660.6, 330.3), 1008e9, 24e9, "NVIDIA RTX 4090, fp32 sums"
    ),
    # One server socket without bf16, VNNI or AMX instructions: every format is computed in fp32.
    "cpu": Device("cpu", {"fp32": 1e12}, 80e9, 64e9, "assumed: 1 TFLOP/s fp32, 80 GB/s, 64 GB"),
}


def device_named(name: str, others: Sequence[str] = ()) -> Device:
    """The device of that name. Raises ConfigError, with the nearest name, if it is unknown.

    `others`: names that the caller knows besides, for that message.
    """
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    names = [*DEVICES, *others]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown device {name!r}{hint} (known: {', '.join(names)})")


def device_like(card: str) -> Device:
    """The device of a card's own name, as "NVIDIA A100-SXM4-80GB"; of an unknown card the one with
    the fewest FLOPs for each byte, which promises least."""
    words = re.split(r"[^a-z0-9]+", card.lower())  # the L40S is no L4
    known = [device for name, device in DEVICES.items() if name.lower() in words]
    cards = [device for name, device in DEVICES.items() if name != "cpu"]
    return known[0] if known else min(cards, key=lambda each: each.peak("bf16") / each.bandwidth)
