"""One way to serve a model that is judged: formats of weights and KV cache, and a context policy.

Plain values under the names of the settings of `penstock serve`. No torch.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from penstock.workers.config import (
    EngineConfig,
    Int4Activations,
    Int4Group,
    Int8Group,
    KvFormat,
    KvGroup,
    WeightFormat,
)
from penstock.workers.errors import ConfigError

_WINDOW = re.compile(r"(\d+)\+(\d+)(?:/(\d+))?")
FULL = "full"


@dataclass(frozen=True, slots=True)
class ContextChoice:
    """A context policy: full, or a sink window of `sinks` + `window` tokens that moves on by `roll`
    at once; roll None: as the server does."""

    sinks: int | None = None  # None: full
    window: int | None = None
    roll: int | None = None

    @classmethod
    def parse(cls, text: str) -> ContextChoice:
        """`full`, `SINKS+WINDOW` or `SINKS+WINDOW/ROLL`. Raises ConfigError."""
        if text == FULL:
            return cls()
        found = _WINDOW.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"a context policy is full, or a sink window as SINKS+WINDOW or "
                f"SINKS+WINDOW/ROLL in tokens, such as 4+508/128; got {text!r}"
            )
        sinks, window, roll = (None if each is None else int(each) for each in found.groups())
        return cls(sinks, window, roll)

    @property
    def request(self) -> dict[str, Any]:
        """The fields of SamplingParams that ask for it."""
        if self.sinks is None:
            return {"context_policy": "full"}
        asked = {"sinks": self.sinks, "window": self.window, "roll": self.roll}
        return {"context_policy": "sink_window", **asked}

    def __str__(self) -> str:
        if self.sinks is None:
            return FULL
        roll = "" if self.roll is None else f"/{self.roll}"
        return f"{self.sinks}+{self.window}{roll}"


@dataclass(frozen=True, slots=True)
class Combination:
    """Settings of the same names, `activations`: the dtype of what is not quantised (auto: as the
    server does, the checkpoint's unless weights is fp32 or bf16), and a context policy."""

    weights: WeightFormat = "auto"
    int8_group: Int8Group = "64"
    int4_group: Int4Group = "16"
    int4_wide_layers: bool = True
    int4_activations: Int4Activations = "auto"
    quantize_o: bool = True
    quantize_lm_head: bool = False
    activations: str = "auto"
    kv: KvFormat = "auto"
    kv_group: KvGroup = "auto"
    context: ContextChoice = ContextChoice()

    @property
    def model_key(self) -> tuple[Any, ...]:
        """Equal for combinations that have the same model in memory."""
        group = self.int8_group if self.weights in ("auto", "int8") else None
        return (
            *(self.weights, group, self.int4_group, self.int4_wide_layers, self.int4_activations),
            *(self.quantize_o, self.quantize_lm_head),
            self.activations,
        )

    def config(self, base: EngineConfig) -> EngineConfig:
        """`base` with the number formats of this combination. Raises ConfigError."""
        names = (
            *("weights", "int8_group", "int4_group", "int4_wide_layers", "int4_activations"),
            *("quantize_o", "quantize_lm_head", "kv", "kv_group"),
        )
        return dataclasses.replace(base, **{name: getattr(self, name) for name in names})

    @property
    def weights_name(self) -> str:
        """The weights as a row of a table names them: what differs from the defaults."""
        parts: list[str] = [self.weights]
        if self.weights == "int8" and self.int8_group != Combination().int8_group:
            parts.append(f"group {self.int8_group}")
        if self.weights == "int4" and self.int4_group != Combination().int4_group:
            parts.append(f"group {self.int4_group}")
        if self.weights == "int4" and not self.int4_wide_layers:
            parts.append("no wide layers")
        if self.int4_activations != Combination().int4_activations:
            parts.append(f"int4 activations {self.int4_activations}")
        parts += ["o_proj plain"] * (not self.quantize_o)
        parts += ["head too"] * self.quantize_lm_head
        if self.activations != "auto":
            parts.append(f"activations {self.activations}")
        return ", ".join(parts)

    @property
    def kv_name(self) -> str:
        return self.kv if self.kv_group == "auto" else f"{self.kv}, group {self.kv_group}"

    def __str__(self) -> str:
        return f"weights {self.weights_name}; KV {self.kv_name}; context {self.context}"
