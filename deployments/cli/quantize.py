"""`penstock quantize`: write a quantised checkpoint, for Penstock and other engines.

Flags and report only: workers/weights/quantize.py does the work, and torch is imported then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.deployments.cli.flags.commands import add_command
from penstock.workers.errors import ConfigError
from penstock.workers.quantization import QUANTIZED_FORMATS
from penstock.workers.weights.hub import resolve_model

EXAMPLES = """\
examples:
  penstock quantize ./my-checkpoint --to int8               into ./my-checkpoint-int8
  penstock quantize org/name --to int4 --out ./name-int4
  penstock serve ./name-int4                                served as stored

formats:
  int8  8-bit weights and activations (W8A8); a scale for each output channel, one for each token
  int4  4-bit weights, groups of 128 along the input; activations stay
  nf4   4-bit weights, a table of 16 values, blocks of 64; activations stay
  fp8   E4M3 weights and activations; scales as int8

int8, int4 and fp8 are written in compressed-tensors' layout (int-quantized, pack-quantized,
float-quantized), nf4 in bitsandbytes': other engines read them too. Nothing is calibrated: each
weight is rounded to the nearest code. Embedding, norms, biases, routers and, unless asked for, the
head stay as they are. The same at load, without a second checkpoint: penstock serve MODEL --weights
int8.
"""


def add_quantize(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `quantize` to the commands of the command line."""
    quantize = add_command(
        commands,
        "quantize",
        help="write a quantised copy of a checkpoint",
        description="Write a quantised copy of a checkpoint, tensor by tensor. Needs memory for "
        "one tensor only, and no GPU.",
        epilog=EXAMPLES,
    )
    quantize.add_argument("model", metavar="MODEL", help="folder, hub id, builtin or builtin-moe")
    quantize.add_argument("--to", choices=QUANTIZED_FORMATS, required=True, help="the format")
    quantize.add_argument(
        "--out", metavar="DIR", help="a new folder (default: the model's name and the format, here)"
    )
    quantize.add_argument(
        "--quantize-o",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="attention's output projections too (default: yes)",
    )
    quantize.add_argument(
        "--quantize-lm-head",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="the head too (default: no)",
    )
    quantize.add_argument("--no-progress", action="store_true", help="no progress bar")
    quantize.set_defaults(run=run)


def run_quantize(args: argparse.Namespace) -> int:
    """`penstock quantize`; the exit status. Raises ConfigError or LoadError."""
    out = Path(args.out or f"{args.model.rstrip('/').rsplit('/', 1)[-1]}-{args.to}").expanduser()
    if out.exists():  # checked before anything is downloaded
        raise ConfigError(f"{out} exists already; give another --out, or remove it")
    from tqdm import tqdm

    from penstock.workers.weights.quantize import plan_quantize, write_quantized

    plan = plan_quantize(
        resolve_model(args.model),
        args.to,
        quantize_o=args.quantize_o,
        quantize_lm_head=args.quantize_lm_head,
    )
    with tqdm(
        total=plan.num_source_bytes,
        unit="B",
        unit_scale=True,
        desc=f"to {args.to}",
        file=sys.stderr,
        disable=args.no_progress,
    ) as bar:
        write_quantized(plan, out, bar.update)
    print(
        f"{out}: {plan.num_quantized} weights in {args.to}, {plan.num_source_bytes / 2**20:.1f} MiB"
        f" became {plan.num_bytes / 2**20:.1f} MiB\n"
        f"serve it with: penstock serve {out}"
    )
    return 0
