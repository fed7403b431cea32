"""Configuration of one worker, as frozen dataclasses that are checked once and never changed.

Knows nothing of files, command lines or the cluster: `deployments/config.py` fills these from YAML
and flags. Each field carries its own help text, from which flags and docs are made.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.workers.cpu_affinity import parse_cores
from penstock.workers.errors import ConfigError


def unknown_setting(key: str, known: Iterable[str]) -> ConfigError:
    """The error for a setting that does not exist; it names the nearest one that does."""
    names = list(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known settings: {', '.join(names)}"
    return ConfigError(f"unknown setting {key!r}{hint}")


T = TypeVar("T")

WEIGHTS = ("auto", "fp32", "bf16", "int8", "int4", "nf4", "fp8")
KV = ("auto", "int8", "fp8")
KV_GROUPS = ("auto", "8", "32", "64", "head")
DEFAULT_KV_GROUP = 32  # of "auto", where it divides the head dimension
CONTEXT_POLICIES = ("full", "sink_window")
SWITCH = ("auto", "on", "off")
MOE_MODES = ("exact", "quantized", "sparse")
MOE_SCORES = ("gate", "up", "product")


def option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field with help text and, where the values are a closed set, its choices."""
    return field(default=default, metadata={"help": help, "choices": choices})


def from_mapping(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build the dataclass `cls` from `values`; an unknown key is an error naming the nearest."""
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in known:
            raise unknown_setting(key, known)
        choices = known[key].metadata.get("choices")
        if choices and value not in choices:
            raise ConfigError(f"{key} must be one of {', '.join(choices)}; got {value!r}")
    return cls(**values)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything one engine needs to know besides the model itself."""

    model: str = option(
        "builtin", "local folder, hub id, or 'builtin' / 'builtin-moe' (shipped with Penstock)"
    )
    weights: str = option(
        "auto",
        "number format of the linear layers' weights, quantised at load if need be; auto: as the "
        "checkpoint (docs/quantisation.md)",
        WEIGHTS,
    )
    quantize_o: bool = option(True, "weights: attention's output projections too")
    quantize_lm_head: bool = option(
        False, "weights: the head too; where it shares its table with the embedding, a copy of it"
    )
    device: str = option(
        "auto", "where to compute; auto: cuda if there is one", ("auto", "cpu", "cuda")
    )
    max_model_len: int | None = option(
        None, "longest prompt + answer in tokens; none: the model's own context"
    )
    max_num_seqs: int = option(64, "most sequences that run in one step")
    max_num_batched_tokens: int = option(
        2048, "token budget of one step; longer prompts are prefilled in chunks"
    )
    block_size: int = option(16, "tokens in one KV block")
    kv_cache_gb: float | None = option(
        None,
        "KV pool with the activations of a step in GiB; none: 85 % of free GPU memory, or an eighth"
        " of a CPU machine's",
    )
    num_blocks: int | None = option(None, "KV pool in blocks; overrides kv_cache_gb")
    activation_memory: str = option(
        "tail",
        "where the activations of a prefill lie: in the free tail of the KV pool, or set apart",
        ("tail", "separate"),
    )
    merge_steps: bool = option(
        True, "prefill and decode in the same steps; off: in steps of their own, for comparisons"
    )
    kv: str = option(
        "auto",
        "number format of the KV cache; int8 and fp8 keep about half the bytes of 16-bit numbers "
        "(docs/engine.md); auto: as the model computes",
        KV,
    )
    kv_group: str = option(
        "auto",
        "kv int8 and fp8: dimensions of a head that share an fp16 scale; auto: 32, or all of them "
        "where 32 does not divide the head dimension",
        KV_GROUPS,
    )
    async_scheduling: str = option(
        "auto",
        "launch a step from the ids of the one before on the device, before the host has read "
        "them, so that host and device work at the same time (docs/engine.md); auto: on a GPU",
        SWITCH,
    )
    cuda_graphs: str = option(
        "auto",
        "launch steps in which everybody decodes as one CUDA graph, captured at the start for 1, "
        "2, 4, ... sequences (docs/engine.md); auto: on a GPU, where the model allows it",
        SWITCH,
    )
    prefix_cache: bool = option(True, "reuse KV blocks of prompts that begin alike")
    context_policy: str = option(
        "full",
        "what requests see of their past unless they say; sink_window: the first tokens and a "
        "window that rolls on, for answers without end in bounded memory (docs/streaming.md)",
        CONTEXT_POLICIES,
    )
    sinks: int | None = option(None, "sink_window: first tokens that stay; none: one block")
    window: int | None = option(
        None, "sink_window: newest tokens that are seen; none: half of max_model_len"
    )
    roll: int = option(128, "sink_window: tokens by which the window moves on at once")
    max_endless_tokens: int = option(
        1_000_000, "sink_window: hard cap on prompt + answer, also where max_tokens is not set"
    )
    kv_commit: str = option(
        "eager",
        "deferred: a running sequence that finds no free KV block computes its newest tokens anew "
        "in each step, before anybody is preempted (docs/streaming.md)",
        ("eager", "deferred"),
    )
    kv_defer_mode: str = option(
        "pressure",
        "pressure: defer only where no block is free; always: for comparisons",
        ("pressure", "always"),
    )
    kv_defer_max_tokens: int = option(64, "most tokens of one sequence that wait for a block")
    ridge_tokens: int | None = option(
        None, "tokens that a step computes in the time of one; none: measured at the start"
    )
    host_kv_gb: float | None = option(
        None, "GiB of host memory that keeps KV blocks which leave the pool; none: they are lost"
    )
    kv_restore: str = option(
        "auto",
        "how such blocks come back; auto: loaded, computed again, or both ends at once, as the "
        "measured link and compute rates say",
        ("auto", "load", "recompute", "split"),
    )
    kv_restore_min_tokens: int | None = option(
        None, "fewer tokens than that are always computed again; none: as the rates say"
    )
    expert_cache_gb: float | None = option(
        None,
        "GiB of device memory for the experts of a mixture-of-experts model, which then come from "
        "one copy in the node's shared memory, in the format that weights says (docs/experts.md); "
        "none: all are on the device",
    )
    expert_prefetch: bool = option(
        False, "load the experts that the next layer is likely to want while one computes"
    )
    expert_store: str = option(
        "each",
        "nodes that hold a copy of the experts: each one that has workers; or one, which workers "
        "elsewhere ask over the network",
        ("each", "one"),
    )
    expert_store_dir: str = option(
        "/dev/shm", "folder in memory for the experts of a node, a copy as large as they are"
    )
    moe_mode: str = option(
        "exact",
        "what a cached expert gives; exact: what the plain model does, bit for bit; quantized: its "
        "int8 twin, half the bytes; sparse: of the answer's tokens, the neurons that matter most. "
        "Requests may ask for exact. With quantised weights, exact is all there is",
        MOE_MODES,
    )
    moe_keep: float = option(
        0.5, "sparse: share of an expert's neurons that a token keeps, on average"
    )
    moe_score: str = option(
        "product",
        "how much a neuron matters: |silu(gate)|, |up|, or their product (docs/experts.md)",
        MOE_SCORES,
    )
    moe_thresholds: str | None = option(
        None,
        "file of `penstock calibrate`: for sparse, and to prefetch neurons instead of whole experts"
        "; none: neuron_thresholds.json beside the model, for sparse only",
    )
    max_waiting: int = option(1024, "requests that may wait on this worker before it refuses more")
    threads: int | None = option(None, "CPU threads for computing; none: one per core")
    compute_cores: str | None = option(
        None,
        "cores that only compute, as in taskset: 1, or 2-7,9; all else of a server that is started "
        "here keeps off them; none: threads run wherever the system puts them",
    )
    seed: int = option(0, "seeds requests that bring none; the same start gives the same answers")

    def __post_init__(self) -> None:
        for name in (
            *("max_num_seqs", "max_num_batched_tokens", "block_size", "max_waiting"),
            *("roll", "max_endless_tokens", "kv_defer_max_tokens"),
        ):
            _positive(name, getattr(self, name))
        for name in (
            *("max_model_len", "num_blocks", "kv_cache_gb", "threads"),
            *("sinks", "window", "ridge_tokens", "host_kv_gb", "expert_cache_gb"),
        ):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): a running sequence decodes one token a step"
            )
        for name, known in (
            *(("kv", KV), ("kv_group", KV_GROUPS)),
            *(("async_scheduling", SWITCH), ("cuda_graphs", SWITCH)),
            *(("moe_mode", MOE_MODES), ("moe_score", MOE_SCORES)),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}"
                )
        if not 0 < self.moe_keep <= 1:
            raise ConfigError(f"moe_keep must lie in (0, 1]; got {self.moe_keep}")
        if self.expert_cache_gb is None and self.moe_mode != "exact":
            raise ConfigError(
                f"moe_mode {self.moe_mode} is for experts that come out of a cache; give it a size "
                "with expert_cache_gb"
            )
        try:
            _ = self.cores
        except ValueError as error:
            raise ConfigError(f"compute_cores: {error}") from None
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two; got {self.block_size}")

    @property
    def cores(self) -> frozenset[int] | None:
        """`compute_cores` by number; None where none are given."""
        return (
            None if self.compute_cores is None else parse_cores(str(self.compute_cores))
        )  # YAML reads 1 as a number


def _positive(name: str, value: float) -> None:
    if value <= 0:
        raise ConfigError(f"{name} must be positive; got {value}")
