"""What another rank does at each message of the first one."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from penstock.kernels.delta_types import DeltaState
from penstock.workers.adapters.step import StepAdapters
from penstock.workers.config import EngineConfig
from penstock.workers.engine.build import block_layout, make_executor
from penstock.workers.engine.draft import draft_executor, weight_bytes
from penstock.workers.engine.group import wire
from penstock.workers.engine.group.adapters import HeldAdapters
from penstock.workers.engine.group.far import LOOPBACK, interface_of
from penstock.workers.engine.group.peer import Pulse
from penstock.workers.engine.sizing import RankSizes, step_memory
from penstock.workers.engine.state_memory import state_memory
from penstock.workers.errors import InvariantError, LoadError
from penstock.workers.execution.cuda_graphs import CudaCapture, GraphSizes
from penstock.workers.execution.executor import Executor
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.experts.modes import StepRows
from penstock.workers.memory.kv_format import kv_format
from penstock.workers.models.host_batch import CacheBytes, GroupMemory
from penstock.workers.models.shards.decoder import ShardDecoder
from penstock.workers.scheduling.deferral import scratch_bytes

log = logging.getLogger("penstock.engine")


class Commands:
    """One rank, with its part of a model and perhaps of the draft model, which it runs when told.

    Messages come in the order in which the first rank computes, and are done in it.
    """

    def __init__(
        self,
        peer: socket.socket,
        config: EngineConfig,
        model: ShardDecoder,
        draft: ShardDecoder | None,
    ):
        """Tells the first rank that it has loaded."""
        self._peer, self._config, self._model, self._draft = peer, config, model, draft
        self._pulse = Pulse(peer, model.expert_stats)
        self._adapters = HeldAdapters(model, self._pulse.send)
        self._memory: GroupMemory | None = None
        self._graph_inputs = torch.empty(0, dtype=torch.uint8)  # memory for them
        self._executors: dict[int, Executor] = {}  # by the kind of the steps that they compute
        self._host: Tensor | None = None
        self._handlers: dict[int, Callable[[bytes], None]] = {
            wire.CONNECT: self._connect,
            wire.MEMORY: self._take_memory,
            wire.CAPTURE: self._capture,
            wire.STEP: self._step,
            wire.LOGITS: self._logits,
            wire.DRAFT_STEP: self._draft_step,
            wire.DRAFT_LOGITS: self._draft_logits,
            wire.HOST: self._take_host_memory,
            wire.STORE: self._store,
            wire.LOAD: self._load,
            wire.EXPERTS: self._use_experts,
            wire.PREFETCH: self._prefetch,
        }
        self._answer((weight_bytes(model, draft), model.num_scales))

    def run(self) -> None:
        """Until the first rank ends the connection. Raises PeerGone then."""
        while True:
            kind, contents = wire.receive(self._peer)
            if kind in wire.OF_ADAPTERS:
                self._adapters.take(kind, contents)
            else:
                self._handlers[kind](contents)

    def _answer(self, value: int | tuple[int, ...]) -> None:
        self._pulse.send(wire.READY, json.dumps(value).encode())

    def _connect(self, contents: bytes) -> None:
        is_here = self._peer.family == socket.AF_UNIX
        self._model.connect(LOOPBACK if is_here else interface_of(self._peer.getsockname()[0]))

    def _take_memory(self, contents: bytes) -> None:
        memory = GroupMemory(**json.loads(contents))
        executor, self._graph_inputs = _executor(self._config, self._model, memory)
        self._memory, self._executors[wire.STEP] = memory, executor
        arena, caches = executor.memory.arena, executor.kv_layers
        if self._draft is not None:  # on the caches of the model
            self._executors[wire.DRAFT_STEP] = draft_executor(
                self._config, self._draft, arena.layout, arena.num_blocks, caches,
                memory.max_model_len,
            )  # fmt: skip
        states = [each for each in caches if isinstance(each, DeltaState)]
        state_bytes = states[0].last.untyped_storage().nbytes() if states else 0
        kv_bytes = arena.num_blocks * arena.layout.block_bytes
        self._answer(CacheBytes(kv_bytes, state_bytes, arena.reserve_bytes))

    def _capture(self, contents: bytes) -> None:
        memory, executor = self._memory, self._executors[wire.STEP]
        if memory is None or memory.graphs is None:
            raise InvariantError("decode graphs were not announced with the memory")
        sizes = GraphSizes(**memory.graphs)
        executor.graphs = executor.capture(sizes, CudaCapture(), self._graph_inputs)
        self._answer(len(sizes.graphs))

    def _step(self, contents: bytes) -> None:
        _compute(self._executors[wire.STEP], self._model, contents, self._adapters.of_step())

    def _logits(self, contents: bytes) -> None:
        self._model.own_logits(int.from_bytes(contents, "little"))

    def _draft_step(self, contents: bytes) -> None:
        assert self._draft is not None
        _compute(self._executors[wire.DRAFT_STEP], self._draft, contents, None)

    def _draft_logits(self, contents: bytes) -> None:
        assert self._draft is not None
        self._draft.own_logits(int.from_bytes(contents, "little"))

    def _use_experts(self, contents: bytes) -> None:
        """From the next step on. Other experts than before are refused: the old ones stay."""
        if self._model.routed is not None:
            try:
                self._model.routed.use_experts(Manifest.from_json(contents))
            except LoadError as error:
                log.warning("%s", error)

    def _prefetch(self, contents: bytes) -> None:
        if self._model.routed is not None:
            self._model.routed.prefetch = bool(contents[0])

    def _take_host_memory(self, contents: bytes) -> None:
        """A slot for this rank's part of a block each."""
        arena, num_slots = (
            self._executors[wire.STEP].memory.arena,
            int.from_bytes(contents, "little"),
        )
        shape, pin = (num_slots, arena.layout.block_bytes), arena.storage.is_cuda
        self._host = torch.empty(shape, dtype=torch.uint8, pin_memory=pin)
        self._answer(self._host.nbytes)

    @torch.inference_mode()
    def _store(self, contents: bytes) -> None:
        """From blocks to slots, before the next step is read."""
        assert self._host is not None
        block = self._executors[wire.STEP].memory.arena.block
        for source, target in wire.pairs_from(contents):
            self._host[target].copy_(block(source))

    @torch.inference_mode()
    def _load(self, contents: bytes) -> None:
        """From slots to blocks, likewise."""
        assert self._host is not None
        block = self._executors[wire.STEP].memory.arena.block
        for source, target in wire.pairs_from(contents):
            block(target).copy_(self._host[source])


@torch.inference_mode()
def _compute(
    executor: Executor, model: ShardDecoder, contents: bytes, adapters: StepAdapters | None
) -> None:
    step = wire.step_from(contents)
    batch, graphs = step.batch, executor.graphs
    if step.is_graph:
        assert graphs is not None, "the first rank has captured them, too"
        replay = graphs.fill(batch)
        if step.shares_ids:
            model.take_ids(graphs.token_ids[: len(batch.token_ids)])
        replay()
        return
    token_ids, positions = executor.put(batch.token_ids), executor.put(batch.positions)
    inputs = batch.inputs(executor.put)
    if step.shares_ids:
        model.take_ids(token_ids)
    rows = None if step.modes is None else StepRows.with_modes(step.modes, model.device)
    with executor.memory.lease(len(token_ids)) as workspace:
        executor.hidden(token_ids, positions, inputs, workspace, rows, adapters)


def _executor(
    config: EngineConfig, model: ShardDecoder, sized: GroupMemory
) -> tuple[Executor, Tensor]:
    """The executor, with as many blocks and state slots as the first rank has; and the memory for
    the inputs of decode graphs."""
    config = replace(
        config,
        num_blocks=sized.num_blocks,
        num_state_slots=sized.num_slots or None,
        kv_cache_gb=None,
    )
    kv = kv_format(config.kv, config.kv_group, model.config.head_dim, model.dtype)
    layout = block_layout(config, model, kv)
    graph_bytes = 0 if sized.graphs is None else GraphSizes(**sized.graphs).num_bytes
    memory = step_memory(config, model, [RankSizes(model.plan, layout)], graph_bytes)
    states = state_memory(config, model)
    executor = make_executor(config, model, memory, sized.max_model_len, states)
    return executor, memory.rest[scratch_bytes(config, layout) :]
