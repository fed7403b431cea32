"""llama.cpp's side of a job (job.py), through llama-cpp-python's low-level functions.

Needs llama-cpp-python and numpy only. Prompts are decoded first, in batches of 512 tokens, then one
token of each running request at a time: what its server does with all requests at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.job import answer

BATCH = 512
KV_TYPES = {"F32": 0, "F16": 1, "q8_0": 8}
SILENT = llama_cpp.llama_log_callback(lambda *_: None)


class Context:
    """A model and room for `num_seqs` sequences of up to `context` tokens, each in cells of its
    own: in a common cache every token would look at the cells of all."""

    def __init__(self, job: dict[str, Any], context: int, num_seqs: int):
        llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(job["model"].encode(), params)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context * num_seqs, BATCH, BATCH
        settings.n_seq_max, settings.kv_unified = num_seqs, False
        if "kv" in job["settings"]:  # by default fp16
            settings.type_k = settings.type_v = KV_TYPES[job["settings"]["kv"]]
        settings.n_threads = settings.n_threads_batch = job["threads"]
        self.context = llama_cpp.llama_init_from_model(self._model, settings)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.num_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> list[Any]:
        """Of (id, position, sequence, whether its logits are wanted), at most BATCH: the logits
        [vocab] of those that are wanted, views that the next call overwrites."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, seq, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = wanted
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed: the context is too small")
        found = []
        for i, each in enumerate(tokens):
            if each[3]:
                row = llama_cpp.llama_get_logits_ith(self.context, i)
                found.append(np.ctypeslib.as_array(row, shape=(self.num_vocab,)))
        return found

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)


def scores(job: dict[str, Any]) -> list[list[float]]:
    windows = job["windows"]
    context, found = Context(job, len(windows[0]), 1), []
    for ids in windows:
        context.clear()
        nll: list[float] = []
        for start in range(0, len(ids) - 1, BATCH):
            part = range(start, min(start + BATCH, len(ids) - 1))
            for i, row in zip(part, context.decode([(ids[i], i, 0, True) for i in part])):
                logits = row.astype(np.float64)
                top = logits.max()
                nll.append(top + np.log(np.exp(logits - top).sum()) - logits[ids[i + 1]])
        found.append([round(float(each), 6) for each in nll])
    return found


def opened(job: dict[str, Any]) -> Callable[[list[dict[str, Any]]], Iterator[int]]:
    every = [each for requests in job["workloads"].values() for each in requests]
    room = max(len(each["prompt_ids"]) + each["num_new"] for each in every)
    context = Context(job, room, max(map(len, job["workloads"].values())))

    def run(requests: list[dict[str, Any]]) -> Iterator[int]:
        context.clear()
        prompts = [
            (token, position, seq, position == len(each["prompt_ids"]) - 1)
            for seq, each in enumerate(requests)
            for position, token in enumerate(each["prompt_ids"])
        ]
        lengths = [len(each["prompt_ids"]) for each in requests]
        left = [each["num_new"] for each in requests]
        last: dict[int, int] = {}
        for start in range(0, len(prompts), BATCH):
            part = prompts[start : start + BATCH]
            ended = [seq for _, _, seq, wanted in part if wanted]
            for seq, row in zip(ended, context.decode(part)):
                last[seq], left[seq] = int(row.argmax()), left[seq] - 1
            yield len(ended)
        while running := [seq for seq in last if left[seq]]:
            step = [(last[seq], lengths[seq], seq, True) for seq in running]
            for seq, row in zip(running, context.decode(step)):
                last[seq] = int(row.argmax())
                lengths[seq], left[seq] = lengths[seq] + 1, left[seq] - 1
            yield len(running)

    return run


if __name__ == "__main__":
    answer(scores, opened)
