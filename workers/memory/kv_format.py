"""The number format of the KV cache: the model's dtype, or codes with fp16 scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.workers.config import DEFAULT_KV_GROUP
from penstock.workers.errors import ConfigError

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class KvFormat:
    """`dtype` of K and V; `group` dimensions share an fp16 scale, None: there are no scales."""

    dtype: torch.dtype
    group: int | None = None

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return name if self.group is None else f"{name}, a scale for {self.group}"


def kv_format(kv: str, kv_group: str, head_dim: int, model_dtype: torch.dtype) -> KvFormat:
    """The format for the settings `kv` and `kv_group`. Raises ConfigError if the group does not
    divide the head dimension."""
    if kv == "auto":
        if kv_group != "auto":
            raise ConfigError(
                f"kv_group ({kv_group}) applies only to a quantised KV cache; set kv to int8 or "
                "fp8, or leave kv_group out"
            )
        return KvFormat(model_dtype)
    if kv_group == "head" or (kv_group == "auto" and head_dim % DEFAULT_KV_GROUP):
        return KvFormat(DTYPES[kv], head_dim)
    group = DEFAULT_KV_GROUP if kv_group == "auto" else int(kv_group)
    if head_dim % group:
        fitting = [str(each) for each in (8, 32, 64) if head_dim % each == 0]
        raise ConfigError(
            f"kv_group ({group}) must divide the model's head dimension, which is {head_dim}; set "
            f"it to {', '.join([*fitting, 'head'])}"
        )
    return KvFormat(DTYPES[kv], group)
