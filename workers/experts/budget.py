"""How many expert slots a budget of device memory holds.

Knows sizes; nothing of who comes into a slot.
"""

from __future__ import annotations

from penstock.workers.config import ConfigError

MIN_SLOTS = 2  # one in use, one on its way


def slots_within(gigabytes: float, slot_bytes: int, num_experts: int) -> int:
    """How many slots of `slot_bytes` a budget of GiB gives, at most one for each of `num_experts`.
    Raises ConfigError below two."""
    num_slots = min(int(gigabytes * 2**30 // slot_bytes), num_experts)
    if num_slots < min(MIN_SLOTS, num_experts):
        raise ConfigError(
            f"expert_cache_gb {gigabytes:g} holds {num_slots} of the {num_experts} experts of this "
            f"model, which take {slot_bytes / 2**30:.4f} GiB each: {MIN_SLOTS} are the least; "
            f"raise it to {MIN_SLOTS * slot_bytes / 2**30:.4f}"
        )
    return num_slots
