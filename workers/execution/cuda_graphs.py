"""Batches of decode rows as one CUDA graph instead of kernel by kernel.

A graph is captured once, at the start, for a number of rows and contexts up to some length; it
reads its inputs at fixed addresses, in the reserve. A step with fewer rows is padded: the added
rows see one key of block 0, write nowhere, and their results are not read. Capturing has not yet
been run on a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.moe.mlp import GroupedExperts
from penstock.kernels.types import DecodeBatch, PrefillBatch
from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError
from penstock.workers.memory.workspace import Array, BufferPlan
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.host_batch import HostBatch
from penstock.workers.models.layers import AttentionInputs
from penstock.workers.models.moe import MoeMlp
from penstock.workers.sampling.device_copy import copy_in

log = logging.getLogger("penstock.engine")

MAX_ROWS = 256  # with more, kernels take so long that launching them is hidden
FEW_ROWS = (1, 2, 4, 8, 16)  # then multiples of 16
MIN_LENGTH = 2048  # tokens of context; graphs for longer ones launch more programs without keys
LENGTH_FACTOR = 8  # from one length to the next
MAX_KEYS = (
    1 << 22
)  # rows x length of a graph: more take long, and their partial results much memory
WARM_UPS = 2  # runs before a capture: they compile kernels and create library handles

Run = Callable[[Tensor, Tensor, AttentionInputs], None]  # token ids, positions, the rest
Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The graphs of an engine: one for each of `rows` with each of `lengths`, both ascending, but
    none of more than MAX_KEYS."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    table_width: int

    @classmethod
    def of(cls, max_rows: int, max_len: int, block_size: int) -> GraphSizes:
        most = min(max_rows, MAX_ROWS)
        rows = [*FEW_ROWS, *range(2 * FEW_ROWS[-1], most, FEW_ROWS[-1])]
        lengths = [MIN_LENGTH]
        while lengths[-1] < max_len:
            lengths.append(lengths[-1] * LENGTH_FACTOR)
        return cls(
            (*(each for each in rows if each < most), most),
            (*lengths[:-1], max_len),
            -(-max_len // block_size),
        )

    @property
    def graphs(self) -> list[tuple[int, int]]:
        """Rows and length of each, ascending."""
        pairs = [(rows, length) for rows in self.rows for length in self.lengths]
        return [(rows, length) for rows, length in pairs if rows * length <= MAX_KEYS]

    def graph_for(self, num_rows: int, longest: int) -> tuple[int, int] | None:
        """The smallest graph for `num_rows` and contexts of up to `longest` tokens, or None."""
        rows = next((each for each in self.rows if each >= num_rows), None)
        length = next((each for each in self.lengths if each >= longest), None)
        if rows is None or length is None or rows * length > MAX_KEYS:
            return None
        return rows, length

    @property
    def inputs(self) -> BufferPlan:
        """The arrays that the graphs read."""
        wide = [Array(name, 1, torch.int64) for name in ("token_ids", "positions", "slots")]
        narrow = [
            Array("decode_lens", 1, torch.int32),
            Array("decode_tables", self.table_width, torch.int32),
        ]
        return BufferPlan((((*wide, *narrow),),))

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays, in the reserve."""
        return self.inputs.bytes_for(self.rows[-1])


class DecodeGraphs:
    """The captured graphs of one executor, and the buffers that they read."""

    def __init__(self, sizes: GraphSizes, run: Run, capture: Capture, memory: Tensor):
        """`run` writes logits to their fixed place; `memory`, uint8, holds the inputs."""
        self.sizes = sizes
        self.num_replays = 0
        views = sizes.inputs.views(sizes.rows[-1], memory)
        self.token_ids = views["token_ids"].squeeze(1)
        self._positions = views["positions"].squeeze(1)
        self._slots = views["slots"].squeeze(1)
        self._lens = views["decode_lens"].squeeze(1)
        self._tables = views["decode_tables"]
        self._tables.zero_()
        self._replays: dict[tuple[int, int], Replay] = {}
        for rows, length in reversed(sizes.graphs):  # memory of the largest is reused by the others
            self._pad(rows)
            self._replays[rows, length] = capture(self._step(run, rows, length))

    def takes(self, batch: HostBatch) -> bool:
        """Whether a graph computes `batch`: decode rows only, with full context."""
        num_rows = len(batch.decode_lens)
        return (
            0 < num_rows == len(batch.token_ids)
            and batch.rolling is None
            and batch.decode_tables.shape[1] <= self.sizes.table_width
            and self.sizes.graph_for(num_rows, int(batch.decode_lens.max())) is not None
        )

    def fill(self, batch: HostBatch) -> Replay:
        """Copy `batch`, for which `takes` is true, into the buffers; returns what computes it.

        `token_ids` may still be changed before that is called.
        """
        graph = self.sizes.graph_for(len(batch.decode_lens), int(batch.decode_lens.max()))
        assert graph is not None, "`takes` was true"
        rows = graph[0]
        copy_in(_padded(batch.token_ids, rows, 0), self.token_ids[:rows])
        copy_in(_padded(batch.positions, rows, 0), self._positions[:rows])
        copy_in(_padded(batch.slots, rows, -1), self._slots[:rows])
        copy_in(_padded(batch.decode_lens, rows, 1), self._lens[:rows])
        tables = _padded(batch.decode_tables, rows, 0)
        copy_in(tables, self._tables[:rows, : tables.shape[1]])
        self.num_replays += 1
        return self._replays[graph]

    def _pad(self, rows: int) -> None:
        """Make all rows padding: a run then leaves the KV pool unchanged."""
        self.token_ids[:rows].zero_()
        self._positions[:rows].zero_()
        self._slots[:rows].fill_(-1)
        self._lens[:rows].fill_(1)

    def _step(self, run: Run, rows: int, length: int) -> Callable[[], None]:
        nothing = self._lens[:0]
        start = torch.zeros(1, dtype=torch.int32, device=nothing.device)
        inputs = AttentionInputs(
            slots=self._slots[:rows],
            num_decode=rows,
            decode=DecodeBatch(self._tables[:rows], self._lens[:rows], length),
            prefill=PrefillBatch(nothing[:, None], start, nothing, max_query_len=0),
        )
        return lambda: run(self.token_ids[:rows], self._positions[:rows], inputs)


def _padded(values: NDArray[np.generic], rows: int, value: int) -> Tensor:
    """`values` [N, ...] padded with `value` to `rows` rows."""
    whole = np.full((rows, *values.shape[1:]), value, dtype=values.dtype)
    whole[: len(values)] = values
    return torch.from_numpy(whole)


class CudaCapture:
    """Captures into one memory pool: graphs run one after another and keep nothing in it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: threads that copy experts and KV blocks may continue meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay


def graph_sizes(config: EngineConfig, model: Decoder, captures: bool) -> GraphSizes | None:
    """Sizes of an engine's graphs; None if it has none. Raises ConfigError.

    `captures`: it was given a Capture, and so has graphs on any device.
    """
    if not (captures or wants_graphs(config, model)):
        return None
    max_len = config.max_model_len or model.config.max_position_embeddings
    return GraphSizes.of(config.max_sampled_rows, max_len, config.block_size)


def wants_graphs(config: EngineConfig, model: Decoder) -> bool:
    """Whether decode graphs are captured. Raises ConfigError if they must be and cannot."""
    if config.cuda_graphs == "off":
        return False
    problem = unsupported_reason(model)
    if problem is not None and config.cuda_graphs == "on":
        raise ConfigError(f"cuda_graphs cannot be on: {problem}; leave it on auto")
    return problem is None


def unsupported_reason(model: Decoder) -> str | None:
    """Why the steps of `model` cannot be captured, or None."""
    if model.device.type != "cuda":
        return "this worker computes on a CPU"
    if model.whole_config.has_states:
        return "its linear attention has states, whose slots change with each step"
    if model.has_expert_caches:
        return "experts come out of a cache (expert_cache_gb), as the host finds out in each step"
    mlps = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeMlp)]
    if not all(isinstance(mlp.experts, GroupedExperts) for mlp in mlps):
        return "the host runs its experts one after another"
    return None


def captured(make: Callable[[], DecodeGraphs], is_needed: bool) -> DecodeGraphs | None:
    """The graphs that `make` captures; logs their time and memory.

    If that fails: None, or the error where it `is_needed`. Without graphs, steps are slower only.
    """
    began_s, is_cuda = time.perf_counter(), torch.cuda.is_available()
    free = torch.cuda.mem_get_info()[0] if is_cuda else 0
    try:
        graphs = make()
    except Exception:
        if is_needed:
            raise
        log.exception("decode graphs could not be captured; continuing without them")
        return None
    taken = free - torch.cuda.mem_get_info()[0] if is_cuda else 0
    log.info(
        "captured %d decode graphs in %.1f s: %s rows, contexts up to %s tokens; %.1f MiB of "
        "inputs in the reserve, and %.1f MiB outside the arena",
        len(graphs.sizes.graphs),
        time.perf_counter() - began_s,
        ", ".join(map(str, graphs.sizes.rows)),
        ", ".join(map(str, graphs.sizes.lengths)),
        graphs.sizes.num_bytes / 2**20,
        taken / 2**20,
    )
    return graphs
