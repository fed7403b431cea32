"""Types that the operators and all their backends share: the sequences of a batch, rolled contexts,
the paged KV cache, packed linears, and the parameters of sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Where the contexts of a decode batch lie: one query a sequence. Built once a step, and the
    same for all layers. Raises AssertionError if the tensors do not fit together.

    A context length counts the current token (and the tokens that a rolled sequence dropped). Only
    the entries of a block table that the context needs are read.
    """

    block_tables: Tensor  # int32 [B, max_blocks], any stride over B
    context_lens: Tensor  # int32 [B]
    max_context_len: int  # >= every length; sizes the launch on a GPU

    def __post_init__(self) -> None:
        _check_tables(self.block_tables, self.context_lens)


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Where the contexts of a prefill batch lie: a chunk of queries a sequence. As `DecodeBatch`.

    Chunk b is rows [query_starts[b], query_starts[b+1]) of the queries, and ends at position
    context_lens[b]: the length counts the chunk.
    """

    block_tables: Tensor  # int32 [B, max_blocks], any stride over B
    query_starts: Tensor  # int32 [B + 1]
    context_lens: Tensor  # int32 [B]
    max_query_len: int  # >= the length of every chunk; sizes the launch on a GPU

    def __post_init__(self) -> None:
        _check_tables(self.block_tables, self.context_lens)
        assert self.query_starts.dtype == torch.int32 and self.query_starts.is_contiguous()
        assert self.query_starts.numel() == self.context_lens.numel() + 1


def _check_tables(tables: Tensor, lens: Tensor) -> None:
    assert tables.dtype == lens.dtype == torch.int32
    assert tables.size(0) == lens.numel() and lens.is_contiguous()
    assert tables.stride(1) == 1 or not tables.numel()


@dataclass(frozen=True)
class Rolling:
    """Sequences that keep their first tokens (the sinks) and a window, and have dropped the pages
    between: StreamingLLM (Xiao et al. 2023, section 3.2) without moving a key.

    Rows (R) are those of q in this call, sequences (B) those of the block tables. Positions are
    absolute. The query at position t sees key p <= t if p < sink_end or p >= window_start (the
    layer's own window further limits the second). K is stored rotated at its absolute position, so
    a key before sink_end, whose position in the rolled cache is lower, is scored with `q_sink`: the
    query rotated by as many positions less as were dropped.

    A page is block_size positions. The first `sink_blocks` table entries hold the pages from 0 on;
    a later page p lies in entry p - base. All four 0 mean full context: such a sequence may stand
    in the same batch, and has the same bits as without `rolling`.
    """

    q_sink: Tensor  # [R, H, D], any stride over R
    sink_ends: Tensor  # int32 [R], at most window_starts
    window_starts: Tensor  # int32 [R]
    sink_blocks: Tensor  # int32 [B]
    bases: Tensor  # int32 [B], pages dropped between the sinks and the window
    max_visible_len: int  # >= context_len - window_start of every row; sizes the launch on a GPU

    def check(self, q: Tensor, context_lens: Tensor) -> None:
        """What every backend relies on. Raises AssertionError."""
        q_sink, ends, starts = self.q_sink, self.sink_ends, self.window_starts
        sink_blocks, bases = self.sink_blocks, self.bases
        assert rows_are_dense(q_sink) and q_sink.shape == q.shape and q_sink.dtype == q.dtype
        assert ends.numel() == starts.numel() == q.shape[0]
        assert sink_blocks.numel() == bases.numel() == context_lens.numel()
        assert ends.dtype == starts.dtype == sink_blocks.dtype == bases.dtype == torch.int32
        assert ends.is_contiguous() and starts.is_contiguous()
        assert sink_blocks.is_contiguous() and bases.is_contiguous()


def rows_are_dense(x: Tensor) -> bool:
    """Whether each row of `x` [T, H, D] is contiguous; the stride over T is free."""
    _, num_heads, head_dim = x.shape
    _, head_stride, stride = x.stride()
    return stride == 1 and (head_stride == head_dim or num_heads == 1)


QUANTISED = {torch.int8: 1, torch.float8_e4m3fn: 2}  # as the native library numbers them


@dataclass(frozen=True, slots=True)
class KvScales:
    """fp16 scales of a quantised cache, one for each `group` values along the head dimension.

    Each is [num_blocks, num_kv_heads, block_size, head_dim / group], a view with any stride over
    the blocks and dense blocks. The scales of a slot that was never written may be anything.
    """

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class PagedKv:
    """The paged KV cache of one layer.

    `k` and `v` are [num_blocks, num_kv_heads, block_size, head_dim], views with any stride over the
    blocks and dense blocks. A token's slot is block_id * block_size + offset. A slot that was never
    written may hold anything: it is never read.

    A cache of int8 or float8_e4m3fn holds codes, and `scales` the value of a code of 1 (see
    `quant.py`); the queries, keys and values of a call have the model's dtype all the same.

    `scratch` holds further blocks of the same layout elsewhere in memory (deferred KV commits write
    there): block id num_blocks + i is scratch block i, in slots and in block tables.
    """

    k: Tensor
    v: Tensor
    scales: KvScales | None = None
    scratch: PagedKv | None = None

    def with_scratch(self, scratch: PagedKv) -> PagedKv:
        """The same cache with `scratch` as its further blocks."""
        return PagedKv(self.k, self.v, self.scales, scratch)

    def check(self, dtype: torch.dtype) -> None:
        """What every backend relies on, for a model of `dtype`. Raises AssertionError."""
        k, v, scales, scratch = self.k, self.v, self.scales, self.scratch
        assert k.dtype == v.dtype
        assert k.dtype == dtype if scales is None else k.dtype in QUANTISED
        if scales is not None:
            for cache, per_group in ((k, scales.k), (v, scales.v)):
                assert per_group.dtype == torch.float16 and per_group.shape[:3] == cache.shape[:3]
                assert cache.shape[3] % per_group.shape[3] == 0 and per_group[0].is_contiguous()
            assert scales.k.shape == scales.v.shape
        if scratch is not None:
            _check_same_blocks(k, scratch.k)
            _check_same_blocks(v, scratch.v)
            assert (scales is None) == (scratch.scales is None)
            if scales is not None and scratch.scales is not None:
                _check_same_blocks(scales.k, scratch.scales.k)
                _check_same_blocks(scales.v, scratch.scales.v)


def _check_same_blocks(blocks: Tensor, scratch: Tensor) -> None:
    assert scratch.shape[1:] == blocks.shape[1:] and scratch.stride()[1:] == blocks.stride()[1:]
    assert scratch.dtype == blocks.dtype


# Of a gated MLP, in the order in which the native library numbers them. gelu_tanh: GELU as it is
# approximated by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2).
Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of each row, fp64 [R] on the CPU.

    inverse_temperature 0: the likeliest token, whatever else is set. top_k 0, top_p 1, min_p 0:
    off. Each filter sees what the one before has left; equal logits at an edge all stay.
    uniform in [0, 1) is the row's random number.
    """

    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


# Which CPU path, decided here alone. Microseconds, lowest of interleaved runs, weights out of
# cache, one core of an AMD EPYC (Zen 4, AVX-512, BF16), torch 2.13:
#
#   dtype  K x N         M   F.linear  oneDNN prepacked  native  MKL prepacked
#   bf16   896 x 4864    1       1009               657     429
#                        4       1193               600     451
#                       16       1665              1022     894
#          4864 x 896   64       3191              2786    2586
#                      512      21133             20509   19864
#          896 x 32000   1       6352              3862    2317
#   fp32   896 x 4864    1       1270              1166     740            818
#                        4       2026              1011     748           1923
#                       16       3128              1762    1440           2911
#                       64       7352              5464    5097           7194
#                      512      46370             40201   39539
#
# With two threads native reads bf16 weights at 27-38 GB/s for M <= 4, all that this memory gives.
# It also sums each element in one order whatever M is, which the others do not, so that a token's
# result does not depend on its batch-mates. Hence: native wherever it could be compiled.
#
# Quantised weights, the same on one core of an Intel Xeon at 2.5 GHz (AVX-512 without VNNI), rows
# in fp32; torch's int8 operators leave out part of the work (linear_dynamic has one scale for all
# rows and 7 bits, qlinear is given codes):
#
#   format K x N         M   native  linear_dynamic  onednn.qlinear  _weight_int4pack_mm
#   int8   896 x 4864    1      532             694             775
#                        4      603             720             795
#                       16     1178            1197            1328
#          896 x 1024   64      992            1055             941
#   int4   896 x 4864    1      416                                                  423
#                        4      536                                                  700
#                       16     1584                                                 2601
#          896 x 1024   64     1181                                                 2173
#
# Where torch leads at M = 16 and 64 (by 16 % at most, 4864 x 896) it does so with 7 bits and one
# scale for all rows, which makes a row depend on its batch-mates, or with int16 sums that overflow
# without VNNI. Hence again: native at every M, no crossover between operators. For few rows the
# codes are unpacked in registers as they stream by, for several tiles of rows once for all.
#
# Between formats there is a crossover. Rows in bf16, one core of that Xeon (2026-11-22):
#
#   K x N           M    int4    int8    bf16    fp32
#   896 x 4864      1     292     458     939    1611
#                   4     471     498    1069    1801
#                  16    1474    1041    2613    2533
#                  64    4958    3712   10367    5961
#                 256   19362   14394   39965   19261
#   2048 x 8192     1    1009    1677    3469    6288
#                  16    5368    3871   10305   10861
#                  64   19641   13461   53083   27684
#                 256   73566   50706  175001   98422
#
# int4 leads up to M = 4, int8 (by 1.3 to 1.5) from 16 on. An int4 weight stays with its path all
# the same: opened once into bf16 or fp32 it would be no faster at any M, and through the int8 path
# rows of large batches would be rounded to 8 bits: a token would depend on its batch-mates.
#
# With AMX (one core of a Xeon, Sapphire Rapids, 2026-11-22), 896 x 4864, against the best of torch:
#
#   format   M   native   torch        M   native   torch
#   bf16     1      819    1404       64     1073    1306
#   int8     1      431     698       64     1145    1925
#   int4     1      263     321       64     5086    9894
#
# `benchmarks/kernels/matmul.py` measures against torch again.
Layout = Literal["native", "onednn", "plain", "triton"]


LinearFormat = Literal[
    "fp32", "bf16", "fp16", "int8", "int4", "nf4", "fp8", "int8g", "fp8g", "mxfp4"
]
FLOAT_FORMATS: dict[torch.dtype, LinearFormat] = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight [N, K] in the form that `linear` reads fastest, and its bias [N] or None.

    `payload` is that form, and `layout` names the kernels that read it. `num_bytes` is read in one
    pass over the weight: codes, scales and zeros, or plain elements. `takes_int8`: it multiplies
    int8 rows, and quantises others; `group`: inputs of such rows that share a scale; None: a row's;
    `hadamard`: they are transformed before they are rounded.
    """

    payload: Any
    bias: Tensor | None
    in_features: int
    out_features: int
    num_bytes: int
    format: LinearFormat
    layout: Layout
    group: int | None = None
    takes_int8: bool = False
    hadamard: bool = False

    @property
    def row_form(self) -> tuple[int | None, bool] | None:
        """`group` and `hadamard` of the int8 rows that it multiplies; None: it takes plain rows."""
        return (self.group, self.hadamard) if self.takes_int8 else None

    @classmethod
    def of_floats(
        cls, payload: Any, weight: Tensor, bias: Tensor | None, layout: Layout
    ) -> PackedLinear:
        """`payload`: what `layout` makes of the plain `weight` [N, K]."""
        num_outputs, num_inputs = weight.shape
        num_bytes, format = weight.numel() * weight.element_size(), FLOAT_FORMATS[weight.dtype]
        return cls(payload, bias, num_inputs, num_outputs, num_bytes, format, layout)


@dataclass(frozen=True, slots=True, eq=False)
class PartialSums:
    """Sums over neurons that come in several calls, which share `so_far`."""

    so_far: Tensor  # fp32 [n, hidden], dense, in any state before the first call
    begins: bool  # this is the first call
    is_last: bool  # only this one writes `out`
