"""The memory of recurrent states, for models with linear attention: how many slots, and where.

What such a model cannot have yet is refused here, by name, before memory is taken.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from penstock.kernels.delta_types import DeltaState
from penstock.workers.config import EngineConfig
from penstock.workers.engine.sizing import cache_budget
from penstock.workers.errors import ConfigError, InvariantError
from penstock.workers.memory.state_slots import StateLayout
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder

log = logging.getLogger("penstock.engine")

LEAST_SNAPSHOTS = 64  # by default, and as many as sequences, where memory allows
STATE_FRACTION = 0.5  # of the memory for the KV cache, at most


@dataclass(frozen=True, slots=True, eq=False)
class StateMemory:
    """`layers`: the states of each layer with linear attention, in its slots: of those that this
    process has, maybe none. `bytes_of_parts`: of each of the model's parts."""

    num_slots: int
    num_bytes: int
    bytes_of_parts: tuple[int, ...]
    layers: list[DeltaState]


def state_memory(config: EngineConfig, model: Decoder) -> StateMemory | None:
    """None: the model has no recurrent states. Raises ConfigError where memory is short, and for
    slots that the model has no use for."""
    if not model.whole_config.has_states:
        if config.num_state_slots is not None:
            raise ConfigError(
                "num_state_slots is for models with linear attention, and this one has none: leave "
                "it out"
            )
        return None
    layout = _layout(model.config, model.dtype)
    of_parts = [_layout(part, model.dtype).slot_bytes for part in model.parts]
    num_slots = config.num_state_slots or _num_slots(config, max(of_parts), model.device)
    memory = torch.empty(num_slots, layout.slot_bytes, dtype=torch.uint8, device=model.device)
    log.info(
        "recurrent states: %d slots of %.2f MiB; two for each of up to %d running sequences, the "
        "others for states of prefixes",
        num_slots,
        layout.slot_bytes / 2**20,
        min(config.max_num_seqs, num_slots // 2),
    )
    bytes_of_parts = tuple(num_slots * each for each in of_parts)
    return StateMemory(num_slots, memory.numel(), bytes_of_parts, layout.views(memory))


def check_states(config: EngineConfig) -> None:
    """Raises ConfigError for settings that a model with recurrent states cannot have yet."""
    for name in ("host_kv_gb", "enable_lora"):
        if getattr(config, name):
            raise ConfigError(
                f"{name} cannot be combined with a model that has linear attention yet: leave it "
                "out"
            )


def _layout(config: ModelConfig, dtype: torch.dtype) -> StateLayout:
    shape = config.linear_attention
    if shape is None:
        raise InvariantError("this model has no recurrent states")
    return StateLayout(sum(config.linear_layers), shape, dtype)


def _num_slots(config: EngineConfig, slot_bytes: int, device: torch.device) -> int:
    """`slot_bytes`: of one slot, on the rank of a group that has most."""
    wanted = 2 * config.max_num_seqs + max(LEAST_SNAPSHOTS, config.max_num_seqs)
    budget = cache_budget(config, device) * STATE_FRACTION
    num_slots = min(wanted, int(budget // slot_bytes))
    if num_slots < 2:
        raise ConfigError(
            f"half of the {2 * budget / 2**30:.2f} GiB for the KV cache holds no two recurrent "
            f"states of {slot_bytes / 2**20:.1f} MiB, which one sequence needs; raise "
            "kv_cache_gb, or set num_state_slots"
        )
    return num_slots
