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

from penstock.kernels.delta_types import DeltaState
from penstock.workers.config import EngineConfig
from penstock.workers.cpu_affinity import keep_to
from penstock.workers.engine.build import block_layout, make_executor
from penstock.workers.engine.group import wire
from penstock.workers.engine.group.far import LOOPBACK, dial, interface_of
from penstock.workers.engine.load import load_configured
from penstock.workers.engine.shortage import named_shortages
from penstock.workers.engine.sizing import step_memory
from penstock.workers.engine.state_memory import state_memory
from penstock.workers.execution.executor import Executor
from penstock.workers.experts.build import settings_in_group
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.memory.kv_format import kv_format
from penstock.workers.models.shards.layers import ShardDecoder
from penstock.workers.models.shards.memory import ExchangeSizes
from penstock.workers.models.shards.rank import Rank
from penstock.workers.weights.model_digest import verified_folder

log = logging.getLogger("penstock.engine")

PR_SET_PDEATHSIG = 1  # of prctl(2)


def follow(peer: socket.socket) -> None:
    """Until the first rank ends the connection. Raises PeerGone then."""
    kind, contents = wire.receive(peer)
    if kind != wire.SETTINGS:
        raise wire.PeerGone(f"a message of kind {kind} before the settings")
    settings = json.loads(contents)
    config = EngineConfig(**settings["config"])
    if config.cores is not None:  # those of all ranks, before this thread starts others
        keep_to(config.cores)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    rank = Rank(**{**settings["rank"], "sizes": ExchangeSizes(**settings["rank"]["sizes"])})
    device = settings["device"]
    if device == "cuda":
        torch.cuda.set_device(settings["gpu"])
    try:
        folder = Path(settings["folder"]) if settings["folder"] else verified_folder(config)
        with named_shortages(config.model, device):
            experts = None
            if settings["experts"] is not None:
                experts = settings_in_group(config, Manifest.from_json(settings["experts"]))
            model = load_configured(
                config, folder, device, progress=False, experts=experts, rank=rank
            )
    except Exception as error:
        wire.send(peer, -1, str(error).encode())
        raise
    assert isinstance(model, ShardDecoder)
    wire.send_json(peer, wire.READY, model.weights.num_bytes)
    executor: Executor | None = None
    host: Tensor | None = None
    while True:
        kind, contents = wire.receive(peer)
        if kind == wire.STEP and executor is not None:
            _compute(executor, contents)
        elif kind == wire.LOGITS:
            model.own_logits(int.from_bytes(contents, "little"))
        elif kind == wire.MEMORY:
            executor = _executor(config, model, *json.loads(contents))
            wire.send_json(peer, wire.READY, _cache_bytes(executor))
        elif kind == wire.HOST and executor is not None:
            host = _host_memory(executor, int.from_bytes(contents, "little"))
            wire.send_json(peer, wire.READY, host.nbytes)
        elif kind in (wire.STORE, wire.LOAD) and executor is not None and host is not None:
            _copy(executor, host, kind, contents)
        elif kind == wire.CONNECT:
            is_here = peer.family == socket.AF_UNIX
            model.connect(LOOPBACK if is_here else interface_of(peer.getsockname()[0]))


@torch.inference_mode()
def _compute(executor: Executor, contents: bytes) -> None:
    token_ids, positions, inputs = wire.step_from(contents, executor.model.device)
    with executor.memory.lease(len(token_ids)) as workspace:
        executor.hidden(token_ids, positions, inputs, workspace)


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
    config: EngineConfig, model: ShardDecoder, num_blocks: int, max_model_len: int, num_slots: int
) -> Executor:
    """With the blocks that the first rank has, and its slots for states (0: the model has none);
    activations lie apart from them."""
    config = replace(
        config,
        num_blocks=num_blocks,
        num_state_slots=num_slots or None,
        kv_cache_gb=None,
        activation_memory="separate",
    )
    kv = kv_format(config.kv, config.kv_group, model.config.head_dim, model.dtype)
    memory = step_memory(config, block_layout(config, model, kv), model)
    return make_executor(config, model, memory, max_model_len, state_memory(config, model))


def _cache_bytes(executor: Executor) -> tuple[int, int]:
    """Of K and V, and of recurrent states."""
    arena = executor.memory.arena
    states = [each for each in executor.kv_layers if isinstance(each, DeltaState)]
    state_bytes = states[0].last.untyped_storage().nbytes() if states else 0
    return arena.num_blocks * arena.layout.block_bytes, state_bytes


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
