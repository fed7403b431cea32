"""What a worker says about itself: who it is, and how its engine does.

Plain data that processes which never load torch can read: registry, ingress, command line.

Counts of observations by bucket, as Prometheus wants them: cheap to add to, cheap to copy.

Knows nothing of Prometheus, nor of what is observed. One thread adds; others may take snapshots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

# Tokens of a step, prompt and decode together: from a lone decode row to a large merged batch.
STEP_TOKENS_BOUNDS = (1, 8, *(16 << i for i in range(11)))


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is, for one life of it: `epoch` and `token` are made anew at each start.

    `address` is host:port of its channel; whoever shows `token` there may send it requests.
    """

    address: str
    epoch: int
    token: str = field(repr=False)
    pid: int
    model: str
    max_model_len: int  # prompt + answer, in tokens
    weights: str = ""  # their number format
    weight_bytes: int = 0  # all of them, as they lie in memory


@dataclass(frozen=True, slots=True)
class LayerAccuracy:
    """Of one MoE layer: experts that tokens went through, and how many of them were foreseen."""

    layer: int
    num_routed: int  # by tokens that there was a guess for
    num_right: int
    num_repeated_routed: int  # by tokens that came alone after one that came alone
    num_repeated: int  # of those, the experts of the token before
    num_neurons: int = 0  # that steps wanted of experts whose neurons were foreseen
    num_neurons_right: int = 0  # of those, the ones that were


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """The expert cache of one worker. Totals count from the start."""

    num_slots: int  # experts that the cache has room for
    num_experts: int  # of all layers
    slot_bytes: int
    epoch: int  # of the arena that they come from
    num_hits: int  # experts that a step needed and that were there, all of their neurons
    num_partial: int  # those of which some neurons were missing
    num_misses: int
    num_neurons_wanted: int  # or pieces, of packed experts
    num_neurons_there: int
    num_prefetched: int  # experts that a prefetch was begun for
    num_prefetch_used: int  # of those, needed before they were evicted
    demand_bytes: int  # over the link, for what a step waited for
    prefetch_bytes: int
    stall_s: float  # time that steps waited for experts
    link_busy_s: float
    num_corrupted: int  # loads that failed because bytes did not match their digest
    by_layer: tuple[LayerAccuracy, ...] = ()
    num_withheld: int = 0  # layers that nothing was prefetched for because the link had no time
    num_sparse_neurons: int = 0  # of the experts that tokens went through in moe_mode sparse
    num_skipped_neurons: int = 0  # of those, the ones left out


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for logs, metrics and the choice of a worker. Totals count from the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_block_bytes: int = 0  # of one block: K, V and scales of all layers
    block_size: int = 0  # tokens
    max_num_seqs: int = 0
    num_live_blocks: int = 0
    num_cached_blocks: int = 0
    num_saved_bytes: int = 0  # by lending the tail of the pool to the activations of a step
    num_saved_blocks: int = 0  # the same in blocks
    num_steps: int = 0
    num_steps_ahead: int = 0  # of those, launched before the host had read the step before
    num_graph_steps: int = 0  # of them, launched as one CUDA graph
    num_discarded_tokens: int = 0  # sampled for requests that had ended when they were read
    num_prompt_tokens: int = 0  # computed, recomputation after preemption included
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_preemptions_avoided: int = 0  # times a sequence went on without a free block
    num_deferred_tokens: int = 0  # computed in a step, and not stored
    num_recomputed_tokens: int = 0  # token-passes which that cost in later steps
    num_host_blocks: int = 0  # KV blocks that host memory has room for
    num_host_blocks_used: int = 0
    num_loaded_tokens: int = 0  # that came back from there instead of being computed again
    num_rolled_blocks: int = 0  # given back by sink windows that moved on
    num_shortened_steps: int = 0  # whose prompt chunks were cut because the free tail was short
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_outstanding_tokens: int = 0  # prompt tokens to compute + answer tokens still allowed
    num_finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    num_corrupted: int = 0  # requests that ended because their logits were no numbers
    step_seconds: dict[str, float] = field(default_factory=dict)  # by phase of step_times.py
    step_model: dict[str, float] = field(default_factory=dict)  # seconds by term of step_model.py
    step_tokens: Distribution | None = None  # computed in one step
    experts: ExpertStats | None = None  # where there is a cache of experts


@dataclass(frozen=True, slots=True)
class Distribution:
    """A snapshot. `counts` has one more entry than `bounds`: what lies above all of them.

    An observation is in the first bucket whose upper bound it does not exceed.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Observations by bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]):
        """`bounds`: inclusive upper bounds, ascending; what is above the last has its own count."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)
