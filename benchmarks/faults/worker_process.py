"""Worker processes for fault runs: a real engine and channel each, forked from one loaded model.

No Ray: a replacement is ready within a second, so that a thousand kills take minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from benchmarks.faults.child import Child, answer
from penstock.workers.channel.server import ChannelServer
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.load import thread_for
from penstock.workers.engine.thread import EngineThread
from penstock.workers.models.loader import load_model
from penstock.workers.stats import EngineStats, WorkerInfo

CONFIG = EngineConfig(weights="fp32", device="cpu", num_blocks=600, max_num_seqs=16, threads=1)

torch.set_num_threads(1)
# When this module is imported: once, in the process that all workers are forked from.
MODEL = load_model("builtin", weights="fp32", progress=False)


@dataclass(frozen=True)
class WorkerParts:
    """What lives in a worker process."""

    engine: Engine
    channel: ChannelServer
    thread: EngineThread


class WorkerProcess(Child[WorkerParts]):
    """One worker, running. Raises EOFError if it does not start."""

    def __init__(
        self, config: EngineConfig = CONFIG, prepare: Callable[[WorkerParts], None] | None = None
    ) -> None:
        """`prepare`, a function of a module, is called in the process before it serves."""
        super().__init__(_serve, config, prepare)
        self.info: WorkerInfo = self.greeting

    def stats(self) -> EngineStats:
        """Of the engine, now."""
        stats: EngineStats = self.ask(_stats)
        return stats


def _stats(parts: WorkerParts) -> EngineStats:
    return parts.thread.stats()


def _serve(
    pipe: Connection, config: EngineConfig, prepare: Callable[[WorkerParts], None] | None
) -> None:
    engine = Engine(config, MODEL)
    channel = ChannelServer("127.0.0.1", "builtin", engine.max_model_len)
    thread = thread_for(engine, channel.deliver, channel.break_off, channel.accepted)
    parts = WorkerParts(engine, channel, thread)
    if prepare is not None:
        prepare(parts)
    thread.start()
    channel.start(thread)
    pipe.send(channel.info)
    answer(pipe, parts)
