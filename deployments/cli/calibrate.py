"""`penstock calibrate`: write the score thresholds by which moe_mode sparse chooses neurons.

Flags and report only: workers/calibrate.py does the work, and torch is imported then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.deployments.cli.flags.commands import add_command
from penstock.workers.errors import ConfigError

EXAMPLES = """\
examples:
  penstock calibrate ./qwen3-moe                       on text that the model writes itself
  penstock calibrate ./qwen3-moe --text novel.txt      on a text like those to come
  penstock serve ./qwen3-moe --expert-cache-gb 8 --moe-mode sparse --moe-keep 0.6

An expert's output is a sum over its neurons, and most of them add little for most tokens. In
moe_mode sparse a token of the answer takes only the neurons whose score reaches a threshold, and
only those have to come over the link. How large a score must be for a given share of neurons to be
kept differs from expert to expert: this command runs the model over some text, counts the scores of
each expert, and writes a threshold for each share (0.05, 0.10, ... of the neurons) and each kind of
score:
  gate     |silu(gate)|
  up       |up|
  product  |silu(gate) * up|, the default of moe_score
Scores come from a copy of the gate and up matrices in few bits, here as later when serving;
--format says how many. An expert that fewer than 1000 tokens went through gets its layer's
thresholds. Measure what a share costs in quality on your own data: docs/guide/experts.md has the
curve of the built-in model.
"""


def add_calibrate(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `calibrate` to the commands of the command line."""
    calibrate = add_command(
        commands,
        "calibrate",
        help="measure neuron thresholds of a mixture-of-experts model, for moe_mode sparse",
        description="Run a mixture-of-experts model over some text, and write the thresholds above "
        "which moe_mode sparse keeps a neuron.",
        epilog=EXAMPLES,
    )
    calibrate.add_argument("model", metavar="MODEL", help="folder, hub id, or builtin-moe")
    calibrate.add_argument(
        "--text", metavar="FILE", help="plain text in UTF-8; none: text that the model generates"
    )
    calibrate.add_argument(
        "--tokens",
        type=int,
        default=32768,
        metavar="N",
        help="maximum tokens to run (default: 32768)",
    )
    calibrate.add_argument(
        "--format",
        choices=("int8", "int4"),
        default="int8",
        help="number format of the weight copy that gives the scores; int4 takes half the memory "
        "(default: int8)",
    )
    calibrate.add_argument(
        "--out",
        metavar="FILE",
        help="output file (default: neuron_thresholds.json in the model's folder)",
    )
    calibrate.add_argument(
        "--weights",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="number format of the weights (default: auto)",
    )
    calibrate.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)"
    )
    calibrate.add_argument(
        "--expert-cache-gb",
        type=float,
        default=1.0,
        metavar="X",
        help="GiB of device memory that caches experts (default: 1)",
    )
    calibrate.add_argument(
        "--expert-store-dir",
        default="/dev/shm",
        metavar="DIR",
        help="folder in memory for a temporary copy of all experts (default: /dev/shm)",
    )
    calibrate.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of generated text (default: 0)"
    )
    calibrate.add_argument("--no-progress", action="store_true", help="no progress bar")
    calibrate.set_defaults(run=run)


def run_calibrate(args: argparse.Namespace) -> int:
    """`penstock calibrate`; the exit status. Raises ConfigError or LoadError."""
    if args.tokens < 1:
        raise ConfigError(f"--tokens must be positive; got {args.tokens}")
    text = None if args.text is None else _read(Path(args.text).expanduser())
    from penstock.workers.weights.hub import resolve_model

    folder = resolve_model(args.model)
    from tqdm import tqdm

    from penstock.workers.calibrate import calibrate
    from penstock.workers.experts.neurons.thresholds import thresholds_path
    from penstock.workers.text.tokenizer import Tokenizer

    out = thresholds_path(folder) if args.out is None else Path(args.out).expanduser()
    ids = None if text is None else Tokenizer.load(folder).encode(text)[: args.tokens]
    with tqdm(
        total=args.tokens if ids is None else len(ids),
        unit="token",
        desc="calibrating",
        file=sys.stderr,
        disable=args.no_progress,
    ) as bar:
        found = calibrate(
            str(folder),
            ids,
            args.tokens,
            format=args.format,
            weights=args.weights,
            device=args.device,
            expert_cache_gb=args.expert_cache_gb,
            folder=args.expert_store_dir,
            seed=args.seed,
            text="" if args.text is None else Path(args.text).name,
            on_tokens=bar.update,
        )
    found.save(out)
    print(
        f"{out}: thresholds of {len(found.layers) * found.num_experts} experts, from "
        f"{found.num_tokens:,} tokens\n"
        f"serve with them: penstock serve {args.model} --expert-cache-gb GB --moe-mode sparse"
        + ("" if args.out is None else f" --moe-thresholds {out}")
    )
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from error
