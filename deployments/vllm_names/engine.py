"""vLLM's flags for the model, its chats, its memory and its steps."""

from __future__ import annotations

import json

from penstock.deployments.vllm_names.flag import (
    Settings,
    VllmFlag,
    absent,
    alias,
    nothing,
    only,
    switch,
)

_TEXT_ONLY = "Penstock serves text, without images, audio or video; leave it out"
_NO_CODE = "Penstock runs no code from a checkpoint or from elsewhere; leave it out"
_NO_HEADS = (
    "Penstock drafts from text (ngram is --speculate lookup, suffix) and by a draft model "
    "(--speculate draft --draft-model X), without trained heads; --speculate-tokens N"
)
_NO_TRANSFER = (
    "Penstock moves no KV cache between servers; --host-kv-gb X keeps evicted blocks in host memory"
)
_GRAPHS = (
    "Penstock compiles no model; --cuda-graphs on or off says whether steps run as CUDA graphs"
)
_DOWNLOADS = "Penstock loads safetensors as they are; leave it out"
_ALWAYS_CHUNKED = "prompts longer than --max-num-batched-tokens are always prefilled in chunks"

# What the fields of --speculative-config that only tune the search are called there.
_TUNING = frozenset(
    (
        *("prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_tree_depth"),
        *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
        "suffix_decoding_min_token_prob",
    )
)


def _speculation(text: str) -> Settings | None:
    """The settings of a --speculative-config; None: it is of another method, or not JSON."""
    try:
        config = json.loads(text)
    except ValueError:
        return None
    if not isinstance(config, dict):
        return None
    name = config.pop("method", "draft_model" if "model" in config else "")
    method = {"ngram": "lookup", "suffix": "suffix", "draft_model": "draft"}.get(name)
    num = config.pop("num_speculative_tokens", None)
    if method is None or not (num is None or isinstance(num, int)):
        return None
    found = {"speculate": method}
    if method == "draft" and isinstance(model := config.pop("model", None), str):
        found["draft_model"] = model
        if config.get("draft_tensor_parallel_size") == 1:  # it is whole, on the first rank
            del config["draft_tensor_parallel_size"]
    if config.keys() - _TUNING or (method == "draft" and "draft_model" not in found):
        return None
    return found if num is None else {**found, "speculate_tokens": str(num)}


MODEL = (
    alias("--model", setting="model", sentence="the model is the first argument, too"),
    VllmFlag(
        ("--dtype",),
        "Penstock computes in bfloat16 or float32; say --dtype bfloat16, or leave it out",
        values={
            "auto": {},
            **{key: {"weights": "bf16"} for key in ("bfloat16", "bf16")},
            **{key: {"weights": "fp32"} for key in ("float32", "float", "fp32")},
        },
        is_weak=True,  # --quantization says more
    ),
    VllmFlag(
        ("--quantization", "-q"),
        "AWQ, GPTQ, compressed-tensors, bitsandbytes, FP8 and MXFP4 checkpoints are recognised "
        "without a flag; --weights int8, int4, nf4 or fp8 quantises while loading "
        "(docs/guide/quantisation.md)",
        values={
            **{
                key: {"weights": "auto"}
                for key in ("awq", "awq_marlin", "gptq", "gptq_marlin", "mxfp4")
            },
            "compressed-tensors": {"weights": "auto"},
            "fp8": {"weights": "fp8"},
            "bitsandbytes": {"weights": "nf4"},
        },
    ),
    only(
        "--load-format",
        values=("auto", "safetensors"),
        sentence="Penstock loads safetensors only; convert the checkpoint, or leave it out",
    ),
    only(
        "--tokenizer-mode",
        values=("auto", "hf"),
        sentence="Penstock reads tokenizer.json or what it can convert to it; leave it out",
    ),
    only("--config-format", values=("auto", "hf"), sentence="Penstock reads config.json only"),
    only("--model-impl", values=("auto", "vllm"), sentence="Penstock has its own models only"),
    only(
        *("--task", "--runner"),
        values=("auto", "generate", "embed", "embedding", "pooling", "score"),
        sentence="Penstock generates, embeds and scores pairs; it does not classify",
    ),
    only(
        "--convert",
        values=("auto", "none", "embed"),
        sentence="Penstock generates, embeds and scores pairs; it does not classify",
    ),
    absent(
        *("--pooler-config", "--override-pooler-config"),
        sentence="--pooling last or --pooling mean says which hidden states make an embedding",
    ),
    absent(
        *("--tokenizer", "--tokenizer-revision"),
        sentence="the tokenizer is that of the model's folder; put its files there",
    ),
    absent("--trust-remote-code", "--code-revision", "--middleware", sentence=_NO_CODE),
    absent("--tool-parser-plugin", "--reasoning-parser-plugin", sentence=_NO_CODE),
    absent("--logits-processors", "--worker-cls", "--worker-extension-cls", sentence=_NO_CODE),
    absent(
        *("--hf-overrides", "--hf-config-path"),
        sentence="the model is what the config.json in its folder says; change that file in a "
        "copy, or for the classifier_from_token of a reranker set --score-tokens",
    ),
    absent(
        "--hf-token",
        sentence="log in with `hf auth login`, or set HF_TOKEN; other users can read command lines",
    ),
    absent("--model-loader-extra-config", "--ignore-patterns", sentence=_DOWNLOADS),
    absent(
        "--override-generation-config",
        sentence="edit the model's generation_config.json, or send them with each request",
    ),
    absent("--max-logprobs", sentence="a request may ask for 20; there is no setting"),
    VllmFlag(
        ("--speculative-config",),
        "of the methods ngram, which is --speculate lookup, suffix, and draft_model with a model, "
        "which is --speculate draft --draft-model; with num_speculative_tokens. Penstock has no "
        "drafts by trained heads (EAGLE, MTP)",
        read=_speculation,
        becomes=("speculate", "draft_model", "speculate_tokens"),
    ),
    absent("--speculative-model", "--num-speculative-tokens", sentence=_NO_HEADS),
)

CHAT = (
    VllmFlag(
        ("--reasoning-parser",),
        "--reasoning-marks takes auto, which recognises the published marks, or the two marks "
        "themselves; known names are deepseek_r1, qwen3, glm45, minimax_m2, olmo3, mistral, "
        "seed_oss, granite, gemma4 and openai_gptoss (docs/guide/models.md)",
        values={
            **{
                key: {"reasoning_marks": "<think> </think>"}
                for key in ("deepseek_r1", "qwen3", "glm45", "minimax_m2", "olmo3")
            },
            "mistral": {"reasoning_marks": "[THINK] [/THINK]"},
            "seed_oss": {"reasoning_marks": "<seed:think> </seed:think>"},
            **{key: {"reasoning_marks": key} for key in ("granite", "gemma4", "openai_gptoss")},
        },
    ),
    nothing(
        *("--enable-reasoning", "--enable-auto-tool-choice"),
        because="always on, for models whose chat template has it",
    ),
    only("--chat-template-content-format", values=("auto", "string"), sentence=_TEXT_ONLY),
    only("--response-role", values=("assistant",), sentence="the role of answers is assistant"),
    only(
        "--guided-decoding-backend",
        values=("auto", "guidance"),
        sentence="llguidance compiles all forms of structured output; leave it out",
    ),
    absent(
        "--structured-outputs-config",
        sentence="llguidance compiles all forms of structured output; leave it out",
    ),
)

MEMORY = (
    absent(
        "--gpu-memory-utilization",
        sentence="say with --kv-cache-gb X how many GiB the KV cache and the activations get; "
        "without it they get 85 % of the GPU memory that is free beside the weights",
    ),
    absent(
        "--kv-cache-memory-bytes",
        sentence="--kv-cache-gb X says it in GiB, with the activations of a step in it",
    ),
    VllmFlag(
        ("--kv-cache-dtype",),
        "--kv takes auto (the format in which the model computes), int8 or fp8 (E4M3)",
        values={
            "auto": {"kv": "auto"},
            "int8": {"kv": "int8"},
            **{key: {"kv": "fp8"} for key in ("fp8", "fp8_e4m3")},
        },
    ),
    nothing("--calculate-kv-scales", because="scales are always those of the values stored"),
    switch("--enable-prefix-caching", prefix_cache=True),
    switch("--no-enable-prefix-caching", prefix_cache=False),
    absent("--prefix-caching-hash-algo", sentence="the hash is keyed, and compared by tokens"),
    alias("--num-gpu-blocks-override", setting="num_blocks"),
    VllmFlag(("--swap-space", "--kv-offloading-size"), "", "host_kv_gb", {"0": {}}),
    only("--kv-offloading-backend", values=("native",), sentence=_NO_TRANSFER),
    only(
        "--cpu-offload-gb",
        values=("0",),
        sentence="Penstock keeps all weights on the device, but those of experts: "
        "--expert-cache-gb X (docs/guide/experts.md)",
    ),
    absent("--kv-transfer-config", "--kv-events-config", sentence=_NO_TRANSFER),
    absent(
        "--enable-sleep-mode",
        sentence="--num-workers 0:N stops all workers while there are no requests",
    ),
    absent(
        "--disable-sliding-window",
        sentence="a model's own window holds; --max-model-len limits the context",
    ),
)

STEPS = (
    switch("--enforce-eager", cuda_graphs="off"),
    nothing("--no-enforce-eager", because="steps run as CUDA graphs where the model allows it"),
    switch("--no-async-scheduling", async_scheduling="off"),
    absent("--compilation-config", "-cc", "-O", "--optimization-level", sentence=_GRAPHS),
    absent("--cuda-graph-sizes", "--max-seq-len-to-capture", sentence=_GRAPHS),
    absent(
        "--attention-backend", sentence="Penstock has one attention for each device; leave it out"
    ),
    nothing("--enable-chunked-prefill", because=_ALWAYS_CHUNKED),
    absent("--no-enable-chunked-prefill", sentence=f"{_ALWAYS_CHUNKED}; leave it out"),
    absent(
        *("--max-num-partial-prefills", "--long-prefill-token-threshold"),
        sentence="--max-num-batched-tokens limits the prompt tokens of a step; leave it out",
    ),
    only(
        "--scheduling-policy",
        values=("fcfs", "priority"),
        sentence="requests go by their priority, then by fair shares of tenants, then by time",
    ),
    only("--stream-interval", values=("1",), sentence="each token is sent when it is there"),
)

MEDIA = (
    nothing("--language-model-only", because="Penstock serves text only"),
    nothing("--skip-mm-profiling", because="Penstock serves text only"),
    absent("--limit-mm-per-prompt", "--mm-encoder-tp-mode", sentence=_TEXT_ONLY),
    absent("--mm-processor-kwargs", "--mm-processor-cache-gb", sentence=_TEXT_ONLY),
    absent("--media-io-kwargs", "--allowed-local-media-path", sentence=_TEXT_ONLY),
)
