"""How many expert slots a budget of device memory holds.

Knows sizes; nothing of who comes into a slot.
"""

from __future__ import annotations

import torch

from penstock.kernels.experts import expert_bytes
from penstock.workers.config import ConfigError
from penstock.workers.experts.arena import Manifest

MIN_SLOTS = 2  # one in use, one on its way


def slot_bytes(manifest: Manifest, dtype: torch.dtype, device: torch.device) -> int:
    """Device memory of one expert."""
    return expert_bytes(manifest.hidden, manifest.inner, dtype, device)


def slots_within(
    gigabytes: float, manifest: Manifest, dtype: torch.dtype, device: torch.device
) -> int:
    """How many slots a budget of GiB gives, at most one an expert. Raises ConfigError below two."""
    size, count = slot_bytes(manifest, dtype, device), manifest.num_all
    num_slots = min(int(gigabytes * 2**30 // size), count)
    if num_slots < min(MIN_SLOTS, count):
        raise ConfigError(
            f"expert_cache_gb {gigabytes:g} holds {num_slots} of the {count} experts of this "
            f"model, which take {size / 2**30:.4f} GiB each: {MIN_SLOTS} are the least; raise it "
            f"to {MIN_SLOTS * size / 2**30:.4f}"
        )
    return num_slots
