"""A step's arrays on the host: what travels to the device, and to the other ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.kernels.delta_types import StateRows
from penstock.kernels.types import DecodeBatch, PrefillBatch
from penstock.workers.experts.modes import Modes
from penstock.workers.models.layers import AttentionInputs, RollingInputs

Ints = NDArray[np.int64]
Put = Callable[[NDArray[np.generic]], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """Decode rows first, then prefill chunks; the fields become those of `AttentionInputs`."""

    token_ids: Ints  # [T]; 0 in rows of `unread`
    positions: Ints  # [T]
    slots: Ints  # [T]
    decode_tables: NDArray[np.int32]
    decode_lens: NDArray[np.int32]
    prefill_tables: NDArray[np.int32]
    prefill_starts: NDArray[np.int32]
    prefill_lens: NDArray[np.int32]
    max_prefill_chunk: int
    unread: Ints  # [2, N]: rows whose ids only the device has, and their rows in the step before
    rolling: HostRolling | None
    states: HostStates | None = None
    uses_scratch: bool = False

    def inputs(self, put: Put) -> AttentionInputs:
        """The inputs on the device that `put` copies to."""
        return AttentionInputs(
            slots=put(self.slots),
            num_decode=len(self.decode_lens),
            decode=DecodeBatch(
                put(self.decode_tables),
                put(self.decode_lens),
                max_context_len=int(self.decode_lens.max(initial=0)),
            ),
            prefill=PrefillBatch(
                put(self.prefill_tables),
                put(self.prefill_starts),
                put(self.prefill_lens),
                self.max_prefill_chunk,
            ),
            rolling=None if self.rolling is None else self.rolling.inputs(put),
            states=None if self.states is None else self.states.inputs(put),
            uses_scratch=self.uses_scratch,
        )


@dataclass(frozen=True, slots=True, eq=False)
class HostRolling:
    """`RollingInputs` on the host."""

    sink_positions: Ints
    sink_ends: NDArray[np.int32]
    window_starts: NDArray[np.int32]
    sink_blocks: NDArray[np.int32]
    bases: NDArray[np.int32]
    max_visible_len: int

    def inputs(self, put: Put) -> RollingInputs:
        return RollingInputs(
            put(self.sink_positions),
            put(self.sink_ends),
            put(self.window_starts),
            put(self.sink_blocks),
            put(self.bases),
            self.max_visible_len,
        )


@dataclass(frozen=True, slots=True, eq=False)
class HostStates:
    """`StateRows` on the host."""

    starts: NDArray[np.int32]
    sources: NDArray[np.int32]
    write_starts: NDArray[np.int32]
    write_after: NDArray[np.int32]
    write_slots: NDArray[np.int32]

    def inputs(self, put: Put) -> StateRows:
        return StateRows(
            put(self.starts),
            put(self.sources),
            put(self.write_starts),
            put(self.write_after),
            put(self.write_slots),
        )


@dataclass(frozen=True, slots=True)
class GroupStep:
    """What the first rank of a group tells the others of a step."""

    batch: HostBatch
    modes: Modes | None = None  # of the rows; None: all are exact
    is_graph: bool = False  # all ranks replay a decode graph
    # The device of the first rank alone knows some of the ids, and gives all of them to the others.
    shares_ids: bool = False


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """What all ranks of a group have room for: KV blocks, tokens of a sequence, slots for recurrent
    states (0: the model has none), and decode graphs (the fields of GraphSizes; None: there are
    none)."""

    num_blocks: int
    max_model_len: int
    num_slots: int = 0
    graphs: dict[str, Any] | None = None


class CacheBytes(NamedTuple):
    """What a rank of a group takes beside its weights."""

    kv: int
    states: int  # recurrent ones
    reserve: int  # for activations, logits, scratch blocks and the inputs of graphs
