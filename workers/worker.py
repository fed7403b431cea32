"""One worker: model, engine, engine thread, and the channel that ingresses connect to.

No Ray: deployments/worker/replica.py puts a `Worker` under Serve's supervision. Tokens travel over
the channel alone. Importing this file loads no torch; `Worker.load` does.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.workers.channel.encrypted import TlsSource
from penstock.workers.channel.server import Announce, ChannelServer
from penstock.workers.config import EngineConfig
from penstock.workers.experts.expert_file import Manifest, RowSource
from penstock.workers.gguf.header import headers_kept
from penstock.workers.progress import Report
from penstock.workers.stats import AdapterChange, WorkerInfo
from penstock.workers.weights.model_digest import model_digest, verified_folder

if TYPE_CHECKING:
    from penstock.workers.adapters.table import AdapterTable
    from penstock.workers.engine.group.far import FarRanks
    from penstock.workers.engine.thread import EngineThread
    from penstock.workers.models.decoder import Decoder

log = logging.getLogger("penstock.worker")

# An ingress without a connection to this worker learns of the drain from the registry, at its next
# heartbeat: two heartbeats of an ingress, and the time of a message.
DRAIN_NOTICE_S = 1.5


class Worker:
    """A loaded model that serves requests: `load`, `check_health` every few seconds, `drain`,
    `stop`."""

    def __init__(
        self,
        channel: ChannelServer,
        engine_thread: EngineThread,
        model: Decoder,
        adapters: AdapterTable | None = None,
    ):
        """Starts both. `model`: what the engine computes with. `adapters`: its LoRA adapters; None:
        they are off.

        Raises RuntimeError if the channel's port cannot be opened.
        """
        self._channel = channel
        self._engine_thread = engine_thread
        self._model = model
        self._adapters = adapters
        engine_thread.start()
        channel.start(engine_thread)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        model_name: str,
        host: str,
        announce: Announce | None = None,
        experts: Manifest | None = None,
        remote_experts: RowSource | None = None,
        tls: TlsSource | None = None,
        report: Report | None = None,
        far: FarRanks | None = None,
        changes: Sequence[AdapterChange] = (),
    ) -> Worker:
        """Load the model and open a port on `host`. Raises LoadError, ConfigError, RuntimeError.

        `announce`: as for ChannelServer. `experts`: manifest of the node's expert store; None: an
        expert cache, if there is one, has its own file. `remote_experts`: reads the experts of a
        store on another node. `tls`: as for ChannelServer. `report`: told of download and loading.
        `far`: other machines with ranks of its group. `changes`: of its adapters, since the
        configuration.
        """
        from penstock.workers.adapters.changes import adapter_fields  # these load torch
        from penstock.workers.engine.load import load_engine, thread_for

        with headers_kept():
            digest = model_digest(verified_folder(config, report))
            log.info("model %s: digest %s", config.model, digest)
            engine = load_engine(config, experts, remote_experts, report, far)
        model, adapters = engine.model, engine.adapters
        own = {} if adapters is None else adapter_fields(adapters, changes)
        channel = ChannelServer(
            host,
            model_name,
            engine.max_model_len,
            announce,
            weights=model.weights.format,
            numerics=config.numerics,
            weight_bytes=sum(each.weight_bytes for each in model.ranks())
            or model.weights.num_bytes,
            model_digest=digest,
            engine=engine.facts,
            tls=tls,
        )
        channel.info = replace(channel.info, **own)
        # If the engine fails, its requests end at once; Serve's health check, which replaces this
        # worker, comes later.
        engine_thread = thread_for(
            engine, channel.deliver, on_failure=channel.break_off, on_accepted=channel.accepted
        )
        # Objects made while loading live as long as the worker; scanning them would delay steps.
        gc.collect()
        gc.freeze()
        return cls(channel, engine_thread, model, adapters)

    @property
    def info(self) -> WorkerInfo:
        return self._channel.info

    def check_health(self) -> None:
        """Raise RuntimeError unless requests that arrive now would be answered."""
        if not self._engine_thread.alive:
            raise RuntimeError("the engine thread has ended")
        if not self._channel.alive:
            raise RuntimeError("the channel's thread has ended")
        if self._engine_thread.is_stuck:
            raise RuntimeError(
                f"no token was computed for {self._engine_thread.stalled_s:.0f} s, although there "
                "is work"
            )

    def change_adapters(self, changes: Sequence[AdapterChange]) -> None:
        """Load and drop adapters, and tell of it with the next heartbeat. Blocks while it reads."""
        if self._adapters is not None:
            from penstock.workers.adapters.changes import adapter_fields

            self._channel.update_info(**adapter_fields(self._adapters, changes, self.info))

    def hottest_experts(self, at_most: int) -> list[tuple[int, int, int]]:
        """(layer, expert, number of steps that needed it), the most needed first."""
        routed = self._model.routed
        return [] if routed is None else routed.hottest(at_most)

    def warm_experts(self, keys: Sequence[tuple[int, int]]) -> None:
        """Load these experts, (layer, expert), as far as the expert cache has room."""
        if self._model.routed is not None:
            self._model.routed.cache.warm(keys)

    def use_experts(self, manifest: Manifest, machine: int = 0) -> None:
        """Read the same experts from another epoch of the store of `machine`, which is another one
        than 0 for ranks elsewhere. Raises LoadError if they are others."""
        self._model.use_experts(manifest, machine)
        self._engine_thread.renew_stats()

    def drain(self, at_most_s: float) -> int:
        """Accept no new request; return when all requests have ended, or after `at_most_s`.

        Blocks. Returns the number of unfinished requests.
        """
        self._channel.drain()
        began_s = time.monotonic()
        notice_s = min(DRAIN_NOTICE_S, at_most_s)
        while (waited_s := time.monotonic() - began_s) < at_most_s:
            if waited_s >= notice_s and not self._channel.num_requests:
                break
            time.sleep(0.05)
        return self._channel.num_requests

    def stop(self) -> None:
        """Drop all requests, and stop."""
        self._channel.stop()
        self._engine_thread.stop()
