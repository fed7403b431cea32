"""The two-query kernels against StreamingLLM as its authors wrote it, without blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import attention, rowwise
from penstock.kernels.types import DecodeBatch, PagedKv, PrefillBatch, Rolling
from tests.kernels.kernel_cases import assert_close, starts_of
from tests.kernels.rolled_cases import INT32, Roll

SCALE = 0.125


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of `x` [T, H, D] at `positions`, as complex numbers in float64."""
    half = x.shape[-1] // 2
    angle = positions.double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def streaming_llm(q: Tensor, k: Tensor, v: Tensor, policy: Roll, first_block: int) -> Tensor:
    """The authors' algorithm: K is cached before rotation, the cache is cut by concatenation, and
    positions are counted inside the cache. `q`, `k`, `v` [T, H, D] with equal heads."""
    keys, values, head, out = k[:0], v[:0], first_block, []
    for t in range(len(q)):
        keys, values = torch.cat((keys, k[t : t + 1])), torch.cat((values, v[t : t + 1]))
        if len(keys) - head > policy.window:
            gone = slice(head + policy.roll, None)
            keys = torch.cat((keys[: policy.sinks], keys[gone]))
            values = torch.cat((values[: policy.sinks], values[gone]))
            head = policy.sinks
        inside = torch.arange(len(keys))
        turned = rotate(keys, inside)
        rotated_q = rotate(q[t : t + 1], inside[-1:])[0]
        weights = (torch.einsum("hd,shd->hs", rotated_q, turned) * SCALE).softmax(-1)
        out.append(torch.einsum("hs,shd->hd", weights, values.double()))
    return torch.stack(out)


@pytest.mark.parametrize("roll", [1, 16, 128])
def test_two_queries_are_streaming_llm(cpu_path, roll):
    """300 tokens decoded one by one, and in chunks, through blocks that are freed and poisoned."""
    policy, bs, length, heads, dim = Roll(4, 128, roll), 16, 300, 4, 32
    q, k, v = torch.randn(3, length, heads, dim)
    expected = streaming_llm(q, k, v, policy, bs).float()
    edges = [policy.edges(t, bs) for t in range(length)]
    at, shift = torch.arange(length), torch.tensor([edge[2] for edge in edges])

    def cos_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
        steps = 10000.0 ** (-torch.arange(dim // 2).double() / (dim // 2))
        angle = positions.double()[:, None] * steps
        return angle.cos().float(), angle.sin().float()

    q_sink = rowwise.rope_to(q, *cos_sin(at - shift), torch.empty_like(q))
    rowwise.rope_(q, k, *cos_sin(at))
    for chunk in (1, 50):
        cache = torch.full((2, 40, heads, bs, dim), float("nan"))
        kv = PagedKv(cache[0], cache[1])
        free, base, y = list(range(40)), 0, torch.empty_like(q)
        table: list[int] = []
        for first in range(0, length, chunk):
            last = min(length, first + chunk)
            for _ in range(edges[first][1] // bs - 1 - base):  # whole pages before the window
                cache[:, table[1]] = float("nan")
                free.append(table.pop(1))
                base += 1
            while len(table) + base < -(-last // bs):
                table.append(free.pop(0))
            slots = [
                table[p // bs if p < bs else p // bs - base] * bs + p % bs
                for p in range(first, last)
            ]
            attention.write_kv(k[first:last], v[first:last], kv, torch.tensor(slots))
            rolling = Rolling(
                q_sink=q_sink[first:last],
                sink_ends=torch.tensor([e[0] for e in edges[first:last]], dtype=INT32),
                window_starts=torch.tensor([e[1] for e in edges[first:last]], dtype=INT32),
                sink_blocks=torch.tensor([1], dtype=INT32),
                bases=torch.tensor([base], dtype=INT32),
                max_visible_len=last - edges[first][1],
            )
            tables, lens = torch.tensor([table], dtype=INT32), torch.tensor([last], dtype=INT32)
            if chunk == 1:
                token = DecodeBatch(tables, lens, last)
                y[first] = attention.decode_attention(
                    q[first:last], kv, token, scale=SCALE, rolling=rolling
                )[0]
            else:
                chunk_of = PrefillBatch(tables, starts_of([last - first]), lens, last - first)
                y[first:last] = attention.prefill_attention(
                    q[first:last], kv, chunk_of, scale=SCALE, rolling=rolling
                )
        assert_close(y, expected)
