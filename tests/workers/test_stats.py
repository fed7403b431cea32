"""Statistics of several ranks become those of their group, and travel as JSON."""

from __future__ import annotations

from dataclasses import fields, replace

from penstock.workers.stats import ExpertStats, LayerAccuracy

OWN = ExpertStats(
    num_slots=4, num_experts=6, slot_bytes=100, epoch=3, num_hits=10, num_partial=2, num_misses=5,
    num_neurons_wanted=170, num_neurons_there=110, num_prefetched=8, num_prefetch_used=3,
    demand_bytes=500, prefetch_bytes=800, stall_s=2.5, link_busy_s=4.0, num_corrupted=0,
    by_layer=(LayerAccuracy(0, 20, 15, 8, 4), LayerAccuracy(2, 10, 5, 4, 1, 7, 6)),
)  # fmt: skip
OTHER = replace(
    OWN, num_slots=3, epoch=4, num_hits=1, stall_s=3.0, num_withheld=9,
    by_layer=(LayerAccuracy(2, 1, 1, 1, 1, 1, 1), LayerAccuracy(5, 2, 2, 2, 2, 2, 2)),
)  # fmt: skip


def test_of_ranks():
    both = ExpertStats.of_ranks([OWN, OTHER])
    assert (both.slot_bytes, both.epoch, both.stall_s) == (100, 3, 3.0)
    assert both.by_layer == (
        LayerAccuracy(0, 20, 15, 8, 4),
        LayerAccuracy(2, 11, 6, 5, 2, 8, 7),
        LayerAccuracy(5, 2, 2, 2, 2, 2, 2),
    )
    summed = {each.name for each in fields(ExpertStats)}
    for name in summed - {"slot_bytes", "epoch", "stall_s", "by_layer"}:
        assert getattr(both, name) == getattr(OWN, name) + getattr(OTHER, name), name
    assert ExpertStats.of_ranks([OTHER]) == OTHER


def test_as_json():
    for stats in (OWN, OTHER, replace(OWN, by_layer=())):
        assert ExpertStats.from_json(stats.to_json()) == stats
