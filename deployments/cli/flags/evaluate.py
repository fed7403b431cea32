"""The flags of `penstock eval`; cli/evaluation/evaluate.py acts on them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

from penstock.deployments.cli.flags.commands import add_command
from penstock.deployments.cli.flags.engine import (
    add_batched_tokens,
    add_compute,
    add_quantized_layers,
)
from penstock.deployments.cli.flags.types import list_of, non_negative_int, positive, positive_int
from penstock.workers.config import (
    WEIGHTS,
    Int4Activations,
    Int4Group,
    Int8Group,
    KvFormat,
    KvGroup,
)

DESCRIPTION = """\
Measure what number formats and context policies cost in quality on this model and this text. The
engine serves the same tokens with each combination and compares it with the baseline: perplexity,
KL divergence over the whole vocabulary, the likeliest id, and greedy answers id by id.
"""
EXAMPLES = """\
examples:
  penstock eval ./my-checkpoint --text novel.txt
      int8 and int4 weights against fp32
  penstock eval ./model.Q4_K_M.gguf --text chats.txt code.py --weights auto,int8 --kv auto,int8,fp8
  penstock eval org/name --text novel.txt --weights int8 --int8-group 32,64,row --json out.json
  penstock eval ./my-checkpoint --text novel.txt --weights auto --window-tokens 2048 \\
      --context-policy full,4+508,16+1008 --plot out.svg

Every combination of the lists is measured; each model is loaded once. Windows of text are the
samples: all standard errors are taken over them, and those of changes over paired differences.
Take text that the model was not trained on, and such as it will meet.
docs/guide/quality.md explains the figures and says how many windows they need.
"""


def add_eval(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `eval` to the commands of the command line."""
    parser = add_command(
        commands,
        "eval",
        help="measure what number formats cost in quality, on your model and text",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="folder, GGUF file, hub id or built-in, as for serve"
    )
    parser.add_argument("--revision", metavar="NAME", help="with a hub id: branch, tag or commit")
    parser.add_argument("--download-dir", metavar="DIR", help="folder for models from the hub")
    _add_text(parser)
    _add_combinations(parser)
    _add_machine(parser)
    output = parser.add_argument_group("output in addition to the table")
    output.add_argument(
        "--json",
        metavar="FILE",
        help="write all figures, settings, the machine and the model's digest; written after each "
        "combination",
    )
    output.add_argument(
        "--plot",
        metavar="FILE",
        help="write a picture of quality by bits per weight, .svg or .png; needs matplotlib",
    )
    output.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def _add_text(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text")
    group.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="plain text in UTF-8; windows are taken evenly from all files. Penstock ships none",
    )
    group.add_argument(
        "--windows", type=positive_int, default=16, metavar="N", help="windows (default: 16)"
    )
    group.add_argument(
        "--window-tokens",
        type=positive_int,
        default=1024,
        metavar="N",
        help="tokens of one window, all but the first scored (default: 1024)",
    )
    group.add_argument(
        "--greedy-tokens",
        type=non_negative_int,
        default=64,
        metavar="N",
        help="tokens of each greedy answer, one for the beginning of each window; 0: no answers "
        "(default: 64)",
    )


def _add_combinations(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured; a LIST has commas")
    group.add_argument(
        "--baseline",
        choices=WEIGHTS,
        default="fp32",
        help="weight format that all are compared with, with a plain KV cache and full context "
        "(default: fp32: the checkpoint's weights in full precision, activations too)",
    )
    _add_list(group, "--weights", WEIGHTS, "int8,int4", "weight formats")
    _add_list(
        group, "--int8-group", get_args(Int8Group), "64", "of int8, activations that share a scale"
    )
    _add_list(group, "--int4-group", get_args(Int4Group), "16", "of int4, inputs that share a step")
    _add_list(
        group,
        "--int4-wide-layers",
        ("on", "off"),
        "on",
        "of int4, whether q, k, v and down of some layers are int8",
    )
    _add_list(
        group,
        "--int4-activations",
        get_args(Int4Activations),
        "auto",
        "of int4, how activations are multiplied; auto: as penstock serve does",
    )
    _add_list(
        group, ("--kv", "--kv-dtype", "--kv-cache-dtype"), get_args(KvFormat), "auto", "KV formats"
    )
    _add_list(
        group, "--kv-group", get_args(KvGroup), "auto", "of KV formats, dimensions with one scale"
    )
    group.add_argument(
        "--context-policy",
        type=list_of(),
        default=list_of()("full"),
        metavar="LIST",
        help="full, or sink windows as SINKS+WINDOW or SINKS+WINDOW/ROLL in tokens (default: full)",
    )
    add_quantized_layers(group)
    group.add_argument(
        "--activations",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="dtype of what is not quantised, except in the baseline; auto: as `penstock serve` "
        "does (default: auto)",
    )


def _add_list(
    group: Any, names: str | tuple[str, ...], choices: tuple[str, ...], default: str, help: str
) -> None:
    made = list_of(choices)
    text = f"{help}, of {', '.join(choices)} (default: {default})"
    flags = (names,) if isinstance(names, str) else names
    group.add_argument(*flags, type=made, default=made(default), metavar="LIST", help=text)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add_compute(group)
    add_batched_tokens(group)
    group.add_argument(
        "--kv-cache-gb", type=positive, metavar="X", help="GiB for the KV cache and activations"
    )
