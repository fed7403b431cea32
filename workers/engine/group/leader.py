"""The first rank's side of a group: starts the other ranks and sends them each step.

If one of them ends or hangs, this process ends, too: Ray Serve then replaces the worker, and with
it the whole group.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from penstock.workers.config import EngineConfig
from penstock.workers.engine.draft import weight_bytes
from penstock.workers.engine.group import wire
from penstock.workers.engine.group.adapters import AdapterRanks
from penstock.workers.engine.group.far import LOOPBACK, FarRanks, Reception, free_port, interface_of
from penstock.workers.engine.group.peer import Peer
from penstock.workers.engine.group.process import RankProcess, end_with_group
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.experts.neurons.thresholds import Calibration
from penstock.workers.memory.host_tier import HostMirror
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.host_batch import CacheBytes, GroupMemory, GroupStep
from penstock.workers.models.shards.decoder import ShardDecoder
from penstock.workers.models.shards.memory import ExchangeSizes
from penstock.workers.models.shards.rank import MEMORY, Rank
from penstock.workers.stats import ExpertStats


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
        calibration: Calibration | None = None,
    ):
        """Starts them; they load at the same time as this rank. `transport`: as of Rank. `far`: the
        machines that have an equal share of the ranks each. `experts`: of the file that expert
        caches of this machine are filled from. `calibration`: by which all select neurons. Raises
        ConfigError and LoadError."""
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
        self._has_caches = config.expert_cache_gb is not None
        whole = config.enable_expert_parallel or self._has_caches
        self.rank = Rank(0, num_ranks, transport, sizes, descriptor, meeting, num_stages, whole)
        for divides in (self.rank.shard_of, self.rank.stage_of):
            divides(model)  # else this is the place to say so
        self._peers: list[Peer] = []
        self._sending = threading.Lock()  # adapters are loaded by another thread than computes
        self._processes: list[RankProcess] = []
        self._far = far
        self._model: ShardDecoder | None = None
        settings: dict[str, Any] = {"config": asdict(config), "device": device}
        settings["calibration"] = None if calibration is None else calibration.to_json()
        num_here = self.rank.num_all // (1 if far is None else far.num_machines)
        for number in range(1, num_here):
            here = {**settings, "folder": str(folder), "place": number, "experts": _json(experts)}
            self._start({**here, "rank": asdict(self.rank.numbered(number))})
        if far is not None:
            self._start_far(far, num_here, settings)

    def lead(self, model: ShardDecoder, draft: Decoder | None = None) -> None:
        """Wait until the others have loaded, and tell them of what `model` computes from now on,
        and its draft model `draft`, if they have a part of it.

        Raises LoadError if one of them cannot load.
        """
        loaded = [(weight_bytes(model, draft), model.num_scales), *self._await_ready()]
        model.weights_of, model.scales_of = map(list, zip(*loaded, strict=True))
        self._send_all(wire.CONNECT)
        model.connect(LOOPBACK if self._far is None else interface_of(self._far.host))
        self._model = model
        model.on_memory, model.on_host, model.on_close = self._memory, self._begin_host, self.close
        model.on_capture = self._capture
        model.other_ranks = adapters = AdapterRanks(
            self._peers, self._send_all, num_here=len(self._processes)
        )
        model.on_adapters = adapters.before_step
        model.on_experts, model.has_expert_caches = self._use_experts, self._has_caches
        model.others_experts = self._experts_of_others
        if model.routed is not None:
            model.routed.on_prefetch = self._prefetch
        self._tell_of(model, wire.STEP, wire.LOGITS)
        if isinstance(draft, ShardDecoder):
            self._tell_of(draft, wire.DRAFT_STEP, wire.DRAFT_LOGITS)
        for process in self._processes:
            process.is_vital = True
        for peer in self._peers:
            peer.watch(end_with_group)

    def close(self) -> None:
        for process in self._processes:
            process.is_vital = False
        for peer in self._peers:
            peer.close()
        for process in self._processes:
            process.end()
        for machine in () if self._far is None else self._far.machines:
            machine.end()
        if self._model is not None:
            self._model.disconnect()
        if self.rank.descriptor >= 0:
            os.close(self.rank.descriptor)
        self._files.cleanup()

    def _tell_of(self, model: ShardDecoder, step: int, logits: int) -> None:
        """Send the others what `model` computes, by messages of these kinds."""
        model.on_step, model.on_logits = partial(self._step, step), partial(self._logits, logits)
        model.on_broken = self._end_all

    def _start(self, settings: dict[str, Any]) -> None:
        mine, theirs = socket.socketpair()
        inherited = tuple(fd for fd in (theirs.fileno(), self.rank.descriptor) if fd >= 0)
        arguments = (str(os.getpid()), str(theirs.fileno()))
        self._processes.append(RankProcess(*arguments, descriptors=inherited))
        theirs.close()
        self._add(mine, settings, is_here=True)

    def _start_far(self, far: FarRanks, num_each: int, settings: dict[str, Any]) -> None:
        """Those of other machines find the model themselves, where they have it."""
        reception = Reception(far.host)
        try:
            for machine in far.machines:
                for place in range(num_each):
                    machine.start(reception.address, reception.secret)
                    connection = reception.accept()
                    rank = asdict(self.rank.numbered(len(self._peers) + 1))
                    there = {**settings, "folder": "", "place": place, "rank": rank}
                    there["experts"] = _json(machine.experts)
                    self._add(connection, there, is_here=False)
        except BaseException:
            self.close()
            raise
        finally:
            reception.close()

    def _add(self, connection: socket.socket, settings: dict[str, Any], *, is_here: bool) -> None:
        peer = Peer(len(self._peers) + 1, connection, is_here=is_here)
        self._peers.append(peer)
        peer.send(wire.SETTINGS, json.dumps(settings).encode())

    def _use_experts(self, machine: int, manifest: Manifest) -> None:
        """`manifest`: of another epoch of the file on that machine, this one being 0."""
        num_each = self.rank.num_all // (1 if self._far is None else self._far.num_machines)
        numbers = range(machine * num_each, (machine + 1) * num_each)
        self._send_all(wire.EXPERTS, manifest.to_json().encode(), numbers)

    def _experts_of_others(self) -> list[ExpertStats | None]:
        return [peer.experts for peer in self._peers]

    def _prefetch(self, is_on: bool) -> None:
        self._send_all(wire.PREFETCH, bytes([is_on]))

    def _end_all(self) -> None:
        end_with_group("a step of this worker's group has failed half-way")

    def _memory(self, sized: GroupMemory, own: CacheBytes) -> None:
        self._send_all(wire.MEMORY, json.dumps(asdict(sized)).encode())
        assert self._model is not None
        self._model.caches_of = [own, *(CacheBytes(*each) for each in self._await_ready())]

    def _capture(self) -> Callable[[], None]:
        self._send_all(wire.CAPTURE)

        def until_captured() -> None:
            self._await_ready()

        return until_captured

    def _step(self, kind: int, step: GroupStep) -> None:
        self._send_all(kind, wire.step_bytes(step))

    def _begin_host(self, num_slots: int) -> HostMirror:
        self._send_all(wire.HOST, num_slots.to_bytes(8, "little"))
        self._await_ready()
        return self

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """As HostMirror."""
        self._send_all(wire.STORE, wire.pairs_bytes(blocks, slots))

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """As HostMirror."""
        self._send_all(wire.LOAD, wire.pairs_bytes(slots, blocks))

    def _send_all(
        self, kind: int, contents: bytes = b"", numbers: Container[int] | None = None
    ) -> None:
        """To the ranks with these numbers; None: to all."""
        with self._sending:
            for peer in self._peers:
                if numbers is None or peer.number in numbers:
                    peer.send(kind, contents)

    def _logits(self, kind: int, num_rows: int) -> None:
        with self._sending:
            for peer in self._peers[: self.rank.num_ranks - 1]:  # of the first stage
                peer.send(kind, num_rows.to_bytes(8, "little"))

    def _await_ready(self) -> list[Any]:
        """What each says with it."""
        return [peer.await_ready() for peer in self._peers]


def _json(manifest: Manifest | None) -> str | None:
    return None if manifest is None else manifest.to_json()
