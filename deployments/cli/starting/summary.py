"""What `penstock serve` prints when it is ready: the settings in force, and how to reach it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.deployments.config import LOOPBACK, ServeConfig

if TYPE_CHECKING:
    from penstock.deployments.supervision.view import ClusterView
    from penstock.workers.stats import EngineStats, WorkerInfo

COMMIT_DIGITS = 12


def effective_settings(
    config: ServeConfig, workers: Sequence[tuple[WorkerInfo, EngineStats]], logs: str = ""
) -> str:
    """The settings in force, a topic a line. `logs`: where they are. Without workers there is
    nothing to say of what they compute with."""
    lines = _of_workers(config, *workers[0]) if workers else []
    replicas = f"num_workers {config.num_workers}, num_ingress {config.num_ingress}"
    lines.append(f"  admission  {_admission(config)}; {replicas}")
    lines.append(f"  access     {_access(config)}")
    if logs:
        lines.append(f"  logs       {logs}")
    return "\n".join(lines)


def _of_workers(config: ServeConfig, info: WorkerInfo, stats: EngineStats) -> list[str]:
    engine, of_engine = config.engine, info.engine
    revision = f" at {engine.revision[:COMMIT_DIGITS]}" if engine.revision else ""
    lines = [
        f"  model      {engine.model}{revision}: up to {info.max_model_len:,} tokens of prompt and "
        f"answer; {info.weights} weights"
    ]
    if of_engine.device:
        ranks = engine.num_ranks
        group = "" if ranks == 1 else f" in each of {ranks} processes a worker"
        lines.append(
            f"  computes   in {of_engine.dtype} on {of_engine.device}{group}; "
            f"{of_engine.attention} attention"
        )
    num_tokens = stats.num_blocks * stats.block_size
    if num_tokens:
        reuse = "on" if engine.prefix_cache else "off"
        lines.append(
            f"  KV cache   {of_engine.kv or engine.kv}, {stats.num_blocks:,} blocks of "
            f"{stats.block_size} tokens a worker: {num_tokens:,} tokens, "
            f"{num_tokens / info.max_model_len:.1f} requests of {info.max_model_len:,} tokens "
            f"at a time; at most {stats.max_num_seqs} in a step; prefix caching {reuse}"
        )
    if of_engine.drafts:
        lines.append(f"  drafts     by {of_engine.drafts}")
    if stats.states is not None:
        num, size = stats.states.num_slots, stats.states.slot_bytes / 2**20
        lines.append(
            f"  states     {num:,} slots of {size:.1f} MiB a worker, two for each request in a "
            "step; the others keep states of prefixes"
        )
    return lines


def _admission(config: ServeConfig) -> str:
    if config.admission == "optimistic":
        return "optimistic, without a gate"
    longest_s = config.longest_wait_s or config.longest_possible_wait_s
    return (
        f"{config.admission}; at most {config.max_queued:,} requests wait, each up to "
        f"{longest_s:g} s"
    )


def _access(config: ServeConfig) -> str:
    """Who may connect, and how."""
    tls = "TLS" if config.has_tls else "no TLS"
    if config.tls_client_ca_file is not None:
        tls += " with client certificates"
    if config.api_keys_file is not None:
        who = f"API keys of {config.api_keys_file}"
    else:
        who = "no API keys"
    where = ", from this machine only" if config.host in LOOPBACK else f" at {config.host}"
    return f"{tls}; {who}{where}"


def weights_loaded(view: ClusterView) -> str:
    """The weight format and memory of a worker; empty if none has reported, or they differ."""
    if len({info.model for info, _ in view.workers}) > 1:
        return ""
    for info, _ in view.workers:
        if info.weights:
            return f"; {info.weights} weights of {info.weight_bytes / 2**20:.1f} MiB a worker"
    return ""


def welcome(config: ServeConfig, view: ClusterView) -> str:
    """The addresses, and a command to try."""
    metrics = sorted(each.metrics_address for each in view.ingresses if each.metrics_address)
    watch = "".join(f"  watch http://{address}/metrics  (Prometheus)\n" for address in metrics)
    reach = "; this machine only" if config.host in LOOPBACK else ""
    return (
        f"  HTTP  {config.http_url}/v1  (OpenAI API; /docs in a browser{reach})\n"
        f"  gRPC  {config.address(config.grpc_port)}{_tls_note(config)}\n"
        f"{watch}"
        f"  try   penstock chat{_server_flags(config)}\n"
        "Ctrl-C stops"
    )


def _server_flags(config: ServeConfig) -> str:
    """The flags with which the commands reach this server."""
    default = ServeConfig()
    flags = ""
    if config.http_url != default.http_url:
        # A certificate names no wildcard address.
        is_wildcard = config.host in ("0.0.0.0", "::")
        url = replace(config, host="localhost").http_url if is_wildcard else config.http_url
        flags += f" --url {url}"
    if config.has_tls:
        flags += " --ca-file CA"  # the file of the CA is not this server's
    if config.tls_client_ca_file is not None:
        flags += " --cert-file CERT --key-file KEY"
    if config.api_keys_file is not None:
        flags += " --api-key-file FILE"  # with one key, not the file of their digests
    return flags


def _tls_note(config: ServeConfig) -> str:
    if not config.has_tls:
        return ""
    return "  (TLS; clients show a certificate)" if config.tls_client_ca_file else "  (TLS)"
