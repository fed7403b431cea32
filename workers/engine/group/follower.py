"""One of the other ranks of a group: loads its part, then computes what the first rank says.

`python -m penstock.workers.engine.group.follower PARENT SOCKET_FD`, by leader.py, or HOST:PORT in
place of the socket, by another machine of the group. It ends with its parent, also where it waits
in shared memory, and with the first rank's connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.workers.adapters.step import StepAdapters
from penstock.workers.config import EngineConfig
from penstock.workers.cpu_affinity import keep_to
from penstock.workers.engine.build import block_layout, make_executor
from penstock.workers.engine.draft import draft_executor, load_draft, weight_bytes
from penstock.workers.engine.group import wire
from penstock.workers.engine.group.adapters import HeldAdapters
from penstock.workers.engine.group.far import LOOPBACK, dial, interface_of
from penstock.workers.engine.group.peer import Pulse
from penstock.workers.engine.group.pinning import pinned
from penstock.workers.engine.load import load_configured
from penstock.workers.engine.shortage import named_shortages
from penstock.workers.engine.sizing import step_memory
from penstock.workers.execution.cuda_graphs import CudaCapture, GraphSizes
from penstock.workers.execution.executor import Executor
from penstock.workers.experts.build import settings_in_group
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.memory.kv_format import kv_format
from penstock.workers.models.shards.layers import ShardDecoder
from penstock.workers.models.shards.memory import ExchangeSizes
from penstock.workers.models.shards.rank import Rank
from penstock.workers.scheduling.deferral import scratch_bytes
from penstock.workers.weights.model_digest import verified_folder

log = logging.getLogger("penstock.engine")

PR_SET_PDEATHSIG = 1  # of prctl(2)


def follow(peer: socket.socket) -> None:
    """Until the first rank ends the connection. Raises PeerGone then."""
    kind, contents = wire.receive(peer)
    if kind != wire.SETTINGS:
        raise wire.PeerGone(f"a message of kind {kind} before the settings")
    settings = json.loads(contents)
    device = settings["device"]
    config = pinned(EngineConfig(**settings["config"]), device, settings["place"])
    if config.cores is not None:  # before this thread starts others
        keep_to(config.cores)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    rank = Rank(**{**settings["rank"], "sizes": ExchangeSizes(**settings["rank"]["sizes"])})
    if device == "cuda":
        torch.cuda.set_device(settings["place"])
    try:
        folder = Path(settings["folder"]) if settings["folder"] else verified_folder(config)
        with named_shortages(config.model, device):
            experts = None
            if settings["experts"] is not None:
                experts = settings_in_group(config, Manifest.from_json(settings["experts"]))
            model = load_configured(
                config, folder, device, progress=False, experts=experts, rank=rank
            )
            draft = load_draft(config, folder, device, model, rank=rank)
    except Exception as error:
        wire.send(peer, wire.FAILED, str(error).encode())
        raise
    assert isinstance(model, ShardDecoder) and isinstance(draft, ShardDecoder | None)
    pulse = Pulse(peer)
    pulse.send(wire.READY, str(weight_bytes(model, draft)).encode())
    executor: Executor | None = None
    drafts: Executor | None = None
    host: Tensor | None = None
    adapters = HeldAdapters(model, pulse.send)
    while True:
        kind, contents = wire.receive(peer)
        if kind == wire.STEP and executor is not None:
            _compute(executor, model, contents, adapters.of_step())
        elif kind == wire.DRAFT_STEP and drafts is not None and draft is not None:
            _compute(drafts, draft, contents, None)
        elif kind == wire.LOGITS:
            model.own_logits(int.from_bytes(contents, "little"))
        elif kind == wire.DRAFT_LOGITS and draft is not None:
            draft.own_logits(int.from_bytes(contents, "little"))
        elif kind == wire.MEMORY:
            numbers = json.loads(contents)
            sizes = None if numbers["graphs"] is None else GraphSizes(**numbers.pop("graphs"))
            executor, rest = _executor(
                config, model, numbers["num_blocks"], numbers["max_model_len"], sizes
            )
            arena = executor.memory.arena
            if draft is not None:
                drafts = _of_draft(config, draft, executor, numbers["max_model_len"])
            pulse.send(wire.READY, str(arena.num_blocks * arena.layout.block_bytes).encode())
        elif kind == wire.CAPTURE and executor is not None and sizes is not None:
            executor.graphs = executor.capture(sizes, CudaCapture(), rest)
            pulse.send(wire.READY, b"0")
        elif kind == wire.HOST and executor is not None:
            host = _host_memory(executor, int.from_bytes(contents, "little"))
            pulse.send(wire.READY, str(host.nbytes).encode())
        elif kind in (wire.STORE, wire.LOAD) and executor is not None and host is not None:
            _copy(executor, host, kind, contents)
        elif kind in wire.OF_ADAPTERS:
            adapters.take(kind, contents)
        elif kind == wire.CONNECT:
            is_here = peer.family == socket.AF_UNIX
            model.connect(LOOPBACK if is_here else interface_of(peer.getsockname()[0]))


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
    with executor.memory.lease(len(token_ids)) as workspace:
        executor.hidden(token_ids, positions, inputs, workspace, adapters=adapters)


def _host_memory(executor: Executor, num_slots: int) -> Tensor:
    """A slot for this rank's part of a block each, uint8 [num_slots, block_bytes]."""
    arena = executor.memory.arena
    shape, pin = (num_slots, arena.layout.block_bytes), arena.storage.is_cuda
    return torch.empty(shape, dtype=torch.uint8, pin_memory=pin)


@torch.inference_mode()
def _copy(executor: Executor, host: Tensor, kind: int, contents: bytes) -> None:
    """Between blocks and slots, before the next step is read."""
    block = executor.memory.arena.block
    for source, target in wire.pairs_from(contents):
        if kind == wire.STORE:
            host[target].copy_(block(source))
        else:
            block(target).copy_(host[source])


def _executor(
    config: EngineConfig,
    model: ShardDecoder,
    num_blocks: int,
    max_model_len: int,
    sizes: GraphSizes | None,
) -> tuple[Executor, Tensor]:
    """With the blocks that the first rank has; activations lie apart from them. And the memory of
    the inputs of decode graphs."""
    config = replace(config, num_blocks=num_blocks, kv_cache_gb=None, activation_memory="separate")
    kv = kv_format(config.kv, config.kv_group, model.config.head_dim, model.dtype)
    layout = block_layout(config, model, kv)
    graph_bytes = 0 if sizes is None else sizes.num_bytes
    memory = step_memory(config, layout, model, graph_bytes)
    executor = make_executor(config, model, memory, max_model_len)
    return executor, memory.rest[scratch_bytes(config, layout) :]


def _of_draft(
    config: EngineConfig, draft: ShardDecoder, model: Executor, max_model_len: int
) -> Executor:
    """On the caches of this rank, which `model` has, too."""
    arena, caches = model.memory.arena, model.kv_layers
    return draft_executor(config, draft, arena.layout, arena.num_blocks, caches, max_model_len)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when that one ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(0)


def main() -> None:
    parent, connection = sys.argv[1:]
    _end_with(int(parent))
    secret = sys.stdin.read()  # empty for an inherited socket, which no other process has
    with contextlib.suppress(wire.PeerGone):
        follow(dial(connection, secret) if secret else socket.socket(fileno=int(connection)))


if __name__ == "__main__":
    main()
