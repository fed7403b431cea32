"""llama.cpp's side of benchmarks/engine/speculation.py: greedy answers, one prompt at a time.

With prompt lookup as llama-cpp-python has it (LlamaPromptLookupDecoding) of "drafts" tokens, or
without where that is 0.

Needs llama-cpp-python only. The job comes over standard input as JSON, and the answer
goes to the file that is the only argument:

    {"model": PATH, "settings": {"drafts": 2}, "threads": 1, "num_new": 128, "eos": [ids],
     "prompts": [[ids], ...], "schemas": [null, ...]}

An answer is JSON of the prompt's schema, if it has one. For each prompt {"seconds", "ids", "steps",
"drafts"}: seconds and evaluations after the first token, and draft tokens in all. The end of a
sequence is the last of "ids".
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


class Lookup(LlamaPromptLookupDecoding):
    """Counts what it proposes."""

    num_drafts = 0

    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
        found = super().__call__(input_ids, **kwargs)
        self.num_drafts += len(found)
        return found


class Counted(llama_cpp.Llama):
    """Counts its evaluations."""

    num_evaluations = 0

    def eval(self, tokens: Any) -> None:
        self.num_evaluations += 1
        super().eval(tokens)


def answer(job: dict[str, Any]) -> list[dict[str, Any]]:
    longest = max(map(len, job["prompts"]))
    drafts = job["settings"]["drafts"]
    lookup = Lookup(num_pred_tokens=drafts) if drafts else None
    model = Counted(
        job["model"], n_ctx=longest + job["num_new"] + 64, n_batch=512, verbose=False,
        n_threads=job["threads"], n_threads_batch=job["threads"], draft_model=lookup,
    )  # fmt: skip
    _one(model, lookup, job["prompts"][0], None, {**job, "num_new": 8})
    asked = zip(job["prompts"], job["schemas"], strict=True)
    return [_one(model, lookup, ids, schema, job) for ids, schema in asked]


def _one(
    model: Counted,
    lookup: Lookup | None,
    prompt: list[int],
    schema: str | None,
    job: dict[str, Any],
) -> dict[str, Any]:
    model.reset()
    grammar = llama_cpp.LlamaGrammar.from_json_schema(schema, verbose=False) if schema else None
    before = 0 if lookup is None else lookup.num_drafts
    ids: list[int] = []
    began_s, first_step = 0.0, 0
    for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0, grammar=grammar):
        ids.append(int(token))
        if len(ids) == 1:
            began_s, first_step = time.perf_counter(), model.num_evaluations
        if token in job["eos"] or len(ids) == job["num_new"]:
            break
    return {
        "seconds": time.perf_counter() - began_s,
        "ids": ids,
        "steps": model.num_evaluations - first_step,
        "drafts": 0 if lookup is None else lookup.num_drafts - before,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(answer(json.load(sys.stdin))))
