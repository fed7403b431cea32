"""Steps in which everybody decodes one token, as one CUDA graph instead of kernel by kernel.

A graph is captured once, at the start, for so many rows and for contexts up to some length; it
reads its inputs at fixed addresses, in the reserve. A step with fewer rows is padded: the rows
added see one key of block 0, write nowhere, and nobody reads what comes out. Knows batches and
buffers; nothing of sequences. Capturing has not yet been run on a GPU.
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

from penstock.kernels.moe import GroupedExperts
from penstock.workers.config import EngineConfig
from penstock.workers.device_copy import copy_in
from penstock.workers.errors import ConfigError
from penstock.workers.execution.batch import HostBatch
from penstock.workers.memory.workspace import Array, BufferPlan
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import AttentionInputs
from penstock.workers.models.moe import MoeMlp

log = logging.getLogger("penstock.engine")

MOST_ROWS = 256  # beyond, kernels take so long that launching them is hidden
FEW_ROWS = (1, 2, 4, 8, 16)  # then every 16
SHORTEST = 2048  # tokens of context; graphs for longer ones launch more programs that find no keys
LONGER = 8  # times, from one length to the next
MOST_KEYS = 1 << 22  # of a graph, rows x length: more take long, and their parts much memory
WARM_UPS = 2  # runs before a capture: kernels are compiled, libraries make their handles

Run = Callable[[Tensor, Tensor, AttentionInputs], None]  # token ids, positions, the rest
Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """What graphs there are: one for each of `rows` with each of `lengths`, both ascending, but
    for those of more than MOST_KEYS."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    table_width: int

    @classmethod
    def of(cls, max_num_seqs: int, max_len: int, block_size: int) -> GraphSizes:
        most = min(max_num_seqs, MOST_ROWS)
        rows = [*FEW_ROWS, *range(2 * FEW_ROWS[-1], most, FEW_ROWS[-1])]
        lengths = [SHORTEST]
        while lengths[-1] < max_len:
            lengths.append(lengths[-1] * LONGER)
        return cls(
            (*(each for each in rows if each < most), most),
            (*lengths[:-1], max_len),
            -(-max_len // block_size),
        )

    @property
    def graphs(self) -> list[tuple[int, int]]:
        """Rows and length of each, ascending."""
        pairs = [(rows, length) for rows in self.rows for length in self.lengths]
        return [(rows, length) for rows, length in pairs if rows * length <= MOST_KEYS]

    def graph_for(self, num_rows: int, longest: int) -> tuple[int, int] | None:
        """The smallest graph for so many rows and contexts up to `longest` tokens."""
        rows = next((each for each in self.rows if each >= num_rows), None)
        length = next((each for each in self.lengths if each >= longest), None)
        if rows is None or length is None or rows * length > MOST_KEYS:
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
        """Of the arrays, in the reserve."""
        return self.inputs.bytes_for(self.rows[-1])


class DecodeGraphs:
    """The captured steps of one executor, and the buffers that they read."""

    def __init__(self, sizes: GraphSizes, run: Run, capture: Capture, memory: Tensor):
        """`run` computes logits to where they always are; `memory`, uint8, holds the inputs."""
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
        for rows, length in reversed(sizes.graphs):  # the largest ones leave room for the others
            self._pad(rows)
            self._replays[rows, length] = capture(self._step(run, rows, length))

    def takes(self, batch: HostBatch) -> bool:
        """Whether a graph computes `batch`: decode rows alone, that see all of their past."""
        num_rows = len(batch.decode_lens)
        return (
            0 < num_rows == len(batch.token_ids)
            and batch.rolling is None
            and batch.decode_tables.shape[1] <= self.sizes.table_width
            and self.sizes.graph_for(num_rows, int(batch.decode_lens.max())) is not None
        )

    def fill(self, batch: HostBatch) -> Replay:
        """Put `batch`, which `takes` has let through, into the buffers; what computes it then.

        `token_ids` may still be changed before.
        """
        graph = self.sizes.graph_for(len(batch.decode_lens), int(batch.decode_lens.max()))
        assert graph is not None, "`takes` has let it through"
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
        """As if all rows had been added: whatever runs now leaves the KV pool as it is."""
        self.token_ids[:rows].zero_()
        self._positions[:rows].zero_()
        self._slots[:rows].fill_(-1)
        self._lens[:rows].fill_(1)

    def _step(self, run: Run, rows: int, length: int) -> Callable[[], None]:
        nothing = self._lens[:0]
        inputs = AttentionInputs(
            slots=self._slots[:rows],
            num_decode=rows,
            decode_tables=self._tables[:rows],
            decode_lens=self._lens[:rows],
            max_decode_len=length,
            prefill_tables=nothing[:, None],
            prefill_starts=torch.zeros(1, dtype=torch.int32, device=nothing.device),
            prefill_lens=nothing,
            max_prefill_chunk=0,
            max_prefill_len=0,
        )
        return lambda: run(self.token_ids[:rows], self._positions[:rows], inputs)


def _padded(values: NDArray[np.generic], rows: int, value: int) -> Tensor:
    """`values` [N, ...] with rows of `value` behind them, `rows` in all."""
    whole = np.full((rows, *values.shape[1:]), value, dtype=values.dtype)
    whole[: len(values)] = values
    return torch.from_numpy(whole)


class CudaCapture:
    """Captures into one pool of memory: graphs run one after another, and keep nothing in it."""

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
        # Threads that copy experts and KV blocks may go on beside.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay


def graph_sizes(config: EngineConfig, model: Decoder, captures: bool) -> GraphSizes | None:
    """Of the graphs of one engine, if it `captures` or should; else None. Raises ConfigError."""
    if not (captures or wants_graphs(config, model)):
        return None
    max_len = config.max_model_len or model.config.max_position_embeddings
    return GraphSizes.of(config.max_num_seqs, max_len, config.block_size)


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
    if model.routed is not None:
        return "experts come out of a cache (expert_cache_gb), as the host finds out in each step"
    mlps = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeMlp)]
    if not all(isinstance(mlp.experts, GroupedExperts) for mlp in mlps):
        return "the host runs its experts one after another"
    return None


def captured(make: Callable[[], DecodeGraphs], is_needed: bool) -> DecodeGraphs | None:
    """The graphs that `make` captures, with what they take in the log.

    None if that fails, unless it `is_needed`: without graphs, everything works as well.
    """
    began_s, is_cuda = time.perf_counter(), torch.cuda.is_available()
    free = torch.cuda.mem_get_info()[0] if is_cuda else 0
    try:
        graphs = make()
    except Exception:
        if is_needed:
            raise
        log.exception("decode graphs could not be captured; going on without")
        return None
    taken = free - torch.cuda.mem_get_info()[0] if is_cuda else 0
    log.info(
        "captured %d decode graphs in %.1f s: %s rows, contexts up to %s tokens; %.1f MiB of "
        "inputs in the reserve, and %.1f MiB beside the arena",
        len(graphs.sizes.graphs),
        time.perf_counter() - began_s,
        ", ".join(map(str, graphs.sizes.rows)),
        ", ".join(map(str, graphs.sizes.lengths)),
        graphs.sizes.num_bytes / 2**20,
        taken / 2**20,
    )
    return graphs
