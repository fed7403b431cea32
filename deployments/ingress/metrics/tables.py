"""The metrics of requests and workers: names (vLLM's where they fit), help texts and sources.

Tables that collector.py reads. docs/reference/metrics.md says what each means.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.workers.stats import EngineStats, ExpertStats

# attribute of EngineCounts, name, help
REQUEST_HISTOGRAMS = (
    ("first_token", "vllm:time_to_first_token_seconds", "From the call to its first token."),
    ("token_gap", "vllm:inter_token_latency_seconds", "From a token to the next one."),
    (
        "time_per_token",
        "vllm:request_time_per_output_token_seconds",
        "Mean time from a token to the next one, by request.",
    ),
    ("total", "vllm:e2e_request_latency_seconds", "From the call to the end of its answer."),
    ("queue", "vllm:request_queue_time_seconds", "From arrival at the worker to the first step."),
    ("prefill", "vllm:request_prefill_time_seconds", "From the first step to the first token."),
    ("decode", "vllm:request_decode_time_seconds", "From the first token to the last."),
    ("prompt_length", "vllm:request_prompt_tokens", "Tokens of the prompt, by request."),
    ("answer_length", "vllm:request_generation_tokens", "Tokens of the answer, by request."),
)
REQUEST_COUNTERS = (
    ("num_prompt_tokens", "vllm:prompt_tokens", "Prompt tokens of requests that began."),
    ("num_generated_tokens", "vllm:generation_tokens", "Tokens of answers."),
)
# name, help, value
_Of = Callable[[EngineStats], float]
WORKER_GAUGES: tuple[tuple[str, str, _Of], ...] = (
    ("vllm:num_requests_running", "Requests in the batch.", lambda s: s.num_running),
    (
        "vllm:num_requests_waiting",
        "Requests that wait for KV blocks or a slot.",
        lambda s: s.num_waiting,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks that running requests hold; 1 is all.",
        lambda s: s.num_live_blocks / max(1, s.num_blocks),
    ),
    (
        "penstock_kv_block_bytes",
        "Bytes of one KV block: K, V and their scales in all layers.",
        lambda s: s.num_block_bytes,
    ),
    (
        "penstock_tail_saved_bytes",
        "Memory saved by lending the free tail of the KV pool to activations.",
        lambda s: s.num_saved_bytes,
    ),
    (
        "penstock_tail_saved_blocks",
        "The memory saved, in KV blocks.",
        lambda s: s.num_saved_blocks,
    ),
    (
        "penstock_host_kv_usage_ratio",
        "Share of the host memory for KV blocks (host_kv_gb) that is in use.",
        lambda s: s.num_host_blocks_used / max(1, s.num_host_blocks),
    ),
    (
        "penstock_state_slots_usage_ratio",
        "Share of the slots for recurrent states that requests use: of models with linear "
        "attention.",
        lambda s: 0.0 if s.states is None else s.states.num_live / s.states.num_slots,
    ),
    (
        "penstock_state_snapshots",
        "States of prefixes that later requests may begin with, likewise.",
        lambda s: 0 if s.states is None else s.states.num_snapshots,
    ),
    (
        "penstock_outstanding_tokens",
        "Prompt tokens to compute and answer tokens still allowed.",
        lambda s: s.num_outstanding_tokens,
    ),
)
WORKER_COUNTERS: tuple[tuple[str, str, _Of], ...] = (
    (
        "vllm:num_preemptions",
        "Preemptions: a request freed its KV blocks, to be computed again later.",
        lambda s: s.num_preemptions,
    ),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache.",
        lambda s: s.num_prefix_queried_tokens,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens that were found in the prefix cache.",
        lambda s: s.num_prefix_hit_tokens,
    ),
    (
        "vllm:corrupted_requests",
        "Requests that ended because their logits were not finite numbers.",
        lambda s: s.num_corrupted,
    ),
    ("penstock_steps", "Steps of the engine.", lambda s: s.num_steps),
    (
        "penstock_preemptions_avoided",
        "Times that a running request continued without a free KV block (kv_commit).",
        lambda s: s.num_preemptions_avoided,
    ),
    (
        "penstock_deferred_tokens",
        "Tokens that were computed in a step and not stored.",
        lambda s: s.num_deferred_tokens,
    ),
    (
        "penstock_steps_ahead",
        "Steps that were launched before the previous one had been read (async scheduling).",
        lambda s: s.num_steps_ahead,
    ),
    (
        "penstock_graph_steps",
        "Steps that were launched as one CUDA graph.",
        lambda s: s.num_graph_steps,
    ),
    (
        "penstock_discarded_tokens",
        "Tokens sampled for requests that had ended when they were read.",
        lambda s: s.num_discarded_tokens,
    ),
    (
        "penstock_recomputed_tokens",
        "Tokens computed again in later steps because they had not been stored.",
        lambda s: s.num_recomputed_tokens,
    ),
    (
        "penstock_loaded_tokens",
        "Tokens whose K and V came back from host memory instead of being computed again.",
        lambda s: s.num_loaded_tokens,
    ),
    (
        "penstock_rolled_blocks",
        "KV blocks that moving sink windows freed.",
        lambda s: s.num_rolled_blocks,
    ),
    (
        "penstock_shortened_steps",
        "Steps whose prompt chunks were cut because the free tail of the pool was short.",
        lambda s: s.num_shortened_steps,
    ),
)
# Of workers that have an expert cache; name, help, value
_OfExperts = Callable[[ExpertStats], float]
EXPERT_GAUGES: tuple[tuple[str, str, _OfExperts], ...] = (
    ("penstock_expert_slots", "Experts that the expert cache has room for.", lambda s: s.num_slots),
    ("penstock_expert_count", "Experts of all layers of the model.", lambda s: s.num_experts),
    (
        "penstock_expert_pooled_neurons",
        "Neurons that the pool of moe_mode sparse and streamed has room for.",
        lambda s: s.num_pooled_neurons,
    ),
)
EXPERT_COUNTERS: tuple[tuple[str, str, _OfExperts], ...] = (
    (
        "penstock_expert_stall_seconds",
        "Time that steps waited for experts.",
        lambda s: s.stall_s,
    ),
    (
        "penstock_expert_link_busy_seconds",
        "Time during which experts were copied to the device.",
        lambda s: s.link_busy_s,
    ),
    (
        "penstock_expert_neurons_wanted",
        "Neurons of the experts that steps needed.",
        lambda s: s.num_neurons_wanted,
    ),
    (
        "penstock_expert_neurons_there",
        "Neurons that steps needed and that were on the device already.",
        lambda s: s.num_neurons_there,
    ),
    (
        "penstock_expert_prefetches",
        "Experts whose prefetch began.",
        lambda s: s.num_prefetched,
    ),
    (
        "penstock_expert_prefetches_used",
        "Prefetched experts that a step needed before they were evicted.",
        lambda s: s.num_prefetch_used,
    ),
    (
        "penstock_expert_prefetches_withheld",
        "Layers without a prefetch because the host link had no time.",
        lambda s: s.num_withheld,
    ),
    (
        "penstock_expert_neurons_chosen_from",
        "Neurons of the experts that tokens went through in moe_mode sparse.",
        lambda s: s.num_sparse_neurons,
    ),
    (
        "penstock_expert_neurons_skipped",
        "Neurons that moe_mode sparse left out.",
        lambda s: s.num_skipped_neurons,
    ),
    (
        "penstock_expert_corrupted_loads",
        "Loads that failed because bytes in the store did not match their digest.",
        lambda s: s.num_corrupted,
    ),
)
