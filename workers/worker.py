"""One worker: model, engine, engine thread, and the channel that ingresses hold on to.

Ray supervises from outside (deployments/app.py makes a Serve deployment of `Worker`); tokens go
over the channel alone. Clients of this file do not all compute, so only `Worker` loads torch.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence

from penstock.workers.channel.server import Announce, ChannelServer
from penstock.workers.config import EngineConfig
from penstock.workers.cpu_affinity import allowed_cores, kept_to
from penstock.workers.experts.expert_file import Manifest, RowSource
from penstock.workers.stats import WorkerInfo

STALL_S = 60.0  # no step ends for so long although there is work: the engine hangs


class Worker:
    """One worker's life: load the model, open the channel, be checked, stop.

    Making one takes as long as loading does, and raises what loading raises.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model_name: str,
        host: str,
        announce: Announce | None = None,
        experts: Manifest | None = None,
        remote_experts: RowSource | None = None,
    ):
        """`experts`: of the store; None: an expert cache, if there is one, has its own.
        `remote_experts`: how to reach them where the store is on another node."""
        if config.threads is not None:  # before torch looks at it
            os.environ["OMP_NUM_THREADS"] = str(config.threads)
        import torch

        from penstock.workers.engine.engine import Engine
        from penstock.workers.engine.thread import EngineThread
        from penstock.workers.experts.build import settings_of
        from penstock.workers.models.loader import load_model
        from penstock.workers.structured.grammar import GrammarCompiler
        from penstock.workers.text.tokenizer import Tokenizer
        from penstock.workers.weights.hub import resolve_model

        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        cores = config.cores
        # Loading computes, too: on all cores, for nobody is being served yet.
        with kept_to(None if cores is None else cores | allowed_cores()):
            model = load_model(
                config.model,
                weights=config.weights,
                quantize_o=config.quantize_o,
                quantize_lm_head=config.quantize_lm_head,
                device=device,
                progress=False,
                experts=settings_of(config, experts, remote_experts),
            )
            engine = Engine(config, model)
        self._routed = model.routed
        self._channel = ChannelServer(
            host,
            model_name,
            engine.max_model_len,
            announce,
            weights=model.weights.format,
            weight_bytes=model.weights.num_bytes,
        )
        grammars = GrammarCompiler(
            lambda: Tokenizer.load(resolve_model(config.model)).to_json(),
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.config.eos_token_ids,
        )
        # Whoever waits for an engine that has failed hears of it now; Serve's health check, which
        # replaces this worker, comes later.
        self._engine_thread = EngineThread(
            engine,
            self._channel.deliver,
            num_threads=config.threads,
            cores=cores,
            grammars=grammars,
            on_failure=self._channel.break_off,
        )
        # What is here by now stays; looking through it again and again would hold up steps.
        gc.collect()
        gc.freeze()
        self._engine_thread.start()
        self._channel.start(self._engine_thread)

    @property
    def info(self) -> WorkerInfo:
        return self._channel.info

    def check_health(self) -> None:
        """Raise RuntimeError unless requests that come in now would be answered."""
        if not self._engine_thread.alive:
            raise RuntimeError("the engine thread has ended")
        if not self._channel.alive:
            raise RuntimeError("the channel's thread has ended")
        if self._engine_thread.stalled_s > STALL_S:
            raise RuntimeError(
                f"no engine step has ended for {STALL_S:.0f} s, though there is work"
            )

    def hottest_experts(self, at_most: int) -> list[tuple[int, int, int]]:
        """(layer, expert, steps that needed it), the most wanted first."""
        return [] if self._routed is None else self._routed.hottest(at_most)

    def warm_experts(self, keys: Sequence[tuple[int, int]]) -> None:
        """Load these experts, (layer, expert), as far as their cache has room."""
        if self._routed is not None:
            self._routed.cache.warm(keys)

    def use_experts(self, manifest: Manifest) -> None:
        """Load experts from another epoch of the same. Raises LoadError if they are others."""
        if self._routed is not None:
            cache = self._routed.cache
            cache.use_source(cache.copier.source.at(manifest))

    def stop(self, drain_s: float = 0.0) -> None:
        """End: wait until nothing runs, at most for `drain_s`; drop what still does."""
        deadline_s = time.monotonic() + drain_s
        while self._channel.num_requests and time.monotonic() < deadline_s:
            time.sleep(0.05)
        self._channel.stop()
        self._engine_thread.stop()
