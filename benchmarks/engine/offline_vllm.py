"""One run of vLLM on a workload of offline.py, in an environment of vLLM's own.

Started by offline.py; reads {"folder", "dtype", "jobs"} from standard input, and writes the figures
to the file that is its argument. Needs vLLM only, and knows nothing of Penstock: their pins do
not go together. The settings are those of the other systems: no prefix cache, greedy, end of
sequence ignored, all requests at once.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind


def drain(engine: LLMEngine, jobs: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds to the first token and to the last, and how many there were."""
    start = time.perf_counter()
    for i, job in enumerate(jobs):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=job["num_new"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(f"r{i}", TokensPrompt(prompt_token_ids=job["prompt_ids"]), params)
    first_s, num = 0.0, 0
    while engine.has_unfinished_requests():
        num += sum(len(each.outputs[0].token_ids) for each in engine.step())
        if num and not first_s:
            first_s = time.perf_counter() - start
    return {"total_s": time.perf_counter() - start, "first_s": first_s, "num": num}


def main() -> None:
    job_file = json.load(sys.stdin)
    jobs = job_file["jobs"]
    args = EngineArgs(
        model=job_file["folder"],
        skip_tokenizer_init=True,
        dtype=job_file["dtype"],
        max_model_len=max(len(job["prompt_ids"]) + job["num_new"] for job in jobs),
        max_num_seqs=max(len(jobs), 2),
        enable_prefix_caching=False,
    )
    engine = LLMEngine.from_engine_args(args)
    drain(engine, [{"prompt_ids": [1] * 40, "num_new": 4}] * 2)  # warm-up
    Path(sys.argv[1]).write_text(json.dumps(drain(engine, jobs)))


if __name__ == "__main__":
    main()
