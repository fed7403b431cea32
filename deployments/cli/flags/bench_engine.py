"""The flags of `penstock bench offline` and `ablate`: the engine in this process, without a server.

bench.py and ablate.py act on them. The flags of lengths and output are those of `serve`, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from penstock.deployments.cli.flags.commands import add_command
from penstock.deployments.cli.flags.engine import add_batched_tokens, add_compute
from penstock.deployments.cli.flags.types import non_negative_int, positive, positive_int
from penstock.workers.config import WEIGHTS
from penstock.workers.option_groups.speculation import SPECULATIONS

OFFLINE_EXAMPLES = """\
examples:
  penstock bench offline                                     32 requests on the built-in model
  penstock bench offline ./my-checkpoint --weights bf16 --input-len 16:512 --output-len 16:256
  penstock bench offline --trace lengths.json --num-requests 200 --json out.json
"""
ABLATE_EXAMPLES = """\
examples:
  penstock bench ablate                                      on the built-in model
  penstock bench ablate ./my-checkpoint --num-requests 48 --output-len 32:256 --rounds 5
  penstock bench ablate --input-len 256:768 --shared-prefix 128 --max-num-batched-tokens 256
  penstock bench ablate smollm2 --served                     servers, over HTTP
  penstock bench ablate --trace lengths.json --pool-share 0.25 --json out.json

All requests are submitted at the start. The KV pool holds --pool-share of their tokens in the
model's own KV format, so that memory is scarce. Every request has the limit --max-tokens; the
engine never knows the true length; tokens are drawn with temperature 1, top_k 50 and top_p 0.9.
Compare within a run: every round serves the load with all parts and without each of them. The table
has medians, and the 95 % confidence interval of each gain over the rounds. Chunked prefill needs
--max-num-batched-tokens below the prompts' length to matter, and the prefix cache --shared-prefix.
"""


def add_offline(forms: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `offline` to the forms of `bench`."""
    offline = add_command(
        forms,
        "offline",
        help="the engine in this process: no Ray, no network",
        description="Run requests that are all submitted at the start on the engine alone.",
        epilog=OFFLINE_EXAMPLES,
    )
    _add_engine_flags(offline)
    add_length_flags(offline, num_requests=32)
    add_output_flags(offline, plot=False)
    offline.set_defaults(run=run)


def add_ablate(forms: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `ablate` to the forms of `bench`."""
    ablate = add_command(
        forms,
        "ablate",
        help="what each part of the engine contributes to throughput",
        description="Serve one load with all parts (mixed batches, chunked prefill, async "
        "scheduling, quantised weights and KV, fast sampling, prefix cache, text in parallel with "
        "the steps, predicted admission) and without each of them.",
        epilog=ABLATE_EXAMPLES,
    )
    _add_ablate_flags(ablate)
    add_length_flags(ablate, num_requests=32)
    add_output_flags(ablate, plot=False)
    ablate.set_defaults(run=run)


def add_length_flags(parser: argparse.ArgumentParser, num_requests: int | None) -> None:
    group = parser.add_argument_group("number and lengths")
    default = "100, or as many as fit in --duration" if num_requests is None else str(num_requests)
    group.add_argument(
        *("--num-requests", "--num-prompts"),  # the latter as in vLLM
        type=positive_int,
        default=num_requests,
        metavar="N",
        help=f"number of requests (default: {default})",
    )
    group.add_argument(
        *("--input-len", "--random-input-len"),
        default="128",
        metavar="N",
        help="prompt tokens, or LOW:HIGH (default: 128)",
    )
    group.add_argument(
        *("--output-len", "--random-output-len"),
        default="64",
        metavar="N",
        help="answer tokens, or LOW:HIGH (default: 64)",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="file with lengths: CSV with TIMESTAMP, ContextTokens, GeneratedTokens; or a JSON"
        " list of {prompt_tokens, gen_tokens}",
    )
    group.add_argument(
        "--max-prompt-tokens", type=positive_int, metavar="N", help="clip prompts to N tokens"
    )
    group.add_argument(
        "--max-output-tokens", type=positive_int, metavar="N", help="clip answers to N tokens"
    )
    group.add_argument(
        "--skip-too-long",
        action="store_true",
        help="drop requests that do not fit the model's context",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed; the same seed gives the same load (default: 0)",
    )


def add_output_flags(parser: argparse.ArgumentParser, *, plot: bool) -> None:
    group = parser.add_argument_group("output in addition to the table")
    group.add_argument("--json", metavar="FILE", help="write all figures and all requests")
    if plot:
        group.add_argument("--plot", metavar="FILE.png", help="write a picture; needs matplotlib")
    group.add_argument("--no-progress", action="store_true", help="no progress bar")


def _add_ablate_flags(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--weights",
        choices=("int8", "int4", "nf4", "fp8"),
        default="int8",
        help="weight format; compared with the checkpoint's own (default: int8)",
    )
    group.add_argument(
        "--kv", choices=("int8", "fp8"), default="int8", help="KV format (default: int8)"
    )
    group.add_argument(
        "--pool-share",
        type=positive,
        default=0.25,
        metavar="X",
        help="share of the load's tokens that the KV pool holds unquantised (default: 0.25)",
    )
    group.add_argument(
        "--shared-prefix",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="words at the start that all prompts share, for the prefix cache (default: 0)",
    )
    group.add_argument(
        "--max-tokens",
        type=positive_int,
        metavar="N",
        help="limit that each request sends (default: four times the longest drawn answer)",
    )
    group.add_argument(
        "--rounds",
        type=positive_int,
        default=3,
        metavar="N",
        help="rounds; the table has medians (default: 3)",
    )
    group.add_argument(
        "--parts",
        nargs="+",
        metavar="PART",
        help="only these: continuous, merge, kv, weights, text, async, chunked, sampling, prefix, "
        "admission (default: all)",
    )
    group.add_argument(
        "--served",
        action="store_true",
        help="through two `penstock serve` at a time, over HTTP; without the parts that are no "
        "settings (continuous batching, text beside the steps)",
    )
    _add_step_flags(group)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--weights", choices=WEIGHTS, default="auto", help="weight format (default: auto)"
    )
    _add_step_flags(group)
    group.add_argument(
        "--kv-cache-gb", type=positive, metavar="X", help="GiB for the KV cache and activations"
    )
    group.add_argument(
        "--speculate",
        choices=SPECULATIONS,
        default="off",
        help="where draft tokens come from; random prompts flatter none (default: off)",
    )
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="with --speculate draft, a smaller model with the same vocabulary (default: the model "
        "itself in int4)",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_path",
        nargs="?",
        default="builtin",
        metavar="MODEL",
        help="model folder, hub id or built-in (default: builtin)",
    )


def _add_step_flags(group: Any) -> None:
    add_compute(group)
    group.add_argument(
        "--max-num-seqs",
        type=positive_int,
        default=64,
        metavar="N",
        help="maximum sequences in one step (default: 64)",
    )
    add_batched_tokens(group)
