"""The table of vLLM's flags of `serve`, by topic.

A sentence follows the flag and a colon in an error message, and stands in docs/reference/vllm.md.
"""

from __future__ import annotations

from penstock.deployments.vllm_names import engine, server
from penstock.deployments.vllm_names.flag import VllmFlag

# Flags of vLLM that are settings of Penstock under the same name.
SAME = (
    *("served_model_name", "revision", "download_dir", "max_model_len", "seed", "host"),
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "async_scheduling", "device"),
    *("tool_call_parser", "otlp_traces_endpoint"),
    *("enable_lora", "lora_modules", "max_loras", "max_lora_rank"),
)
TOPICS: dict[str, tuple[VllmFlag, ...]] = {
    "model": engine.MODEL,
    "chat": engine.CHAT,
    "memory": engine.MEMORY,
    "steps": engine.STEPS,
    "replicas and machines": server.CLUSTER,
    "media": engine.MEDIA,
    "listeners": server.SERVER,
    "logs": server.LOGS,
}
FLAGS: tuple[VllmFlag, ...] = tuple(flag for topic in TOPICS.values() for flag in topic)
BY_NAME: dict[str, VllmFlag] = {name: flag for flag in FLAGS for name in flag.names}
