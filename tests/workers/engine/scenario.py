"""A random engine and random requests for it: what a deployment might combine, and some more."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from penstock.workers.request import Request, SamplingParams
from tests.workers.adapters.test_engine_with_adapters import KINDS, adapter
from tests.workers.checkpoints import VOCAB_SIZE, make_checkpoint, random_prompt

DENSE = ("llama", "qwen3", "phi3", "gemma2", "gemma3_text", "ministral", "olmo3", "smollm3")
EXPERTS = ("mixtral", "qwen2_moe", "glm4_moe-groups", "minimax_m2", "gpt_oss-window")
LINEAR = ("qwen3_next", "qwen3_5_text")  # no drafts, no host memory
WITH_SINKS = ("llama", "qwen3", "phi3", "smollm3", "mixtral", "qwen2_moe", "minimax_m2")
WITH_ADAPTERS = ("llama", "qwen3", "phi3", "mixtral")
FORMATS = ("fp32", "bf16", "int8", "int4", "nf4", "fp8")
# Most tokens of a prompt, and of an answer: the longest request fits every pool of `_schedule`.
MAX_PROMPT, MAX_NEW = 90, 80
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)  # of a request for an embedding


@dataclass(frozen=True)
class Scenario:
    """`common`: settings that answers depend on; `settings`: with those that they may not."""

    rng: random.Random
    family: str
    common: dict[str, Any]
    settings: dict[str, Any]
    requests: list[Request]
    drafts: str  # none, lookup, a kind of proposer, or model
    expert_slots: int | None
    arrival: float  # chance that the next request comes before a step
    abort: float  # chance that one is aborted after a step


def scenario(seed: int) -> Scenario:
    rng = random.Random(seed)
    family = rng.choice(DENSE + EXPERTS + LINEAR)
    common = _common(rng, family)
    settings = {**common, **_schedule(rng, common["block_size"])}
    is_linear = family in LINEAR
    if not is_linear and rng.random() < 0.4:
        settings["host_kv_gb"] = 0.01
        settings["kv_restore"] = rng.choice(("auto", "load", "recompute", "split"))
    slots = None
    if family in EXPERTS and "lora_modules" not in common and rng.random() < 0.4:
        slots = rng.choice((1, 3, 7))
    drafts = "none"
    if not is_linear and slots is None:
        drafts = rng.choice(("none", "none", "lookup", "right", "wrong", "mixed", "model"))
        if drafts == "model" and "lora_modules" in common:
            drafts = "mixed"
    if drafts == "model":
        settings |= {"speculate": "draft", "draft_model": make_checkpoint(family)}
    elif drafts != "none":
        settings["speculate"] = "lookup"
    has_sinks = family in WITH_SINKS and rng.random() < 0.5
    sinks = _sinks(rng, common["block_size"]) if has_sinks else {}
    return Scenario(
        rng,
        family,
        common,
        settings,
        _requests(rng, common, sinks),
        drafts,
        slots,
        arrival=rng.choice((0.1, 1.0, 1.0)),
        abort=rng.choice((0.0, 0.02, 0.08)),
    )


def _common(rng: random.Random, family: str) -> dict[str, Any]:
    common: dict[str, Any] = {
        "block_size": rng.choice((4, 8, 16)),
        "weights": rng.choice(FORMATS),
        "kv": rng.choice(("auto", "int8", "int8", "fp8")),
    }
    if common["kv"] == "int8":
        common["kv_group"] = rng.choice(("auto", "8", "head"))
    if rng.random() < 0.2:
        common["pooling"] = rng.choice(("last", "mean"))
    elif family in WITH_ADAPTERS and rng.random() < 0.4:
        kinds = rng.sample([*KINDS], rng.randint(1, 3))
        modules = tuple(f"{kind.replace(' ', '-')}={adapter(kind, family)[0]}" for kind in kinds)
        common |= {"enable_lora": True, "max_lora_rank": 32, "lora_modules": modules}
    return common


def _schedule(rng: random.Random, block_size: int) -> dict[str, Any]:
    most = -(-(MAX_PROMPT + MAX_NEW + 1) // block_size) + 2
    num_seqs = rng.choice((1, 3, 8, 8))
    return {
        "num_blocks": rng.choice((most, most, most + 6, 8 * most)),
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(num_seqs, rng.choice((4, 7, 16, 33, 64, 512, 512))),
        "prefix_cache": rng.random() < 0.7,
        "merge_steps": rng.random() < 0.8,
        "async_scheduling": rng.choice(("on", "off", "auto")),
        "activation_memory": rng.choice(("tail", "tail", "separate")),
        "cuda_graphs": rng.choice(("off", "auto")),
        "kv_commit": rng.choice(("eager", "deferred", "auto")),
        "kv_defer_mode": rng.choice(("pressure", "always")),
    }


def _sinks(rng: random.Random, block_size: int) -> dict[str, Any]:
    return {
        "context_policy": "sink_window",
        "sinks": rng.choice((1, 4, block_size)),
        "window": block_size * rng.randint(2, 6),
        "roll": block_size * rng.choice((1, 2)),
    }


def _requests(rng: random.Random, common: dict[str, Any], sinks: dict[str, Any]) -> list[Request]:
    stems = [random_prompt(rng.randint(3, 50), number) for number in range(3)]
    adapters = [module.split("=")[0] for module in common.get("lora_modules", ())]
    requests = []
    for number in range(rng.randint(3, 10)):
        stem = rng.choice(stems)
        tail = random_prompt(rng.randrange(1, 40), 100 + number) if rng.random() < 0.8 else ()
        request = Request(
            f"r{number}",
            (*stem, *tail),
            _params(rng, sinks if rng.random() < 0.5 else {}),
            priority=rng.choice((0, 0, 0, 2)),
            adapter=rng.choice(["", *adapters]),
        )
        if "pooling" in common and rng.random() < 0.4:
            request = replace(request, params=ONE_TOKEN, embeds=True)
        requests.append(request)
    return requests


def _params(rng: random.Random, sinks: dict[str, Any]) -> SamplingParams:
    ids = range(VOCAB_SIZE)
    num_new = rng.randint(1, MAX_NEW if sinks else 60)
    given: dict[str, Any] = {
        "max_tokens": num_new,
        "ignore_eos": rng.random() < 0.7,
        "seed": rng.randrange(1000),
        "temperature": rng.choice((0.0, 0.0, 0.8, 1.3)),
    }
    # Each with its chance, drawn in this order.
    maybe: tuple[tuple[float, str, Any], ...] = (
        (0.3, "top_k", rng.randint(1, 60)),
        (0.3, "top_p", rng.uniform(0.3, 1)),
        (0.2, "min_p", rng.uniform(0, 0.2)),
        (0.3, "repetition_penalty", rng.uniform(0.8, 1.5)),
        (0.2, "frequency_penalty", rng.uniform(-1, 2)),
        (0.2, "presence_penalty", rng.uniform(-1, 2)),
        (0.15, "stop_token_ids", tuple(rng.sample(ids, rng.randint(1, 30)))),
        (0.2, "min_tokens", rng.randint(0, num_new)),
        (0.4, "logprobs", rng.randint(0, 4)),
        (0.15, "prompt_logprobs", rng.randint(0, 2)),
        (0.15, "logit_bias", tuple((each, rng.uniform(-5, 5)) for each in rng.sample(ids, 4))),
        (0.15, "bad_words_ids", tuple(tuple(rng.sample(ids, 1 + n % 2)) for n in range(6))),
        (0.1, "allowed_token_ids", tuple(rng.sample(ids, 40))),
    )
    given |= {name: value for chance, name, value in maybe if rng.random() < chance}
    return SamplingParams(**given, **sinks)
