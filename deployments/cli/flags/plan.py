"""The flags of `penstock plan`; plan.py acts on them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from penstock.deployments.cli.flags.commands import add_command
from penstock.deployments.cli.flags.engine import add_quantized_layers
from penstock.deployments.cli.flags.types import non_negative, positive_int
from penstock.workers.config import DEFAULT_KV_GROUP
from penstock.workers.planning.group import LINKS
from penstock.workers.planning.hardware import DEVICES
from penstock.workers.planning.shapes import SHAPES

EXAMPLES = f"""\
examples:
  penstock plan Llama-3-8B                                 on every device of the table
  penstock plan Qwen2.5-7B --device L4,4090 --context 8192
  penstock plan ./my-checkpoint --device A100 --weights bf16,int4 --kv int8 --price-per-hour 1.8
  penstock plan ./my-checkpoint --device here --batch 8    this machine, measured
  penstock plan Mixtral-8x7B --device H200 --json plan.json --plot plan.png
  penstock plan Llama-3.1-70B --device H100 --tensor-parallel-size 1,2,4,8 --link pcie
  penstock plan Llama-3-8B --device 4090 --speculate draft --weights bf16

Reading the table. blocks: KV blocks that fit next to weights and activations. batch: sequences of
--context tokens that fit in them. step: one decode step of that batch. nt: the ridge, the tokens
that a step computes in the time of one. TTFT: ms, for a prompt that runs alone. cost/M: of a
million generated tokens. tp, pp, link: ranks and stages of a group, and the time of a step in
which they send one another rows: a forecast, since groups run on CPUs only so far. draft GB, ms:
a draft model's weights, and its step of one token for each sequence (for 32 at most). These are
bounds, nothing can be faster: for an estimate give --compute-share 0.5 --bandwidth-share 0.8, or
the shares that you have measured. `here` is measured: its figures are estimates, not bounds.

models:  {", ".join(SHAPES)}
devices: {", ".join(DEVICES)}, here
"""
HERE = "here"  # the name of this machine as a device
DEFAULT_CONTEXT = 2048
WEIGHTS = "bf16,int8,fp8,int4,nf4"
PROMPT_LENS = (128, 1024, 8192)


def add_plan(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `plan` to the commands of the command line."""
    plan = add_command(
        commands,
        "plan",
        help="bound a model's batch, speed and cost on a device",
        description="Roofline bounds for each number format: KV blocks, largest batch, step time, "
        "tokens/s, ridge, TTFT, cost. Needs no GPU and no weights.",
        epilog=EXAMPLES,
    )
    plan.add_argument(
        "model", metavar="MODEL", help="folder with config.json, GGUF file, or a name below"
    )
    _add_comparison_flags(plan)
    _add_machine_flags(plan)
    group = plan.add_argument_group("output in addition to the table")
    group.add_argument("--json", metavar="FILE", help="write all figures")
    group.add_argument("--plot", metavar="FILE.png", help="write a picture; needs matplotlib")
    plan.set_defaults(run=run)


def _add_comparison_flags(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("what to compare; comma-separated")
    group.add_argument(
        "--device",
        default=",".join(DEVICES),
        metavar="NAMES",
        help=f"of the table below, or {HERE}: this machine's CPU, measured in some seconds "
        "(default: all of the table)",
    )
    group.add_argument(
        "--weights",
        metavar="FORMATS",
        help=f"(default: {WEIGHTS}; for a GGUF file also auto, the formats of the file; for a "
        "quantised checkpoint auto,bf16)",
    )
    group.add_argument(
        "--kv", default="bf16,int8", metavar="FORMATS", help="(default: %(default)s)"
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        default="1",
        metavar="N,N",
        help="devices that share one model; bytes, blocks and batch are then of each of them, and "
        "the tokens of all (default: %(default)s)",
    )
    group.add_argument(
        "--enable-expert-parallel",
        "-ep",
        action="store_true",
        help="ranks have some routed experts whole each, and not some columns of all",
    )
    group.add_argument(
        "--pipeline-parallel-size",
        "-pp",
        default="1",
        metavar="N,N",
        help="stages that share the layers, each of the devices of -tp; each number is combined "
        "with each of -tp (default: %(default)s)",
    )
    group.add_argument(
        "--speculate",
        choices=("off", "draft"),
        default="off",
        help="draft: with a draft model, whose weights, and K and V, take memory "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="with --speculate draft, named as MODEL is (default: the model itself, which reads "
        "the model's K and V)",
    )
    group.add_argument(
        "--draft-weights",
        choices=("fp32", *WEIGHTS.split(",")),
        default="int4",
        help="number format of the draft model (default: %(default)s)",
    )
    group = plan.add_argument_group("the load")
    group.add_argument(
        "--context",
        type=positive_int,
        metavar="N",
        help=f"tokens of each sequence (default: {DEFAULT_CONTEXT}, or the model's longest)",
    )
    group.add_argument(
        "--prompt-lens",
        metavar="N,N",
        help=f"prompt lengths for TTFT (default: those of {PROMPT_LENS} that fit the model)",
    )
    group.add_argument(
        "--batch",
        type=positive_int,
        metavar="N",
        help="batch size to plan for (default: the largest that fits)",
    )


def _add_machine_flags(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("memory and machine")
    group.add_argument(
        "--block-size",
        type=positive_int,
        default=16,
        metavar="N",
        help="tokens in one KV block (default: 16)",
    )
    group.add_argument(
        "--kv-group",
        default="auto",
        metavar="N",
        help="head dimensions that share a scale in int8 and fp8 KV, or head; 0: no scales; "
        f"auto, as the engine: {DEFAULT_KV_GROUP}, or the head where that does not divide it",
    )
    group.add_argument(
        "--link",
        choices=tuple(LINKS),
        default="nvlink",
        help="between the devices of a group: "
        + "; ".join(
            f"{name}: {link.source.removeprefix('assumed: ')}" for name, link in LINKS.items()
        )
        + ". Assumed, not measured (default: %(default)s)",
    )
    add_quantized_layers(group)
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive_int,
        default=2048,
        metavar="N",
        help="maximum tokens of one step; sets the memory for activations (default: 2048)",
    )
    group.add_argument(
        "--reserve-gb",
        type=non_negative,
        default=1.0,
        metavar="X",
        help="GB kept free for everything else (default: 1)",
    )
    group.add_argument(
        "--compute-share",
        type=non_negative,
        default=1.0,
        metavar="X",
        help="share of the peak compute rate that is reached (default: 1)",
    )
    group.add_argument(
        "--bandwidth-share",
        type=non_negative,
        default=1.0,
        metavar="X",
        help="share of the peak memory bandwidth that is reached (default: 1)",
    )
    group.add_argument(
        "--price-per-hour",
        type=non_negative,
        metavar="X",
        help="price of one device, for the cost column",
    )
