"""The models of one ingress: of each, the connections with its workers and its gate, and its core.

One request core has them all; replica.py makes the connections and follows the registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.deployments.config import ServeConfig
from penstock.deployments.ingress.core.answers.reasoning import find_marks
from penstock.deployments.ingress.core.answers.tool_forms.table import support_of
from penstock.deployments.ingress.core.billing import Billing
from penstock.deployments.ingress.core.bounds.limits import OpenCalls
from penstock.deployments.ingress.core.call import LoraNames
from penstock.deployments.ingress.core.runtime import ModelRuntime
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.core.tracing import Tracer
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.supervision.view import ClusterView
from penstock.workers.context_policy import ContextSettings
from penstock.workers.gguf.header import headers_kept
from penstock.workers.model_config import read_limits
from penstock.workers.pooling.scoring import pair_template
from penstock.workers.sampling_defaults import read_sampling_defaults
from penstock.workers.stats import WorkerInfo
from penstock.workers.text.chat_settings import load_tokenizer
from penstock.workers.weights.model_digest import verified_text


@dataclass(frozen=True, slots=True, eq=False)
class IngressModel:
    """One model at an ingress. `config`: its own; `gate` None: its admission needs none."""

    config: ServeConfig
    pool: WorkerPool
    gate: GateClient | None = None

    def workers_in(self, view: ClusterView) -> list[WorkerInfo]:
        """Its workers: where there is one model, all."""
        name = self.config.model_name
        return [info for info, _ in view.workers if not self.config.key or info.model == name]

    def adapters_in(self, view: ClusterView) -> tuple[str, ...] | None:
        """The adapters that all its workers have; None: it has no worker."""
        of_each = [set(info.adapters) for info in self.workers_in(view) if not info.is_draining]
        return tuple(sorted(set.intersection(*of_each))) if of_each else None

    def update(self, view: ClusterView, num_ingresses: int) -> None:
        """Follow the registry's newest view. `num_ingresses`: living ones, with this one."""
        self.pool.update(self.workers_in(view), num_ingresses)


async def request_core(
    config: ServeConfig,
    models: Sequence[IngressModel],
    billing: Billing,
    tracer: Tracer | None = None,
) -> RequestCore:
    """The request core for all models. `tracer` None: there are no traces. Raises ConfigError or
    LoadError."""
    runtimes = []
    for each in models:
        with headers_kept():
            runtimes.append(await _runtime(each))
    return RequestCore(
        *runtimes,
        has_state_store=config.state_url is not None,
        billing=billing,
        open_calls=OpenCalls(config.max_open_requests, config.max_open_mb << 20),
        tracer=tracer,
    )


async def _runtime(model: IngressModel) -> ModelRuntime:
    config = model.config
    folder, _ = await asyncio.to_thread(verified_text, config.engine)
    vocab_size, max_model_len = read_limits(folder)
    max_model_len = min(max_model_len, config.engine.max_model_len or max_model_len)
    tokenizer = load_tokenizer(folder, config.engine)
    return ModelRuntime(
        tokenizer,
        model.pool,
        model_name=config.model_name,
        other_names=config.other_names,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        contexts=ContextSettings.of(config.engine, max_model_len),
        marks=find_marks(config.reasoning_marks, tokenizer),
        tools=support_of(config.tool_call_parser, tokenizer),
        learner=model.gate,
        seed=config.engine.seed,
        longest_wait_s=config.longest_possible_wait_s,
        shares_prefixes=config.prefix_sharing == "all",
        sampling_defaults=read_sampling_defaults(folder, config.engine.generation_config),
        pairs=pair_template(folder, config.engine, tokenizer),
        adapters=LoraNames(
            tuple(config.engine.adapter_folders), may_change=config.engine.lora_runtime_updates
        ),
    )


def beat_all(models: Iterable[IngressModel]) -> None:
    """Send a heartbeat to each worker; from any thread, while the event loop is late."""
    for each in models:
        each.pool.beat()
