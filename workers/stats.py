"""What a worker publishes: its identity, the statistics of its engine, and histograms.

Plain data that registry, ingress and command line read without loading torch. Histograms count by
bucket, as Prometheus does; one thread observes, others may take snapshots.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, fields

PREEMPTED = "preempted"  # its blocks were freed, and it is computed again later
DECIDED = "decided"  # commit or recompute, for its newest tokens
# Tokens of a step, prompt and decode together: from a lone decode row to a large merged batch.
STEP_TOKENS_BOUNDS = (1, 8, *(16 << i for i in range(11)))


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine computes with, in words for people."""

    device: str = ""  # as "the CPU with 2 threads"; empty: unknown
    dtype: str = ""  # of activations
    attention: str = ""  # the backend
    kv: str = ""  # number format of the KV cache
    drafts: str = ""  # where draft tokens come from; empty: nowhere


NO_FACTS = EngineFacts()


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """An adapter of a model that is loaded, or, with `folder` None, dropped, by all its workers.

    `number`: larger for each change.
    """

    number: int
    name: str
    folder: str | None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Identity of a worker for one epoch: `epoch` and `token` are new at each start.

    `address` is host:port of its channel. Worker and ingress prove to each other there that they
    know `token`, which is never sent.
    """

    address: str
    epoch: int
    token: str = field(repr=False)
    pid: int
    model: str
    max_model_len: int  # prompt + answer, in tokens
    weights: str = ""  # their number format
    numerics: str = ""  # EngineConfig.numerics
    weight_bytes: int = 0  # all of them, as they lie in memory
    node: str = ""  # of the cluster, on which it runs
    is_draining: bool = False  # it finishes its requests, and accepts no new one
    model_digest: str = ""  # of the model's files (weights/model_digest.py); empty: unknown
    is_encrypted: bool = False  # its channel: an ingress connects by TLS
    engine: EngineFacts = NO_FACTS
    adapters: tuple[str, ...] = ()  # names of its LoRA adapters
    adapter_bytes: int = 0  # all of them, as they lie in memory
    adapter_change: int = 0  # the number of the newest AdapterChange that it has made, or failed
    adapter_failures: tuple[tuple[int, str], ...] = ()  # numbers of those that failed, and why

    @property
    def tokenizer_digest(self) -> str:
        """The part of `model_digest` on which the meaning of token ids depends."""
        return self.model_digest.partition("-")[0]

    @property
    def computes(self) -> str:
        """What the tokens of an answer depend on, beside the request: workers that differ in it
        cannot continue each other's answers. Empty: unknown. Begins with the digest of the model's
        files (digest_in)."""
        return f"{self.model_digest} {self.weights} {self.numerics}".rstrip()


def worker_name(epoch: int) -> str:
    """What the operator is shown of a worker: the status, the queue and the terminal."""
    return f"{epoch:016x}"[:8]


def digest_in(computes: str) -> str:
    """The digest of the model's files in `WorkerInfo.computes`; empty: unknown."""
    return computes.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class LayerAccuracy:
    """Of one MoE layer: experts that tokens were routed to, and how many were predicted."""

    layer: int
    num_routed: int  # by tokens with a prediction
    num_right: int
    num_repeated_routed: int  # by a lone decode row after another one
    num_repeated: int  # of those, the experts of the token before
    num_neurons: int = 0  # that steps needed, of experts whose neurons were predicted
    num_neurons_right: int = 0  # of those, predicted

    def plus(self, other: LayerAccuracy | None) -> LayerAccuracy:
        """With the counts that another rank has of the same layer."""
        if other is None:
            return self
        mine, theirs = astuple(self)[1:], astuple(other)[1:]
        return LayerAccuracy(self.layer, *(a + b for a, b in zip(mine, theirs, strict=True)))


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """The expert cache of one process, or those of a group's ranks together. Totals count from the
    start."""

    num_slots: int  # experts that the cache has room for
    num_experts: int  # of all layers
    slot_bytes: int
    epoch: int  # of the expert file that they come from
    num_hits: int  # experts that a step needed and that were cached, with all neurons
    num_partial: int  # those of which some neurons were missing
    num_misses: int
    num_neurons_wanted: int  # or pieces, of packed experts
    num_neurons_there: int
    num_prefetched: int  # experts that a prefetch was begun for
    num_prefetch_used: int  # of those, needed before they were evicted
    demand_bytes: int  # over the host link, while a step waited
    prefetch_bytes: int
    stall_s: float  # time that steps waited for experts
    link_busy_s: float
    num_corrupted: int  # loads that failed because bytes did not match their digest
    by_layer: tuple[LayerAccuracy, ...] = ()
    num_withheld: int = 0  # layers without a prefetch because the host link was busy
    num_sparse_neurons: int = 0  # of the experts that tokens were routed to in moe_mode sparse
    num_skipped_neurons: int = 0  # of those, skipped
    num_pooled_neurons: int = 0  # that the pool of sparse and streamed answers has room for
    pool_bytes: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ExpertStats:
        """The inverse. Raises TypeError and ValueError for anything else."""
        values = json.loads(text)
        layers = tuple(LayerAccuracy(**each) for each in values.pop("by_layer"))
        return cls(**values, by_layer=layers)

    @classmethod
    def of_ranks(cls, ranks: Sequence[ExpertStats]) -> ExpertStats:
        """Of a group of which each rank has other experts, from its ranks that have any: the sums.

        A slot has the same size on all ranks, and a step waits for the slowest of them. The epoch
        is that of the first one: each machine has a file of its own.
        """
        first = ranks[0]
        sums = {
            each.name: sum(getattr(rank, each.name) for rank in ranks)
            for each in fields(cls)
            if each.name not in ("slot_bytes", "epoch", "stall_s", "by_layer")
        }
        layers: dict[int, LayerAccuracy] = {}
        for each in (layer for rank in ranks for layer in rank.by_layer):
            layers[each.layer] = each.plus(layers.get(each.layer))
        return cls(
            slot_bytes=first.slot_bytes,
            epoch=first.epoch,
            stall_s=max(rank.stall_s for rank in ranks),
            by_layer=tuple(layers[number] for number in sorted(layers)),
            **sums,
        )


@dataclass(frozen=True, slots=True)
class RankStats:
    """One process of a group that shares a model."""

    weight_bytes: int
    kv_bytes: int
    num_gathers: int  # of rows that are divided among the ranks, since the start
    wait_s: float  # for the other ranks, in these
    received_bytes: int  # of the other ranks' columns, in these
    state_bytes: int = 0  # of recurrent states, of a model with linear attention
    adapter_bytes: int = 0
    reserve_bytes: int = 0  # for activations, logits, scratch blocks and the inputs of graphs


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """What a lack of KV memory did to one request: for `penstock explain`.

    Of a decision: the branch, and the numbers that were compared.

    See scheduling/commit_rule.py for nt, td, tl and the branches.
    """

    kind: str  # PREEMPTED or DECIDED
    num_generated: int  # tokens of the answer at that time
    num_tokens: int  # computed tokens that were lost, or pending tokens
    branch: str = ""
    num_scheduled: int = 0  # other rows of the step
    ridge_tokens: float = 0.0  # nt
    compute_s: float = 0.0  # td
    load_s: float = 0.0  # tl
    is_pressed: bool = False  # no block was free; else the mode is `always`


@dataclass(frozen=True, slots=True)
class DeferralStats:
    """Commit or recompute: the numbers of the device, and the decisions since the start."""

    ridge_tokens: float  # nt
    read_s_per_token: float
    compute_s_per_token: float
    num_decisions: dict[str, int]  # by branch of scheduling/commit_rule.py
    compute_s: float  # td of all decisions
    load_s: float  # tl of all decisions


@dataclass(frozen=True, slots=True)
class StateStats:
    """Recurrent states of one worker, in slots. Totals count from the start."""

    num_slots: int
    slot_bytes: int  # on all ranks of a group
    num_live: int  # of running requests, and snapshots in use
    num_snapshots: int  # states of prefixes that later requests may begin with
    num_evicted: int  # snapshots that made room


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
    num_draft_tokens: dict[str, int] = field(default_factory=dict)  # verified, by source
    num_accepted_tokens: dict[str, int] = field(default_factory=dict)  # of those, right
    num_prompt_tokens: int = 0  # computed, recomputation after preemption included
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_preemptions_avoided: int = 0  # times a sequence continued without a free block
    num_deferred_tokens: int = 0  # computed in a step, and not stored
    deferral: DeferralStats | None = None  # with kv_commit deferred
    num_recomputed_tokens: int = 0  # token-passes that this cost in later steps
    num_host_blocks: int = 0  # KV blocks that host memory has room for
    num_host_blocks_used: int = 0
    num_loaded_tokens: int = 0  # loaded from there instead of recomputed
    num_rolled_blocks: int = 0  # freed by sink windows that moved on
    num_shortened_steps: int = 0  # whose prompt chunks were cut because the free tail was short
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_outstanding_tokens: int = 0  # prompt tokens to compute + answer tokens still allowed
    num_finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    num_corrupted: int = 0  # requests that ended because their logits were not finite
    step_seconds: dict[str, float] = field(default_factory=dict)  # by phase of execution/timing.py
    step_model: dict[str, float] = field(
        default_factory=dict
    )  # seconds by term of execution/step_model.py
    step_tokens: Distribution | None = None  # computed in one step
    experts: ExpertStats | None = None  # where there is a cache of experts
    states: StateStats | None = None  # of a model with linear attention
    ranks: tuple[RankStats, ...] = ()  # with tensor_parallel_size, in their order


@dataclass(frozen=True, slots=True)
class Distribution:
    """A snapshot. `counts` has one more entry than `bounds`: observations above all of them.

    An observation is in the first bucket whose upper bound it does not exceed.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Observations by bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]):
        """`bounds`: inclusive upper bounds, ascending; larger values have their own count."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)
