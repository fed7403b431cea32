"""The first rank's side of a group: starts the other ranks and sends them each step.

If one of them ends, this process ends, too: Ray Serve then replaces the worker, and with it the
whole group.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.workers.config import EngineConfig
from penstock.workers.engine.group import wire
from penstock.workers.engine.group.far import LOOPBACK, FarRanks, Reception, free_port, interface_of
from penstock.workers.engine.group.process import RankProcess, end_with_group
from penstock.workers.errors import LoadError
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.memory.host_tier import HostMirror
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.layers import AttentionInputs
from penstock.workers.models.shards.layers import ShardDecoder
from penstock.workers.models.shards.memory import ExchangeSizes
from penstock.workers.models.shards.rank import MEMORY, Rank

WATCH_S = 1.0


class Leader:
    """The other ranks of this process's group. `close` ends them."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        device: str,
        transport: str,
        far: FarRanks | None = None,
        experts: Manifest | None = None,
    ):
        """Starts them; they load at the same time as this rank. `transport`: as of Rank. `far`: the
        machines that have an equal share of the ranks each. `experts`: of the file that expert
        caches are filled from. Raises ConfigError and LoadError."""
        model, num_ranks = ModelConfig.from_pretrained(folder), config.tensor_parallel_size
        num_stages = config.pipeline_parallel_size
        sizes = ExchangeSizes(config.max_num_batched_tokens, config.max_sampled_rows)
        self._files = tempfile.TemporaryDirectory(prefix="penstock-group-")
        descriptor = -1
        if transport == MEMORY:
            descriptor = os.memfd_create("penstock-group")
            os.ftruncate(descriptor, num_stages * sizes.bytes_of(model, num_ranks))
        meeting = f"file://{self._files.name}/store"
        if far is not None:
            meeting = f"tcp://{far.host}:{free_port(far.host)}"
        self.rank = Rank(0, num_ranks, transport, sizes, descriptor, meeting, num_stages)
        for divides in (self.rank.shard_of, self.rank.stage_of):
            divides(model)  # else this is the place to say so
        self._peers: list[socket.socket] = []
        self._processes: list[RankProcess] = []
        self._far = far
        self._weight_bytes: list[int] = []  # of all ranks
        self._model: ShardDecoder | None = None
        self._is_closing = False
        manifest = None if experts is None else experts.to_json()
        settings = {"config": asdict(config), "device": device, "experts": manifest}
        num_here = self.rank.num_all // (1 if far is None else far.num_machines)
        for number in range(1, num_here):
            here = {**settings, "folder": str(folder), "gpu": number}
            self._start({**here, "rank": asdict(replace(self.rank, number=number))})
        if far is not None:
            self._start_far(far, num_here, settings)

    def lead(self, model: ShardDecoder) -> None:
        """Wait until the others have loaded, and tell them of what `model` computes from now on.

        Raises LoadError if one of them cannot load.
        """
        self._weight_bytes = [model.weights.num_bytes, *self._await_ready()]
        for peer in self._peers:
            wire.send(peer, wire.CONNECT)
        model.connect(LOOPBACK if self._far is None else interface_of(self._far.host))
        self._model = model
        model.on_memory, model.on_step, model.on_logits = self._memory, self._step, self._logits
        model.on_host = self._begin_host
        model.on_broken, model.on_close = self._end_all, self.close
        for process in self._processes:
            process.is_vital = True
        for number in range(len(self._processes) + 1, self.rank.num_all):
            threading.Thread(target=self._watch, args=(number,), daemon=True).start()

    def close(self) -> None:
        self._is_closing = True
        for process in self._processes:
            process.is_vital = False
        for peer in self._peers:
            peer.close()  # a rank that waits for a message ends
        for process in self._processes:
            process.end()
        for machine in () if self._far is None else self._far.machines:
            machine.end()
        if self._model is not None:
            self._model.disconnect()
        if self.rank.descriptor >= 0:
            os.close(self.rank.descriptor)
        self._files.cleanup()

    def _start(self, settings: dict[str, Any]) -> None:
        mine, theirs = socket.socketpair()
        inherited = tuple(fd for fd in (theirs.fileno(), self.rank.descriptor) if fd >= 0)
        arguments = (str(os.getpid()), str(theirs.fileno()))
        self._processes.append(RankProcess(*arguments, descriptors=inherited))
        theirs.close()
        wire.send_json(mine, wire.SETTINGS, settings)
        self._peers.append(mine)

    def _start_far(self, far: FarRanks, num_each: int, settings: dict[str, Any]) -> None:
        """Those of other machines find the model themselves, where they have it."""
        reception = Reception(far.host)
        try:
            for machine in far.machines:
                for gpu in range(num_each):
                    machine.start(reception.address, reception.secret)
                    peer = reception.accept()
                    number = len(self._peers) + 1
                    rank = asdict(replace(self.rank, number=number))
                    wire.send_json(
                        peer, wire.SETTINGS, {**settings, "folder": "", "gpu": gpu, "rank": rank}
                    )
                    self._peers.append(peer)
        except BaseException:
            self.close()
            raise
        finally:
            reception.close()

    def _watch(self, number: int) -> None:
        """End this process with a rank of another machine, which says little once it has loaded."""
        with contextlib.suppress(OSError):
            while self._peers[number - 1].recv(1, socket.MSG_PEEK):
                time.sleep(WATCH_S)  # its answer to a change of memory, which is read elsewhere
        if not self._is_closing:
            end_with_group(f"rank {number} of this worker's group, on another machine, has ended")

    def _end_all(self) -> None:
        end_with_group("a step of this worker's group has failed half-way")

    def _memory(
        self, num_blocks: int, max_model_len: int, num_slots: int, own: tuple[int, int]
    ) -> None:
        for peer in self._peers:
            wire.send_json(peer, wire.MEMORY, [num_blocks, max_model_len, num_slots])
        of_caches = [own, *self._await_ready()]  # bytes of K and V, and of states
        assert self._model is not None
        self._model.memory_of = [
            (weights, *caches) for weights, caches in zip(self._weight_bytes, of_caches)
        ]

    def _step(self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs) -> None:
        self._send_all(wire.STEP, wire.step_bytes(token_ids, positions, inputs))

    def _begin_host(self, num_slots: int) -> HostMirror:
        for peer in self._peers:
            wire.send(peer, wire.HOST, num_slots.to_bytes(8, "little"))
        self._await_ready()
        return self

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """As HostMirror."""
        self._send_all(wire.STORE, wire.pairs_bytes(blocks, slots))

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """As HostMirror."""
        self._send_all(wire.LOAD, wire.pairs_bytes(slots, blocks))

    def _send_all(self, kind: int, contents: bytes) -> None:
        for peer in self._peers:
            wire.send(peer, kind, contents)

    def _logits(self, num_rows: int) -> None:
        for peer in self._peers[: self.rank.num_ranks - 1]:  # of the first stage
            wire.send(peer, wire.LOGITS, num_rows.to_bytes(8, "little"))

    def _await_ready(self) -> list[Any]:
        """What each says with it."""
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
            found.append(json.loads(contents))
        return found
