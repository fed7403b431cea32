"""Worker processes for fault runs: a real engine and channel each, forked from one loaded model.

No Ray: a replacement is ready within a second, so that a thousand kills take minutes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import torch

from penstock.workers.channel.server import ChannelServer
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.load import thread_for
from penstock.workers.models.loader import load_model
from penstock.workers.stats import EngineStats, WorkerInfo

CONFIG = EngineConfig(weights="fp32", device="cpu", num_blocks=600, max_num_seqs=16, threads=1)

torch.set_num_threads(1)
# When this module is imported: once, in the process that all workers are forked from.
MODEL = load_model("builtin", weights="fp32", progress=False)


class WorkerProcess:
    """One worker, running. Raises EOFError if it does not start."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process: ForkServerProcess = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self.info: WorkerInfo = self._pipe.recv()

    def stats(self) -> EngineStats:
        """Of the engine, now."""
        self._pipe.send("stats")
        stats: EngineStats = self._pipe.recv()
        return stats

    def send(self, number: signal.Signals) -> None:
        os.kill(self.info.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.send(signal.SIGKILL)
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection) -> None:
    engine = Engine(CONFIG, MODEL)
    channel = ChannelServer("127.0.0.1", "builtin", engine.max_model_len)
    thread = thread_for(engine, channel.deliver, channel.break_off, channel.accepted)
    thread.start()
    channel.start(thread)
    pipe.send(channel.info)
    while True:
        pipe.recv()
        pipe.send(thread.stats())
