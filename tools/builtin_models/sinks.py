"""A loss term that trains attention sinks: heads that rest on the mark at the start of every text.

In larger models, heads learn by themselves to put unused attention on the first token, an attention
sink (Xiao et al., 2309.17453, section 3.3: every training text begins with the same token). In the
few thousand steps of these models that does not happen, so a term of the loss asks some heads for
it.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

QUERIES = 32  # positions of a window that are looked at in one step


def sink_loss(model: PreTrainedModel, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean of -log p(first token) over the heads that are to rest on it, in nats.

    hidden is the decoder's hidden_states: [rows, length, size] before each layer. The heads are
    those of every layer but the first, whose input is bare embeddings. A few random queries of each
    window stand for all.
    """
    rows, length, _ = hidden[0].shape
    picked = torch.randint(length // 16, length, (QUERIES,)).sort().values.to(hidden[0].device)
    positions = torch.arange(length, device=hidden[0].device)[None]
    cos, sin = model.model.rotary_emb(hidden[0], positions)
    later = positions > picked[:, None]
    total = hidden[0].new_zeros((), dtype=torch.float32)
    layers = list(zip(model.model.layers, hidden, strict=False))[1:]
    for layer, states in layers:
        attention = layer.self_attn
        normed = layer.input_layernorm(states)
        keys = attention.k_proj(normed).view(rows, length, -1, attention.head_dim).transpose(1, 2)
        queries = attention.q_proj(normed[:, picked]).view(rows, QUERIES, -1, attention.head_dim)
        queries = queries.transpose(1, 2)
        keys, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
        queries, _ = apply_rotary_pos_emb(queries, queries, cos[:, picked], sin[:, picked])
        keys = keys.repeat_interleave(attention.num_key_value_groups, dim=1)
        scores = (queries @ keys.transpose(2, 3)).float() * attention.scaling
        scores = scores.masked_fill(later, float("-inf"))
        total = total - (scores[..., 0] - scores.logsumexp(dim=-1)).mean()
    return total / len(layers)
