"""The sizes of the built-in models, and the patches that make their training fast.

Builds transformers' own Llama and Mixtral.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.moe import ExpertsInterface

from tools.builtin_models import data


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model; num_experts 0 is the dense one."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int = 0


@dataclass(frozen=True)
class Preset:
    """What is trained, and how. micro_tokens bounds the activations of one backward pass."""

    dense: ModelShape
    moe: ModelShape
    tokens_per_step: int
    micro_tokens: int
    loss_chunk: int
    peak_lr: float
    betas: tuple[float, float]
    seq_len: int = 512
    long_share: float = 0.15  # the last part of the time is spent at data.CONTEXT
    chat_share: float = 0.2
    warmup_share: float = 0.02
    weight_decay: float = 0.1
    balance_weight: float = 0.02
    sink_weight: float = 0.05  # of the term that rests heads on the first token
    sink_from: float = 0.4  # the part of the time after which it counts: first there is to be use
    second_lr: float = 1.2e-3  # the second training: half of its steps at data.CONTEXT
    second_sink_weight: float = 0.1
    third_lr: float = 6e-4  # the third: most of its steps with rounded products
    half_step_share: float = 0.0  # the first part of the time takes half as many tokens a step


PRESETS = {
    # Sized for some ten million tokens in an hour on one core: more layers would learn less.
    "cpu": Preset(
        dense=ModelShape(256, 4, 4, 2, 64, 704),
        moe=ModelShape(256, 4, 4, 2, 64, 352, num_experts=8),
        tokens_per_step=4096,
        micro_tokens=2048,
        loss_chunk=256,
        peak_lr=3e-3,
        betas=(0.9, 0.98),
        half_step_share=0.4,
    ),
    # 28 M and 29 M parameters: together 115 MB in bf16, under the package's limit of 120 MB.
    "gpu": Preset(
        dense=ModelShape(512, 8, 8, 4, 64, 1408),
        moe=ModelShape(384, 6, 6, 2, 64, 416, num_experts=8),
        tokens_per_step=131072,
        micro_tokens=65536,
        loss_chunk=8192,
        peak_lr=2e-3,
        betas=(0.9, 0.95),
    ),
}


def build_model(shape: ModelShape, bf16: bool, seed: int) -> PreTrainedModel:
    """A freshly initialised Llama or Mixtral in fp32; bf16 is what its experts multiply in."""
    common = {
        "vocab_size": data.VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": data.CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": list(data.EOS_TOKEN_IDS),
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    if not shape.num_experts:
        return LlamaForCausalLM(LlamaConfig(**common))
    config = MixtralConfig(
        num_local_experts=shape.num_experts,
        num_experts_per_tok=2,
        sliding_window=None,
        **common,
    )
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("bf16_grouped_mm" if bf16 else "grouped_mm")
    return model


def _grouped_experts(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """All experts of a layer over tokens sorted by expert, in bf16; hidden [T, d] -> [T, d].

    Autocast does not reach grouped_mm, so transformers' own function multiplies in fp32: 0.8 of the
    speed of this one on a CPU with bf16 arithmetic ("eager" is slower than both).
    """
    by_expert, order = torch.sort(chosen.flatten())
    counts = torch.histc(by_expert.float(), experts.num_experts, 0, experts.num_experts - 1)
    ends = counts.cumsum(0).to(torch.int32)
    low = torch.bfloat16
    rows = hidden[order // chosen.shape[-1]].to(low)
    gate_up = experts.gate_up_proj.to(low).transpose(1, 2)
    down = experts.down_proj.to(low).transpose(1, 2)
    gate, up = torch.nn.functional.grouped_mm(rows, gate_up, offs=ends).chunk(2, dim=-1)
    out = torch.nn.functional.grouped_mm(experts.act_fn(gate) * up, down, offs=ends)
    out = out * weights.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return out[back].view(*chosen.shape, -1).sum(dim=1).to(hidden.dtype)


ExpertsInterface.register("bf16_grouped_mm", _grouped_experts)


class TiedLoss(torch.autograd.Function):
    """Mean cross-entropy of hidden @ weight.T, a chunk of rows at a time.

    The logits of a chunk turn into their own gradient in place, so that [tokens, vocabulary]
    never exists: on a CPU that matrix is what the step would otherwise spend its time moving.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):  # type: ignore[no-untyped-def]
        count = hidden.shape[0]
        low = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, count, chunk):
            rows, wanted = hidden[start : start + chunk], targets[start : start + chunk, None]
            logits = (rows @ low.T).float()
            norm = torch.logsumexp(logits, dim=-1, keepdim=True)
            total += (norm - logits.gather(1, wanted)).sum()
            logits.sub_(norm).exp_()
            logits.scatter_add_(1, wanted, logits.new_full(wanted.shape, -1.0))
            grad = logits.to(hidden.dtype)
            grad_hidden[start : start + chunk] = grad @ low
            grad_weight += grad.T @ rows
        ctx.save_for_backward(grad_hidden.div_(count), grad_weight.div_(count))
        return total / count

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None
