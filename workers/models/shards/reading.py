"""The tensors of a checkpoint as one rank reads them: its rows, and its experts.

Rows lie one after another in a file, so a rank reads a range of bytes. Quantised tensors of other
layouts than rows (`stored.py`: packed over outputs, or with blocks across rows) are read whole, and
cut in memory. Of a tensor that is all experts of a layer, each is read by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.workers.models.shards.shard import Shard
from penstock.workers.weights.checkpoint import StoredTensor
from penstock.workers.weights.stored import BLOCK_MARKS, MARKS

ROW_KINDS = frozenset({"weight", *BLOCK_MARKS})


def own_part(
    tensors: Mapping[str, StoredTensor], shard: Shard
) -> tuple[dict[str, StoredTensor], frozenset[str]]:
    """The tensors that the rank reads, and the modules of which they have its rows only."""
    kept = {name: stored for name, stored in tensors.items() if not shard.lacks(name)}
    modules = set()
    for name, stored in kept.items():
        module, _, kind = name.rpartition(".")
        span = None
        if kind in ROW_KINDS and not _is_packed(module, tensors):
            span = shard.rows_of(module)
        # One of another shape is wrong, and said to be when it is taken.
        if span is not None and stored.shape[:1] == (span.whole,):
            kept[name] = stored.part(span.first, span.end)
            modules.add(module)
    return kept, frozenset(modules)


def _is_packed(module: str, tensors: Mapping[str, StoredTensor]) -> bool:
    return any(f"{module}.{mark}" in tensors for mark in MARKS if mark not in BLOCK_MARKS)
