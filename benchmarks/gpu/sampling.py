"""Checks and timings of sampling for `check.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.cases import CUDA, DEVICE, Checks, Triples, Work
from penstock.kernels.reference.sampling import sample_reference
from penstock.kernels.triton import sampling as sampling_triton
from penstock.kernels.types import SamplingRows

# inverse temperature, top_k, top_p, min_p
FILTERS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "top_k 50": (1.25, 50, 1.0, 0.0),
    "top_p 0.9": (1.25, 0, 0.9, 0.0),
    "top_p 0.97, flat": (0.1, 0, 0.97, 0.0),
    "all": (1.1, 40, 0.9, 0.02),
}


def rows_of(num_rows: int, name: str) -> SamplingRows:
    columns = [torch.full((num_rows,), v, dtype=torch.float64) for v in FILTERS[name]]
    columns.append(torch.rand(num_rows, dtype=torch.float64))
    return SamplingRows(*columns)


def check_sample(dtype: torch.dtype) -> Triples:
    """Exact: expected and actual are 0 and the number of ids that differ."""
    if dtype != torch.float32:
        return
    for name in FILTERS:
        for vocab in (7, 4099, 128256 if CUDA else 9001):
            logits = torch.randn(64 if CUDA else 4, vocab) * 3
            rows = rows_of(logits.shape[0], name)
            ids = sampling_triton.sample(logits.to(DEVICE), rows).cpu()
            wrong = (ids != sample_reference(logits, rows)).sum()
            yield f"{name}, vocabulary {vocab}", wrong, torch.zeros(())


CHECKS: Checks = {"sample": check_sample}


def works(tiny: bool) -> Iterator[Work]:
    """The vocabulary of Llama 3. The floor is one reading of the logits."""
    for num_rows, vocab in ((1, 600), (3, 600)) if tiny else ((1, 128256), (64, 128256)):
        logits = torch.randn(num_rows, vocab, device=DEVICE) * 3
        for name in FILTERS:
            rows = rows_of(num_rows, name)
            yield Work(
                "sample",
                f"{name}, {num_rows} x {vocab}",
                partial(sampling_triton.sample, logits, rows),
                4 * logits.numel(),
                in_graph=False,
            )
