"""StreamingLLM the slow way: the oracle for the sink window, one token at a time.

The authors' algorithm (Xiao et al. 2024, arXiv 2309.17453, section 3.2; `modify_llama.py` of their
code): K is kept as it was before RoPE, and each step rotates all of the cache with
arange(kv_len), the query with the last of these positions. Nothing is derived from a formula for
what a token sees: the cache is a list, and what was dropped from it is gone. Runs the modules of a
transformers model (any of the Llama-like families of checkpoints.py). Knows nothing of Penstock:
no kernel, block table, policy or engine is imported here.

Convention: room is made *before* a token is appended, so a token sees at most
ceil(S / bs) * bs + N keys, its own among them. The authors' evaluation evicts after the forward
pass, so theirs sees C + 1 keys: their (start_size=S, recent_size=R), C = S + R, is
SinkWindow(sinks=S, window=R + 1, roll=1, block_size=1) here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# One token's K, rotated at its absolute position, and V, each [kv_heads, head_dim] -> the same.
RoundKV = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SinkWindow:
    """Keep `sinks` tokens and up to `window` newer ones; drop `roll` at once.

    As long as nothing was dropped, all tokens of the sinks' blocks are kept; those beyond `sinks`
    go with the first roll. sinks = 0 is a window only.
    """

    sinks: int
    window: int
    roll: int = 1
    block_size: int = 1

    def __post_init__(self) -> None:
        assert self.sinks >= 0 and 1 <= self.roll <= self.window

    @property
    def first(self) -> int:
        """Tokens in the sinks' blocks."""
        return -(-self.sinks // self.block_size) * self.block_size


def _norms_of(layer: Any) -> list[Callable[[Tensor], Tensor]]:
    """Of a layer, before and after attention, before and after the MLP."""
    names = {
        "glm4": ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
                 "post_mlp_layernorm"),
        "olmo2": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    }.get(layer.self_attn.config.model_type,
          ("input_layernorm", "", "post_attention_layernorm", ""))  # fmt: skip
    return [getattr(layer, name) if name else torch.nn.Identity() for name in names]


class StreamingReference:
    """Feeds a transformers model one token at a time. `window` None keeps everything.

    `round_kv` stands for a cache that stores K rotated at its absolute position in fewer bits: it
    is applied to that K and turned back in fp64; V goes through it as it is.
    """

    def __init__(
        self, model: Any, window: SinkWindow | None = None, round_kv: RoundKV | None = None
    ):
        self.model, self.window, self.round_kv = model, window, round_kv
        config = model.config
        self.head_dim = getattr(config, "head_dim", None)
        self.head_dim = self.head_dim or config.hidden_size // config.num_attention_heads
        kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
        default = getattr(config, "sliding_window", None)
        if not getattr(config, "use_sliding_window", True):
            default = None
        self.layer_windows = [None if kind == "full_attention" else default for kind in kinds]
        rotary = model.model.rotary_emb
        self.inv_freq = rotary.inv_freq.double()
        self.rope_scale = float(rotary.attention_scaling)
        self.num_tokens = 0
        self.num_dropped = 0  # after the sinks' blocks
        self.positions: list[int] = []  # absolute, of what is in the cache
        self.keys: list[list[Tensor]] = [[] for _ in kinds]  # [layer][i]: fp64 [kv_heads, dim]
        self.values: list[list[Tensor]] = [[] for _ in kinds]

    @torch.inference_mode()
    def step(self, token_id: int) -> Tensor:
        """Take one more token -> logits for the next, [vocab] in the model's dtype."""
        self._make_room()
        self.positions.append(self.num_tokens)
        inner = self.model.model
        hidden = inner.embed_tokens(torch.tensor([[token_id]]))  # [1, 1, hidden]
        hidden = hidden * getattr(self.model.config, "embedding_multiplier", 1.0)
        factor = getattr(self.model.config, "residual_multiplier", 1.0)
        for i, layer in enumerate(inner.layers):
            before_attention, after_attention, before_mlp, after_mlp = _norms_of(layer)
            out = self._attend(i, layer.self_attn, before_attention(hidden))
            hidden = hidden + after_attention(out) * factor
            mlp = getattr(layer, "mlp", None) or layer.block_sparse_moe  # Granite's
            out = mlp(before_mlp(hidden))
            out = out[0] if isinstance(out, tuple) else out
            hidden = hidden + after_mlp(out) * factor
        self.num_tokens += 1
        logits = self.model.lm_head(inner.norm(hidden))[0, 0]
        return logits / getattr(self.model.config, "logits_scaling", 1.0)

    def _make_room(self) -> None:
        if self.window is None:
            return
        first, sinks = self.window.first, self.window.sinks
        while self.num_tokens + 1 - self.num_dropped > first + self.window.window:
            self.num_dropped += self.window.roll
        if not self.num_dropped:
            return
        start = first + self.num_dropped
        kept = [i for i, p in enumerate(self.positions) if p < sinks or p >= start]
        self.positions = [self.positions[i] for i in kept]
        for cache in (self.keys, self.values):
            cache[:] = [[entries[i] for i in kept] for entries in cache]

    def _attend(self, index: int, attention: Any, x: Tensor) -> Tensor:
        q, k, v = self._project(attention, x)  # [heads, dim], [kv_heads, dim] twice
        k, v = self._rounded(k, v)
        self.keys[index].append(k)
        self.values[index].append(v)
        place = torch.arange(len(self.positions))  # positions inside the cache
        if not getattr(attention, "use_rope", True):  # SmolLM3
            place = torch.zeros_like(place)
        keys = self._rotate(torch.stack(self.keys[index]), place).to(q.dtype)
        query = self._rotate(q.double()[None], place[-1:])[0].to(q.dtype)
        values = torch.stack(self.values[index]).to(q.dtype)  # [kv_len, kv_heads, dim]
        group = q.shape[0] // k.shape[0]
        keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
        scores = torch.einsum("hd,shd->hs", query, keys) * attention.scaling
        scores.masked_fill_(~self._seen_by_layer(index), float("-inf"))
        if hasattr(attention, "sinks"):  # gpt-oss
            scores = torch.cat([scores, attention.sinks[:, None].to(scores.dtype)], dim=-1)
            values = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, 1))
        out = torch.einsum("hs,shd->hd", scores.softmax(dim=-1), values)
        return attention.o_proj(out.reshape(1, 1, -1))

    def _seen_by_layer(self, index: int) -> Tensor:
        """bool [kv_len]: a model's own window limits all but the sinks' blocks."""
        limit = self.layer_windows[index]
        exempt = 0 if self.window is None else self.window.first
        return torch.tensor(
            [limit is None or p < exempt or self.num_tokens - p < limit for p in self.positions]
        )

    def _project(self, attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Before RoPE. QK-norm over each head (Qwen3) or all of them (OLMoE), then the clip."""
        parts, fused = [], {}
        if hasattr(attention, "qkv_proj"):  # Phi-3
            kv = self.model.config.num_key_value_heads * self.head_dim
            both = attention.qkv_proj(x)[0, 0].split([len(attention.o_proj.weight[0]), kv, kv])
            fused = dict(zip(("q", "k", "v"), both, strict=True))
        for name in ("q", "k", "v"):
            part = fused[name] if fused else getattr(attention, f"{name}_proj")(x)[0, 0]
            norm = getattr(attention, f"{name}_norm", None)
            if norm is not None and norm.weight.numel() == part.numel():
                part = norm(part)
            part = part.view(-1, self.head_dim)
            if norm is not None and norm.weight.numel() == self.head_dim != part.numel():
                part = norm(part)
            clip = getattr(self.model.config, "clip_qkv", None)
            parts.append(part if clip is None else part.clamp(-clip, clip))
        return parts[0], parts[1], parts[2]

    def _rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What the cache gives back of one token's K (before RoPE) and V, in fp64."""
        if self.round_kv is None:
            return k.double(), v.double()
        at = torch.tensor([self.num_tokens])
        stored = self._rotate(k.double()[None], at)[0].to(k.dtype)
        stored, v = self.round_kv(stored, v)
        back = self._rotate(stored.double()[None], -at)[0] / self.rope_scale**2
        return back, v.double()

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE of fp64 `x` [tokens, heads, dim], pairs (i, i + dim/2), of GLM-4 (2i, 2i + 1); its
        scale included. Dimensions without a frequency stay."""
        angles = (positions.double()[:, None] * self.inv_freq)[:, None]  # [tokens, 1, dim/2]
        cos, sin = angles.cos() * self.rope_scale, angles.sin() * self.rope_scale
        rest = x[..., 2 * len(self.inv_freq) :]
        x = x[..., : 2 * len(self.inv_freq)]
        if self.model.config.model_type == "glm4":
            left, right = x[..., 0::2], x[..., 1::2]
            pairs = torch.stack([left * cos - right * sin, right * cos + left * sin], dim=-1)
            return torch.cat([pairs.flatten(-2), rest], dim=-1)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)


def greedy(
    model: Any,
    prompt_ids: Sequence[int],
    num_tokens: int,
    window: SinkWindow | None = None,
    round_kv: RoundKV | None = None,
) -> list[int]:
    """The `num_tokens` ids (>= 1) with which the model goes on, end-of-sequence tokens ignored."""
    reference = StreamingReference(model, window, round_kv)
    for token_id in prompt_ids:
        logits = reference.step(token_id)
    ids = [int(logits.argmax())]
    while len(ids) < num_tokens:
        ids.append(int(reference.step(ids[-1]).argmax()))
    return ids


def logprobs(
    model: Any,
    token_ids: Sequence[int],
    window: SinkWindow | None = None,
    round_kv: RoundKV | None = None,
) -> Tensor:
    """Teacher-forced: entry i is log p(token_ids[i + 1] | what token i sees), fp32 [T - 1]."""
    reference = StreamingReference(model, window, round_kv)
    return torch.stack(
        [
            reference.step(now).float().log_softmax(dim=-1)[after]
            for now, after in pairwise(token_ids)
        ]
    )


def window_only(window: int, roll: int = 1) -> SinkWindow:
    """No sinks: the newest `window` tokens, K and V never computed anew."""
    return SinkWindow(sinks=0, window=window, roll=roll)


@torch.inference_mode()
def sliding_window_recompute(model: Any, token_ids: Sequence[int], context: int) -> Tensor:
    """log p(token_ids[i + 1]) from the last `context` tokens alone, run anew: fp32 [T - 1]."""
    found = []
    for after in range(1, len(token_ids)):
        ids = torch.tensor([list(token_ids[max(0, after - context) : after])])
        logits = model(ids, use_cache=False).logits[0, -1].float()
        found.append(logits.log_softmax(dim=-1)[token_ids[after]])
    return torch.stack(found)


def sliding_window_recompute_greedy(
    model: Any, prompt_ids: Sequence[int], num_tokens: int, context: int
) -> list[int]:
    """Greedy ids where each step runs the last `context` tokens from scratch."""
    ids = list(prompt_ids)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(torch.tensor([ids[-context:]]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(prompt_ids) :]


def int8_rounding(group: int) -> RoundKV:
    """Round trip through int8 with one fp16 scale (amax / 127) for each `group` of dimensions."""

    def round_one(x: Tensor) -> Tensor:
        parts = x.view(x.shape[0], -1, group)
        scale = (parts.abs().amax(dim=-1, keepdim=True) / 127).half().to(x.dtype)
        codes = (parts / scale.clamp_min(1e-12)).round().clamp(-127, 127)
        return (codes * scale).view(x.shape)

    return lambda k, v: (round_one(k), round_one(v))
