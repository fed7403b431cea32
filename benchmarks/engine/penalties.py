"""What the parameters that change logits cost a token, by how many distinct tokens they concern.

    python -m benchmarks.engine.penalties [--vocab 151936] [--json out.json]

One request, one CPU thread; the best and the median of some tokens, each with `edit` and `observe`.
`lists` makes tensors of Python's sets and counters anew at each token, as a plain implementation
does; `kept` is Penstock's, which changes one place of tensors that it keeps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.common import record
from penstock.workers.request import SamplingParams
from penstock.workers.sampling.logits import LogitsEditor

DISTINCT = (100, 1000, 10_000, 128_000)
TOKENS = 20
CASES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.1},
    "frequency and presence": {"frequency_penalty": 0.1, "presence_penalty": 0.2},
    "all three": {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.2},
}


class Editor(Protocol):
    def observe(self, token_id: int) -> None: ...
    def edit(self, row: Tensor, token_ids: Sequence[int]) -> None: ...


class ListEditor:
    """The same with Python's own containers."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], answer: Sequence[int]):
        self._params = params
        self._seen, self._counts = {*prompt_ids, *answer}, Counter(answer)

    def observe(self, token_id: int) -> None:
        self._seen.add(token_id)
        self._counts[token_id] += 1

    def edit(self, row: Tensor, token_ids: Sequence[int]) -> None:
        params = self._params
        if params.repetition_penalty != 1.0:
            ids = torch.tensor(list(self._seen))
            held = row[ids]
            penalty = params.repetition_penalty
            row[ids] = torch.where(held > 0, held / penalty, held * penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids = torch.tensor(list(self._counts))
            counts = torch.tensor(list(self._counts.values()))
            row[ids] -= params.presence_penalty + params.frequency_penalty * counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"vocab": args.vocab, "cases": []}
    print(f"{'parameters':24} {'distinct':>9} {'lists ms':>9} {'kept ms':>9} {'best':>9}")
    for name, fields in CASES.items():
        for distinct in DISTINCT:
            case = measured(SamplingParams(**fields), min(distinct, args.vocab), args.vocab)
            results["cases"].append({"parameters": name, "distinct": distinct, **case})
            shown = (case["lists_ms"], case["kept_ms"], case["best_kept_ms"])
            print(f"{name:24} {distinct:9} " + " ".join(f"{each:9.3f}" for each in shown))
    if args.json is not None:
        record.write(args.json, __file__, results, threads=1)


def measured(params: SamplingParams, distinct: int, vocab: int) -> dict[str, float]:
    """Milliseconds a token after `distinct` different ones. Raises RuntimeError if the two
    implementations differ."""
    generator = torch.Generator().manual_seed(0)
    answer = torch.randperm(vocab, generator=generator)[:distinct].tolist()
    row = torch.randn(vocab, generator=generator)
    lists = ListEditor(params, (), answer)
    kept = LogitsEditor(params, (), answer)
    editors: dict[str, Editor] = {"lists": lists, "kept": kept}
    times: dict[str, list[float]] = {name: [] for name in editors}
    for n in range(TOKENS):
        rows = {}
        for name, editor in editors.items():
            rows[name] = row.clone()
            began_s = time.perf_counter()
            editor.edit(rows[name], answer)
            editor.observe(answer[n])
            times[name].append(time.perf_counter() - began_s)
        if not torch.equal(rows["lists"], rows["kept"]):
            raise RuntimeError("the two implementations give different logits")
    found = {f"{name}_ms": statistics.median(each) * 1e3 for name, each in times.items()}
    return {**found, **{f"best_{name}_ms": min(each) * 1e3 for name, each in times.items()}}


if __name__ == "__main__":
    main()
