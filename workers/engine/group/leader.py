"""The first rank's side of a group: starts the other ranks and sends them each step.

If one of them ends, this process ends, too: Ray Serve then replaces the worker, and with it the
whole group.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.workers.config import EngineConfig
from penstock.workers.engine.group import wire
from penstock.workers.errors import LoadError
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.layers import AttentionInputs
from penstock.workers.models.shards.layers import ShardDecoder
from penstock.workers.models.shards.memory import ExchangeSizes
from penstock.workers.models.shards.rank import MEMORY, Rank
from penstock.workers.models.shards.shard import Shard

log = logging.getLogger("penstock.engine")

EXIT_STATUS = 70  # of this process, if another rank has ended
END_S = 5.0  # for the others to end


class Leader:
    """The other ranks of this process's group. `close` ends them."""

    def __init__(self, config: EngineConfig, folder: Path, device: str, transport: str):
        """Starts them; they load at the same time as this rank. `transport`: as of Rank. Raises
        ConfigError."""
        model, num_ranks = ModelConfig.from_pretrained(folder), config.tensor_parallel_size
        Shard(model, 0, num_ranks)  # checks that the model can be cut so
        sizes = ExchangeSizes(config.max_num_batched_tokens, config.max_sampled_rows)
        self._files = tempfile.TemporaryDirectory(prefix="penstock-group-")
        descriptor = -1
        if transport == MEMORY:
            descriptor = os.memfd_create("penstock-group")
            os.ftruncate(descriptor, sizes.bytes_of(model, num_ranks))
        store = str(Path(self._files.name) / "store")
        self.rank = Rank(0, num_ranks, transport, sizes, descriptor, store)
        self._peers: list[socket.socket] = []
        self._processes: list[_Process] = []
        self._weight_bytes: list[int] = []  # of all ranks
        self._model: ShardDecoder | None = None
        settings = {"config": asdict(config), "folder": str(folder), "device": device}
        for number in range(1, num_ranks):
            self._start({**settings, "rank": asdict(replace(self.rank, number=number))})

    def lead(self, model: ShardDecoder) -> None:
        """Wait until the others have loaded, and tell them of what `model` computes from now on.

        Raises LoadError if one of them cannot load.
        """
        self._weight_bytes = [model.weights.num_bytes, *self._await_ready()]
        for peer in self._peers:
            wire.send(peer, wire.CONNECT)
        model.exchange.connect()
        self._model = model
        model.on_memory, model.on_step, model.on_logits = self._memory, self._step, self._logits
        model.on_broken, model.on_close = self._end_all, self.close
        for process in self._processes:
            process.is_vital = True

    def close(self) -> None:
        for process in self._processes:
            process.is_vital = False
        for peer in self._peers:
            peer.close()  # a rank that waits for a message ends
        for process in self._processes:
            process.end()
        if self._model is not None:
            self._model.exchange.close()
        if self.rank.descriptor >= 0:
            os.close(self.rank.descriptor)
        self._files.cleanup()

    def _start(self, settings: dict[str, Any]) -> None:
        mine, theirs = socket.socketpair()
        command = [sys.executable, "-m", "penstock.workers.engine.group.follower"]
        numbers = (theirs.fileno(), os.getpid())
        inherited = [fd for fd in (theirs.fileno(), self.rank.descriptor) if fd >= 0]
        self._processes.append(_Process([*command, *map(str, numbers)], tuple(inherited)))
        theirs.close()
        wire.send_json(mine, wire.SETTINGS, settings)
        self._peers.append(mine)

    def _end_all(self) -> None:
        log.error("a step of this worker's group has failed half-way: the worker ends")
        os._exit(EXIT_STATUS)

    def _memory(self, num_blocks: int, max_model_len: int, block_bytes: int) -> None:
        for peer in self._peers:
            wire.send_json(peer, wire.MEMORY, [num_blocks, max_model_len])
        kv_bytes = [num_blocks * block_bytes, *self._await_ready()]
        assert self._model is not None
        self._model.memory_of = list(zip(self._weight_bytes, kv_bytes))

    def _step(self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs) -> None:
        contents = wire.step_bytes(token_ids, positions, inputs)
        for peer in self._peers:
            wire.send(peer, wire.STEP, contents)

    def _logits(self, num_rows: int) -> None:
        for peer in self._peers:
            wire.send(peer, wire.LOGITS, num_rows.to_bytes(8, "little"))

    def _await_ready(self) -> list[int]:
        """The number that each says with it."""
        found = []
        for number, peer in enumerate(self._peers, 1):
            try:
                kind, contents = wire.receive(peer)
            except wire.PeerGone as error:
                raise LoadError(
                    f"rank {number} of the group has ended while it loaded; its log says why"
                ) from error
            if kind != wire.READY:
                raise LoadError(f"rank {number} of the group: {contents.decode(errors='replace')}")
            found.append(int(json.loads(contents)))
        return found


class _Process:
    """One of the other ranks, and the thread that started it and waits for its end.

    That thread lives as long as the process: the kernel kills the process when its thread ends,
    which is with this process (follower.py asks for that), even if it has been stopped.
    """

    def __init__(self, command: list[str], descriptors: tuple[int, ...]):
        self.is_vital = False  # without it, this process ends
        self._command, self._descriptors = command, descriptors
        self._is_started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-rank", daemon=True)
        self._thread.start()
        self._is_started.wait()

    def end(self) -> None:
        self._thread.join(END_S)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def _run(self) -> None:
        self._process = subprocess.Popen(
            self._command, pass_fds=self._descriptors, stdin=subprocess.DEVNULL
        )
        self._is_started.set()
        status = self._process.wait()
        if self.is_vital:
            log.error(
                "a rank of this worker's group has ended with status %d: the worker ends", status
            )
            os._exit(EXIT_STATUS)
