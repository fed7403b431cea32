"""Which device of the table a graphics card is, by the name that it gives itself."""

from __future__ import annotations

import pytest

from penstock.workers.planning.hardware import DEVICES, device_like


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "4090"),
    ],
)
def test_a_card_of_the_table(card, name):
    assert device_like(card) is DEVICES[name]


@pytest.mark.parametrize("card", ["NVIDIA L40S", "NVIDIA B200", "Some Card 24"])
def test_an_unknown_card_promises_least(card):
    found = device_like(card)
    ratios = [d.peak("bf16") / d.bandwidth for n, d in DEVICES.items() if n != "cpu"]
    assert found.peak("bf16") / found.bandwidth == min(ratios)
