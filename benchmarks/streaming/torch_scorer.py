"""Teacher-forced log-probabilities under a context policy: the arithmetic of the quality benchmark.

`TorchScorer` is plain PyTorch over a transformers model's own modules: any length, in chunks, exact
for each query row (two queries: K stays rotated at its absolute position). `recompute` runs each
window from scratch. Independent of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# (layer, weights [heads, rows, keys], absolute positions of the rows, of the keys)
OnAttention = Callable[[int, Tensor, Tensor, Tensor], None]
OnTokens = Callable[[int], Any]


@dataclass(frozen=True)
class CachePolicy:
    """Which earlier tokens a token sees: all (`window` None), or `sinks` and up to `window` newer.

    `roll` tokens are dropped at once. `cache_positions` False leaves the sinks at their absolute
    distance, which is not StreamingLLM.
    """

    name: str
    sinks: int = 0
    window: int | None = None
    roll: int = 1
    block_size: int = 16
    cache_positions: bool = True

    @property
    def first(self) -> int:
        """Tokens in the sinks' blocks."""
        return -(-self.sinks // self.block_size) * self.block_size

    def starts(self, positions: Tensor) -> Tensor:
        """First visible position after the sinks, for each of `positions` (int64)."""
        if self.window is None:
            return torch.zeros_like(positions)
        beyond = (positions + 1 - self.first - self.window).clamp_min(0)
        return self.first + self.roll * ((beyond + self.roll - 1) // self.roll)


class Scorer(Protocol):
    """What gives log-probabilities: plain PyTorch here, or an engine."""

    def score(
        self, token_ids: Sequence[int], policy: CachePolicy, on_tokens: OnTokens | None = None
    ) -> Tensor:
        """Entry i is log p(token_ids[i + 1] | what token i sees), fp32 [T - 1]. `on_tokens` is
        called with the number of tokens just scored."""


@dataclass
class _Layer:
    """K, rotated at absolute positions, and V: [kv_heads, tokens, dim]; of the sinks' blocks, and
    of what comes after them from `start` on."""

    sinks: tuple[Tensor, Tensor]
    recent: tuple[Tensor, Tensor]


class TorchScorer:
    """`model`: a transformers model of the Llama family or near it, without windows of its own."""

    def __init__(self, model: Any, chunk: int = 256, on_attention: OnAttention | None = None):
        self.model, self.chunk, self.on_attention = model, chunk, on_attention
        config = model.config
        self.num_kv_heads = config.num_key_value_heads
        head_dim: int | None = getattr(config, "head_dim", None)
        self.head_dim = head_dim or config.hidden_size // config.num_attention_heads
        self.inv_freq = model.model.rotary_emb.inv_freq.double()
        self.rope_scale = float(model.model.rotary_emb.attention_scaling)
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise ValueError("the model has sliding-window layers of its own; choose another one")

    @torch.inference_mode()
    def score(
        self, token_ids: Sequence[int], policy: CachePolicy, on_tokens: OnTokens | None = None
    ) -> Tensor:
        ids = torch.tensor(token_ids)
        nothing = torch.zeros(self.num_kv_heads, 0, self.head_dim, dtype=self.model.dtype)
        layers = [_Layer((nothing, nothing), (nothing, nothing)) for _ in self.model.model.layers]
        parts, start = [], policy.first  # start: first position in `recent`
        for begin in range(0, len(ids) - 1, self.chunk):
            end = min(begin + self.chunk, len(ids) - 1)
            logits = self._chunk(ids[begin:end], begin, start, layers, policy)
            wanted = ids[begin + 1 : end + 1, None]
            parts.append(logits.float().log_softmax(dim=-1).gather(1, wanted)[:, 0])
            keep = max(start, int(policy.starts(torch.tensor(end))))
            for layer in layers:  # copies, or the view would hold the whole
                k, v = layer.recent
                layer.recent = k[:, keep - start :].clone(), v[:, keep - start :].clone()
            start = keep
            if on_tokens:
                on_tokens(end - begin)
        return torch.cat(parts)

    def _chunk(
        self, ids: Tensor, begin: int, start: int, layers: list[_Layer], policy: CachePolicy
    ) -> Tensor:
        """The logits of tokens at [begin, begin + len(ids)); appends them to `layers`."""
        inner, at = self.model.model, torch.arange(begin, begin + len(ids))
        starts = policy.starts(at)
        rolled = starts > policy.first
        evicted = torch.where(rolled, starts - policy.sinks, 0) * policy.cache_positions
        window_turn, sink_turn = self._turn(at), self._turn(at - evicted)
        end = begin + len(ids)
        num_sinks = min(policy.first, end)
        keys_at = torch.cat([torch.arange(num_sinks), torch.arange(start, max(start, end))])
        sink_ends = torch.where(rolled, policy.sinks, policy.first)[:, None]
        seen = (keys_at < sink_ends) | (keys_at >= starts[:, None])
        seen &= keys_at <= at[:, None]
        hidden = inner.embed_tokens(ids[None])
        for i, (layer, cache) in enumerate(zip(inner.layers, layers)):
            q, k, v = self._project(layer.self_attn, layer.input_layernorm(hidden))
            k = _rotated(k, window_turn)
            split = max(0, min(len(ids), policy.first - begin))  # rows that belong to the sinks
            old, new = (k[:, :split], v[:, :split]), (k[:, split:], v[:, split:])
            cache.sinks = _joined(cache.sinks, old)
            cache.recent = _joined(cache.recent, new)
            sinks = _scores(_rotated(q, sink_turn), cache.sinks[0])
            recent = _scores(_rotated(q, window_turn), cache.recent[0])
            scores = torch.cat([sinks, recent], dim=-1) * layer.self_attn.scaling
            weights = scores.masked_fill_(~seen, float("-inf")).softmax(dim=-1)
            if self.on_attention:
                self.on_attention(i, weights, at, keys_at)
            out = _mixed(weights, torch.cat([cache.sinks[1], cache.recent[1]], dim=1))
            hidden = hidden + layer.self_attn.o_proj(out)[None]
            out = layer.mlp(layer.post_attention_layernorm(hidden))
            hidden = hidden + (out[0] if isinstance(out, tuple) else out)
        return self.model.lm_head(inner.norm(hidden))[0]

    def _project(self, attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, rows, hidden] -> q [heads, rows, dim], k and v [kv_heads, rows, dim], before RoPE."""
        parts = []
        for name in ("q", "k", "v"):
            part = getattr(attention, f"{name}_proj")(x)[0].view(x.shape[1], -1, self.head_dim)
            norm = getattr(attention, f"{name}_norm", None)
            if norm is not None and norm.weight.numel() != self.head_dim:
                raise ValueError("QK-norm over all heads is not supported; choose another model")
            parts.append((part if norm is None else norm(part)).transpose(0, 1))
        return parts[0], parts[1], parts[2]

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.double()[:, None] * self.inv_freq
        scale, dtype = self.rope_scale, self.model.dtype
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _joined(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat([old[0], new[0]], dim=1), torch.cat([old[1], new[1]], dim=1)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[heads, rows, dim], [kv_heads, keys, dim] -> [heads, rows, keys]."""
    grouped = q.reshape(k.shape[0], -1, q.shape[-1])
    return (grouped @ k.transpose(1, 2)).view(q.shape[0], q.shape[1], -1)


def _mixed(weights: Tensor, v: Tensor) -> Tensor:
    """[heads, rows, keys], [kv_heads, keys, dim] -> [rows, heads * dim]."""
    heads, rows, _ = weights.shape
    out = weights.reshape(v.shape[0], -1, weights.shape[-1]) @ v
    return out.view(heads, rows, -1).transpose(0, 1).reshape(rows, -1)


@torch.inference_mode()
def recompute(
    model: Any,
    token_ids: Sequence[int],
    positions: Sequence[int],
    context: int,
    batch: int = 4,
    on_tokens: OnTokens | None = None,
    *,
    marked: bool,
) -> Tensor:
    """Sliding window with recomputation: for each p of `positions`, log p(token_ids[p + 1]) from
    the last `context` tokens up to p, run from scratch at positions 0 onward; `marked`: from one
    fewer, after token_ids[0]. fp32 [positions]; every p >= context - 1."""
    ids, found = torch.tensor(token_ids), []
    for i in range(0, len(positions), batch):
        some = positions[i : i + batch]
        windows = torch.stack([ids[p + 1 - context : p + 1] for p in some])
        if marked:
            windows[:, 0] = ids[0]
        hidden = model.model(windows, use_cache=False).last_hidden_state[:, -1]
        logprobs = model.lm_head(hidden).float().log_softmax(dim=-1)
        found.append(logprobs.gather(1, ids[[p + 1 for p in some]][:, None])[:, 0])
        if on_tokens:
            on_tokens(len(some) * context)
    return torch.cat(found)
