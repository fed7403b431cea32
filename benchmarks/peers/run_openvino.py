"""OpenVINO's side of a job (job.py): GenAI's continuous batching, and its runtime for scores.

Needs openvino, openvino-genai and numpy only. The folder is what `optimum-cli export openvino`
writes. Activations of compressed weights and the KV cache are as OpenVINO has them by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peers.job import answer

BLOCK_SIZE = 32  # of its cache on a CPU


def scores(job: dict[str, Any]) -> list[list[float]]:
    core = openvino.Core()
    settings = {"INFERENCE_NUM_THREADS": job["threads"]}
    if "precision" in job["settings"]:  # by default bf16 on CPUs that have it
        settings["INFERENCE_PRECISION_HINT"] = job["settings"]["precision"]
    model = core.compile_model(f"{job['model']}/openvino_model.xml", "CPU", settings)
    request, found = model.create_infer_request(), []
    for ids in job["windows"]:
        request.reset_state()
        given = np.array([ids[:-1]], dtype=np.int64)
        inputs = {
            "input_ids": given,
            "attention_mask": np.ones_like(given),
            "position_ids": np.arange(given.shape[1], dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        wanted = {each for port in model.inputs for each in port.names}
        out = request.infer({name: value for name, value in inputs.items() if name in wanted})
        logits = np.asarray(out[model.output("logits")])[0].astype(np.float64)
        top = logits.max(1)
        total = top + np.log(np.exp(logits - top[:, None]).sum(1))
        nll = total - logits[np.arange(len(logits)), ids[1:]]
        found.append([round(float(each), 6) for each in nll])
    return found


def opened(job: dict[str, Any]) -> Callable[[list[dict[str, Any]]], Iterator[int]]:
    every = [len(requests) for requests in job["workloads"].values()]
    scheduler = genai.SchedulerConfig()
    if "room" in job:
        scheduler.num_kv_blocks = -(-job["room"] // BLOCK_SIZE) + 1
    else:
        scheduler.cache_size = 2  # GiB
    scheduler.max_num_seqs = max(*every, 2)
    scheduler.max_num_batched_tokens = job.get("chunk", 512)
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": job["threads"]}
    if "kv" in job["settings"]:  # by default u8
        properties["KV_CACHE_PRECISION"] = job["settings"]["kv"]
    pipe = genai.ContinuousBatchingPipeline(
        job["model"], scheduler_config=scheduler, device="CPU", properties=properties
    )
    count = iter(range(10**9))

    def run(requests: list[dict[str, Any]]) -> Iterator[int]:
        handles = []
        for each in requests:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos = each["num_new"], True
            config.do_sample = False
            ids = openvino.Tensor(np.array([each["prompt_ids"]], dtype=np.int64))
            handles.append(pipe.add_request(next(count), ids, config))
        while pipe.has_non_finished_requests():
            pipe.step()
            yield sum(_new_tokens(handle) for handle in handles)
        yield sum(_new_tokens(handle) for handle in handles)

    return run


def _new_tokens(handle: Any) -> int:
    total = 0
    while handle.can_read():
        total += sum(len(each.generated_ids) for each in handle.read().values())
    return total


if __name__ == "__main__":
    answer(scores, opened)
