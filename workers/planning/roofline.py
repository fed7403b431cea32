"""The roofline of a model on a device, arithmetic only: bytes, FLOPs, seconds, blocks that fit.

Lower bounds, not predictions: a step cannot take less. `Device.at`, with measured shares of a
device's peaks, gives closer estimates. Imports no torch: the command line plans without it.

Symbols as in the literature: F peak FLOP/s, B bytes/s, b_w bytes per weight, c FLOPs per token in
the hidden layers, kappa KV bytes per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from penstock.workers.errors import ConfigError
from penstock.workers.model_config import ModelConfig
from penstock.workers.planning.group import Group
from penstock.workers.planning.hardware import (
    ATTENTION,
    KV_FORMATS,
    WEIGHT_FORMATS,
    Device,
    WeightCost,
)
from penstock.workers.planning.parameters import count_parameters, wide_weights
from penstock.workers.planning.step_time import StepTime

BLOCK_ALIGN_BYTES = 512  # as the arena's blocks


def ridge_tokens(flops: float, weight_bytes: float, bandwidth: float) -> float:
    """nt = F b_w / 2B: the rows for which a product takes as long as reading its weights.

    The same for every matrix, because its dimensions cancel. Below nt, more rows cost no time.
    """
    return flops * weight_bytes / (2 * bandwidth)


@dataclass(frozen=True, slots=True)
class Roofline:
    """One model in given number formats on one device.

    `kv_group`: dimensions that share a scale in int8 and fp8 KV, at most the head dimension; 0
    leaves scales out, as published tables do. Embedding and head stay in the 16 (or 32) bits of
    norms unless `quantised_embedding` or `quantised_head` is set; a quantised head is int8 beside
    int4 layers, and one that shares its table with a plain embedding becomes a copy. Attention's
    output projections stay plain too if `quantised_output` is off. `batched_tokens`: rows for whose
    activations memory is reserved.

    The published batch of 272 (Llama-2-7B, A100-80G, 1024 tokens each; PPL's hardware table) comes
    out with int8 weights, embedding and head too, int8 KV without its scales, 80e9 bytes of memory
    and nothing reserved for activations: (80e9 - 6.738e9) / (1024 * 262144) = 272.9.
    """

    model: ModelConfig
    device: Device
    weights: str = "bf16"
    kv: str = "bf16"
    kv_group: int = 64
    quantised_embedding: bool = False
    quantised_head: bool = False
    quantised_output: bool = True
    wide_layers: bool = True  # of int4: some layers' q, k, v and down are int8; not of drafts
    block_size: int = 16
    batched_tokens: int = 0
    reserve_bytes: float = 0
    stored: WeightCost | None = None  # of the weights in a file, which the format "auto" keeps
    group: Group = field(default_factory=Group)  # of devices; bytes are those of one of them
    draft: Roofline | None = None  # a draft model beside it; the same model has the same K and V

    def __post_init__(self) -> None:
        self.group.check(self.model)
        formats = [*WEIGHT_FORMATS, *(["auto"] if self.stored is not None else [])]
        for name, known in (("weights", formats), ("kv", list(KV_FORMATS))):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}"
                )
        if self.kv_group < 0 or (self.kv_group and self.model.head_dim % self._group):
            raise ConfigError(
                f"kv_group must divide the head dimension {self.model.head_dim}, or be 0 to leave "
                f"scales out; got {self.kv_group}"
            )
        if self.block_size < 1 or self.batched_tokens < 0 or self.reserve_bytes < 0:
            raise ConfigError(
                "block_size must be positive, batched_tokens and reserve_bytes not negative; got "
                f"{self.block_size}, {self.batched_tokens} and {self.reserve_bytes}"
            )
        if self.draft is not None:
            self._check_draft(self.draft.model)

    def _check_draft(self, draft: ModelConfig) -> None:
        problem = None
        if self.group.devices > 1:
            problem = "a group of devices has none: plan for one device"
        elif self.model.has_states or draft.has_states:
            problem = "models with linear attention have none"
        elif draft.vocab_size != self.model.vocab_size:
            problem = f"it has {draft.vocab_size} tokens and the model {self.model.vocab_size}"
        if problem is not None:
            raise ConfigError(f"draft model: {problem}")

    @property
    def _format(self) -> WeightCost:
        if self.weights == "auto":
            assert self.stored is not None
            return self.stored
        return WEIGHT_FORMATS[self.weights]

    @property
    def _head(self) -> WeightCost:
        """Of a head that is quantised."""
        return WEIGHT_FORMATS["int8"] if self.weights == "int4" else self._format

    # -- bytes

    @property
    def weight_bytes(self) -> float:
        """All weights, as they lie in memory: of a group, on the device that has most."""
        n, fmt = count_parameters(self.model), self._format
        routed = self._routed_bytes
        embedding = n.embedding * (fmt.bytes if self.quantised_embedding else fmt.other_bytes)
        head = n.head * (self._head.bytes if self.quantised_head else fmt.other_bytes)
        if self.quantised_head and not n.head and not self.quantised_embedding:
            head = n.embedding * self._head.bytes * (fmt.bytes != fmt.other_bytes)
        if self.group.ranks > 1:  # a rank's part of the head is never shared with the embedding
            head = (head or n.embedding * fmt.other_bytes) / self.group.ranks
        layers = self._linear_bytes + routed + n.other * fmt.other_bytes
        return layers * self.group.layer_share(self.model) + embedding + head

    @property
    def draft_bytes(self) -> float:
        """Weights of the draft model; of the model itself, without the embedding, which is one."""
        if self.draft is None:
            return 0.0
        embedding = count_parameters(self.model).embedding * self.draft._format.other_bytes
        return self.draft.weight_bytes - embedding * (self.draft.model == self.model)

    @property
    def kv_bytes_per_token(self) -> float:
        """kappa: K, V and their scales in all layers: of a group, on the device that has most."""
        num_layers, _ = self.group.layers_of_a_kind(self.model)
        return num_layers * self._kv_bytes_per_layer

    @property
    def state_bytes(self) -> int:
        """The recurrent state of one sequence: of layers with linear attention. Of a group, on the
        device that has most."""
        shape = self.model.linear_attention
        if shape is None:
            return 0
        keys, values = self.group.linear_heads(shape)
        own = replace(shape, num_key_heads=keys, num_value_heads=values)
        each = own.state_elements * 4 + own.kept_elements * self._format.other_bytes
        return self.group.layers_of_a_kind(self.model)[1] * each

    @property
    def block_bytes(self) -> int:
        """One block of the arena."""
        raw = math.ceil(self.block_size * self.kv_bytes_per_token)
        return -(-raw // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES

    @property
    def activation_bytes_per_token(self) -> int:
        """The regions of a step: residual, norm or attention output, and the widest of the rest
        (packed q, k, v; or gate and up, for each of a token's experts)."""
        m = self.model
        qkv = (m.num_heads * (1 + m.attention_gate) + 2 * m.num_kv_heads) * m.head_dim
        if m.linear_attention is not None:
            qkv = max(qkv, m.linear_attention.channels + m.linear_attention.values)
        dense = 0 if all(m.moe_layers) else 2 * m.intermediate_size
        routed = 2 * m.num_experts_per_token * m.moe_intermediate_size
        shared = 2 * m.shared_expert_intermediate_size
        widest = max(qkv, dense, routed, shared)
        return (2 * m.hidden_size + widest) * self._format.other_bytes

    @property
    def num_blocks(self) -> int:
        """KV blocks that fit next to the weights; 0 if the weights alone do not fit. Another model
        that drafts has as many of its own."""
        kept = self.reserve_bytes + self.batched_tokens * self.activation_bytes_per_token
        free = self.device.memory_bytes - self.weight_bytes - self.draft_bytes - kept
        each = self.block_bytes
        if self.draft is not None and self.draft.model != self.model:
            each += self.draft.block_bytes
        return max(0, int(free // each))

    def largest_batch(self, context: int) -> int:
        """How many sequences of `context` tokens fit; `context` is at least 1. Of recurrent states,
        each has two: a step reads one and writes the other."""
        assert context > 0
        blocks = -(-context // self.block_size)
        if not self.state_bytes:
            return self.num_blocks // blocks
        each = blocks * self.block_bytes + 2 * self.state_bytes
        return self.num_blocks * self.block_bytes // each

    # -- FLOPs

    @property
    def flops_per_token(self) -> float:
        """c: the linear layers below the head, twice the weights that a token uses."""
        n, m = count_parameters(self.model), self.model
        share = m.num_experts_per_token / m.num_experts if n.routed else 0.0
        return 2 * (n.linear + n.routed * share)

    @property
    def head_flops(self) -> float:
        """FLOPs of the head for each row that needs logits."""
        return 2 * self.model.vocab_size * self.model.hidden_size

    # -- seconds

    def decode(self, batch: int, context: int) -> StepTime:
        """A step of `batch` rows, one for each sequence, that have `context` tokens each."""
        return self._step(batch, batch, batch * self._seen(context), batch * self._seen(context))

    def mixed(self, rows: int, sampled: int, cached: int, pairs: int) -> StepTime:
        """A step of `rows` tokens, `sampled` of which need logits. In each layer it reads `cached`
        tokens, and multiplies `pairs` of a query and a key; windows of the model are left out."""
        layers = self.model.num_kv_layers
        return self._step(rows, sampled, cached * layers, pairs * layers)

    def prefill_s(self, num_tokens: int, chunk: int | None = None) -> float:
        """Time to first token of a prompt that runs alone, in chunks of `chunk` tokens."""
        chunk = chunk or num_tokens
        total_s = 0.0
        for start in range(0, num_tokens, chunk):
            end = min(start + chunk, num_tokens)
            looked_at = self._seen_by(end) - self._seen_by(start)
            step = self._step(end - start, int(end == num_tokens), self._seen(end), looked_at)
            total_s += step.seconds
        return total_s

    def tokens_per_s(self, batch: int, context: int) -> float:
        """Of all sequences together; 0 for an empty batch."""
        return batch / self.decode(batch, context).seconds if batch else 0.0

    def cost_per_million(self, batch: int, context: int, price_per_hour: float) -> float:
        """Price of a million generated tokens, in the currency of `price_per_hour`; inf for an
        empty batch."""
        rate = self.tokens_per_s(batch, context)
        return price_per_hour / 3600 / rate * 1e6 if rate else math.inf

    # -- where the bounds meet

    @property
    def ridge_tokens(self) -> float:
        """nt. An expert reaches it only when nt rows are routed to it: at nt num_experts / k
        rows."""
        return ridge_tokens(self._linear_flops, self._format.bytes, self.device.bandwidth)

    @property
    def read_s_per_token(self) -> float:
        """tl: reading one cached token from local memory."""
        return self.kv_bytes_per_token / self.device.bandwidth

    @property
    def compute_s_per_token(self) -> float:
        """td: recomputing one token, beyond the ridge."""
        return self._token_s

    @property
    def pending_per_cached_token(self) -> float:
        """r = tl / td = kappa F / c B: tokens computed while one is read, if both overlapped
        perfectly; the published bound on the share of K and V that may stay uncommitted."""
        return self.read_s_per_token / self.compute_s_per_token

    def link_threshold(self, compute_share: float = 0.5) -> float:
        """B*, bytes/s: over a faster link, loading K and V is faster than recomputing them.

        `compute_share`: of the peak that a prefill reaches.
        """
        return self.kv_bytes_per_token * compute_share / self.compute_s_per_token

    # -- parts

    @property
    def _group(self) -> int:
        return min(self.kv_group, self.model.head_dim)

    @property
    def _kv_bytes_per_layer(self) -> float:
        fmt = KV_FORMATS[self.kv]
        each = fmt.bytes + (2 / self._group if fmt.has_scales and self.kv_group else 0)
        heads = self.model.num_kv_heads * self.group.kv_share(self.model)
        return 2 * heads * self.model.head_dim * each

    @property
    def _plain_output(self) -> int:
        """Weights of attention's output projections if they are not quantised, else 0."""
        return 0 if self.quantised_output else count_parameters(self.model).output

    @property
    def _linear_bytes(self) -> float:
        """Bytes of the weights that every token uses."""
        n, fmt, plain = (
            count_parameters(self.model),
            self._format,
            self._plain_output,
        )
        rows = n.linear_rows - n.output_rows * (plain > 0)
        whole = (n.linear - plain) * fmt.bytes + rows * fmt.row_bytes + plain * fmt.other_bytes
        if self.weights == "int4" and self.wide_layers:
            whole += wide_weights(self.model) * (WEIGHT_FORMATS["int8"].bytes - fmt.bytes)
        return whole / self.group.ranks

    @property
    def _routed_bytes(self) -> float:
        """Bytes of the routed experts' weights."""
        n, fmt = count_parameters(self.model), self._format
        whole = n.routed * fmt.bytes + n.routed_rows * fmt.row_bytes
        return whole * self.group.routed_share(self.model)

    @property
    def _exact_flops(self) -> float:
        """FLOP/s of products with weights that are not quantised."""
        return self.device.peak("bf16" if self._format.other_bytes == 2 else "fp32")

    @property
    def _token_s(self) -> float:
        """A row's products with the layers below the head."""
        plain = 2 * self._plain_output
        whole_s = (self.flops_per_token - plain) / self._linear_flops + plain / self._exact_flops
        return whole_s / self.group.ranks

    @property
    def _linear_flops(self) -> float:
        return self.device.peak(self._format.compute)

    def _step(self, rows: int, head_rows: int, read: float, looked_at: float) -> StepTime:
        """`read`: cached tokens read, over all layers; `looked_at`: pairs of a query and a key."""
        n, m = count_parameters(self.model), self.model
        fmt = self._format
        routed, group = self._routed_bytes, self.group
        if routed:  # those experts that any row goes to, if each is as likely as another
            routed *= 1 - (1 - m.num_experts_per_token / m.num_experts) ** rows
        head = n.head or n.embedding
        head_quantised = self.quantised_head or (self.quantised_embedding and not n.head)
        head_bytes = head * (self._head.bytes if head_quantised else fmt.other_bytes)
        plain = "bf16" if fmt.other_bytes == 2 else "fp32"
        head_format = plain
        if head_quantised:
            head_format = "int8" if self.weights == "int4" else self.weights
        head_s = head_bytes / group.ranks * (head_rows > 0) / self.device.read(head_format)
        layers_s = (self._linear_bytes + routed) / self.device.read(self.weights)
        other_s = n.other * fmt.other_bytes / self.device.read(plain)
        attention_flops = self.device.flops.get(ATTENTION, self._exact_flops)
        head_peak = self._linear_flops if head_quantised else self._exact_flops
        # Every part reads the weights of a stage; the stages before and after it are idle at the
        # ends.
        parts, turns = group.turns(rows)
        states = 2 * self.state_bytes * max(1, head_rows) * turns / parts  # one of each sequence
        by_part = turns * group.layer_share(m)
        by_row = by_part / parts
        head_compute_s = head_rows * self.head_flops / head_peak / group.ranks
        return StepTime(
            weights_s=(layers_s + other_s) * by_part + head_s,
            linear_s=rows * self._token_s * by_row + head_compute_s,
            kv_s=(read * self._kv_bytes_per_layer * by_row + states) / self.device.bandwidth,
            attention_s=4
            * m.num_heads
            * group.kv_share(m)
            * m.head_dim
            * looked_at
            * by_row
            / attention_flops,
            other_s=self.device.layer_s * m.num_layers * by_part + self.device.row_s * head_rows,
            overlaps=self.device.overlaps,
            exchange_s=group.exchange_s(m, rows, head_rows, fmt.other_bytes),
        )

    @property
    def _windows(self) -> list[int | None]:
        """Of the layers with K and V."""
        m = self.model
        return [each for i, each in enumerate(m.sliding_window) if not m.is_linear(i)]

    def _seen(self, context: int) -> int:
        """Keys that a row at the end of `context` tokens sees, summed over the layers."""
        return sum(min(context, window or context) for window in self._windows)

    def _seen_by(self, num_tokens: int) -> int:
        """Keys that the first `num_tokens` rows see, summed over rows and layers."""
        total = 0
        for window in self._windows:
            ramp = min(num_tokens, window or num_tokens)
            total += ramp * (ramp + 1) // 2 + (num_tokens - ramp) * ramp
        return total
