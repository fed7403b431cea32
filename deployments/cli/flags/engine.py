"""Flags of an engine that several commands have, with the same words."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.deployments.cli.flags.types import positive_int


def add_quantized_layers(group: Any) -> None:
    """Which linear layers a weight format is for, besides those that always are."""
    group.add_argument(
        "--quantize-o",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="quantise the attention output projections too (default: yes)",
    )
    group.add_argument(
        "--quantize-lm-head",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="quantise the LM head too, in int8 beside int4 (default: no)",
    )


def add_compute(group: Any) -> None:
    """What an engine computes on."""
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)"
    )
    group.add_argument(
        "--threads", type=positive_int, metavar="N", help="CPU threads (default: all cores)"
    )


def add_batched_tokens(group: Any) -> None:
    """The limit of a step."""
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive_int,
        default=2048,
        metavar="N",
        help="maximum tokens of one step (default: 2048)",
    )
