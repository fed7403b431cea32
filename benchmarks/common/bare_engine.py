"""The engine with nothing around it, for benchmarks, and a model of half a billion parameters.

The caller runs the servers that it is compared with.
"""

from __future__ import annotations

import json
import queue
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from benchmarks.engine.offline import model_b_config, save_random_checkpoint
from penstock.deployments.bench.figures import Chunk, Outcome
from penstock.deployments.bench.open_loop import BenchCall
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.thread import EngineThread
from penstock.workers.request import Delta, Request, SamplingParams
from penstock.workers.weights.hub import resolve_model


class BareEngine:
    """The engine and its thread, with nothing around them."""

    def __init__(self, engine: Engine, threads: int, cores: Collection[int] | None = None):
        self._inbox: queue.SimpleQueue[tuple[float, list[Delta]]] = queue.SimpleQueue()
        self._thread = EngineThread(engine, self._deliver, num_threads=threads, cores=cores)
        self._thread.start()
        self._num_sent = 0

    def run(self, calls: Sequence[BenchCall], concurrency: int) -> list[Outcome]:
        """Serve `calls`, `concurrency` at once; times as seen after the thread's queue."""
        waiting = list(reversed(calls))
        running: dict[str, Outcome] = {}
        done: list[Outcome] = []
        for _ in range(min(concurrency, len(waiting))):
            self._send(waiting.pop(), running)
        while running:
            now_s, deltas = self._inbox.get()
            for delta in deltas:
                outcome = running[delta.request_id]
                outcome.chunks.append(Chunk(now_s, 0, len(delta.token_ids)))
                if delta.finish_reason is not None:
                    outcome.ended_s, outcome.error = now_s, delta.error
                    done.append(running.pop(delta.request_id))
                    if waiting:
                        self._send(waiting.pop(), running)
        return done

    def stop(self) -> None:
        self._thread.stop()

    def _send(self, call: BenchCall, running: dict[str, Outcome]) -> None:
        self._num_sent += 1
        name = f"bare-{self._num_sent}"
        assert not isinstance(call.prompt, str), "an engine takes token ids, not text"
        params = SamplingParams(temperature=0.0, max_tokens=call.max_tokens, ignore_eos=True)
        running[name] = Outcome(call.job, sent_s=time.perf_counter())
        self._thread.submit(Request(name, tuple(call.prompt), params))

    def _deliver(self, deltas: list[Delta]) -> None:
        self._inbox.put((time.perf_counter(), deltas))


def make_model_b(folder: Path) -> str:
    """A checkpoint of that shape, and a tokenizer that has a text for each of its token ids."""
    config = model_b_config()
    save_random_checkpoint(folder, torch.bfloat16)
    builtin = Path(resolve_model("builtin"))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (builtin / name).exists():
            shutil.copy(builtin / name, folder)
    tokenizer = json.loads((builtin / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    taken = {*vocab.values(), *(each["id"] for each in tokenizer["added_tokens"])}
    vocab |= {f"Ġw{i}": i for i in range(config.vocab_size) if i not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)
