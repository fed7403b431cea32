"""How well an engine predicts given texts, through the logprobs of prompts that it serves."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.workers.engine.engine import Engine
from penstock.workers.request import Request, SamplingParams


def prompt_nll(engine: Engine, texts: Sequence[Sequence[int]]) -> list[float]:
    """-log p of each token of the texts but their first ones, text by text. `texts`: token ids."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    found: list[float] = []
    for i, ids in enumerate(texts):
        engine.add(Request(f"text{i}", tuple(ids), params))
        while engine.has_work():
            for delta in engine.step():
                found += [-each.logprob for each in delta.prompt_logprobs]
    assert len(found) == sum(len(ids) - 1 for ids in texts)
    return found
