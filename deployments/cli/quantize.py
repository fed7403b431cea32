"""`penstock quantize`: write a quantised checkpoint, for Penstock and other engines.

Flags and report only: workers/weights/quantize.py does the work, with --calibrate
workers/calibration/checkpoint.py, and torch is imported then.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.deployments.cli.flags.commands import add_command
from penstock.deployments.cli.flags.engine import add_quantized_layers
from penstock.workers.errors import ConfigError
from penstock.workers.quantization import QUANTIZED_FORMATS

if TYPE_CHECKING:
    from tqdm import tqdm

EXAMPLES = """\
examples:
  penstock quantize ./my-checkpoint --to int8               into ./my-checkpoint-int8
  penstock quantize org/name --to int4 --out ./name-int4
  penstock quantize org/name ./name-int4 --to int4 --calibrate texts.txt     with your own text
  penstock quantize org/name ./name-int4 --to int4 --grid steps --hadamard --calibrate self
                                                            for Penstock, without a text
  penstock serve ./name-int4                                served as stored

formats:
  int8  8-bit weights and activations (W8A8); a scale for each output channel, one for each token
  int4  4-bit weights; a scale and a zero point for 32 inputs (--group-size, --grid)
  nf4   4-bit weights, a table of 16 values, blocks of 64; activations stay
  fp8   E4M3 weights and activations; scales as int8

int8, int4 and fp8 are written in compressed-tensors' layout (int-quantized, pack-quantized,
float-quantized), nf4 in bitsandbytes': other engines read them too. Without --calibrate each weight
is rounded to the nearest code; int4's scales and zero points are those of the least squared error,
4.6 bits a weight. Embedding, norms, biases, routers and, unless asked for, the head stay as they
are. At load, without a second checkpoint: penstock serve MODEL --weights int8.

grids of int4:
  zero-points  a scale and an integer zero point for each group: 4.6 bits in groups of 32
  symmetric    no zero points: 4.5 bits
  steps        as --weights int4 rounds at load: Penstock holds 5 bits in groups of 16, or 4.5 in
               groups of 32, and multiplies in int8. The file is an int8 checkpoint, twice as
               large, which other engines serve as int8. The least loss, and the fastest here

With --hadamard, of int8 and steps, weights are multiplied by a Hadamard matrix in blocks of 64
inputs before they are rounded, and activations before they are: less loss, as --weights int8 and
int4 have it at load. The file says so (transform_config); an engine that does not read that would
answer nonsense.

With --calibrate FILE, a plain text in UTF-8 like those that the model will see, the model runs over
parts of it, and int4's rounding errors are made up for by the weights that follow (GPTQ). With
--calibrate self it runs over what it writes itself. Methods with awq also scale the input channels
that follow a norm, and divide the norm by these scales.
"""
_NEEDS_TEXT = ("calibration_tokens", "method", "act_order", "damping", "bits_per_weight")
_OF_INT4 = ("calibrate", "group_size", "grid")
OWN_TEXT = "self"  # of --calibrate


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
    quantize.add_argument("folder", metavar="OUT", nargs="?", help="a new folder, as --out")
    quantize.add_argument(
        "--to", "--weights", choices=QUANTIZED_FORMATS, required=True, help="the format"
    )
    quantize.add_argument(
        "--out", metavar="DIR", help="a new folder (default: the model's name and the format, here)"
    )
    add_quantized_layers(quantize)
    quantize.add_argument(
        "--hadamard",
        action="store_const",
        const=True,
        help="of int8, and of int4 with --grid steps: transform weights, and activations while it "
        "is served, so that rounding loses less; other engines must know transform_config",
    )
    quantize.add_argument("--no-progress", action="store_true", help="no progress bar")
    _add_calibration(quantize)
    quantize.set_defaults(run=run)


def _add_calibration(quantize: argparse.ArgumentParser) -> None:
    """The flags of --calibrate. Their defaults are None: given or not can be told apart."""
    grids = quantize.add_argument_group("int4")
    grids.add_argument(
        "--group-size",
        type=int,
        choices=(16, 32, 64, 128),
        help="inputs that share a scale; larger ones take fewer bits (default: 32; 16 with --grid "
        "steps)",
    )
    grids.add_argument(
        "--grid",
        choices=("zero-points", "symmetric", "steps"),
        help="how the codes of a group lie, see above (default: zero-points)",
    )
    flags = quantize.add_argument_group("int4 with data")
    flags.add_argument(
        "--calibrate",
        metavar="FILE",
        help="a plain text in UTF-8 that errors are measured on; or self: the model writes one",
    )
    flags.add_argument(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="tokens of it that are used, evenly over the file (default: 16384)",
    )
    flags.add_argument(
        "--method",
        choices=("awq-gptq", "gptq", "awq", "nearest"),
        help="how weights are rounded; nearest only fits the grids, without the text (default: "
        "gptq)",
    )
    flags.add_argument(
        "--act-order",
        action="store_const",
        const=True,
        help="round the columns of the largest inputs first; groups stay as they are",
    )
    flags.add_argument(
        "--damping",
        type=float,
        metavar="SHARE",
        help="of the inputs' mean square, added to each before GPTQ (default: 0.01)",
    )
    flags.add_argument(
        "--bits-per-weight",
        type=float,
        metavar="BITS",
        help="make as many linear layers int8 as this mean allows, those that gain most (default: "
        "none)",
    )


def run_quantize(args: argparse.Namespace) -> int:
    """`penstock quantize`; the exit status. Raises ConfigError or LoadError."""
    if args.folder and args.out:
        raise ConfigError("OUT and --out both name the new folder; give one of them")
    name = f"{args.model.rstrip('/').rsplit('/', 1)[-1]}-{args.to}"
    out = Path(args.folder or args.out or name).expanduser()
    if out.exists():  # checked before anything is downloaded
        raise ConfigError(f"{out} exists already; give another --out, or remove it")
    _check_calibration(args)
    with stopped_by_sigterm():
        return _plain(args, out) if args.calibrate is None else _calibrated(args, out)


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the process as an exception does: what is unfinished is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_calibration(args: argparse.Namespace) -> None:
    if args.hadamard and not (args.to == "int8" or args.grid == "steps"):
        raise ConfigError("--hadamard is for --to int8, and for --to int4 with --grid steps")
    given = [name for name in _OF_INT4 if getattr(args, name) is not None]
    if given and args.to != "int4":
        raise ConfigError(f"--{given[0].replace('_', '-')} is for --to int4, not {args.to}")
    if args.calibrate is None:
        given = [name for name in _NEEDS_TEXT if getattr(args, name) is not None]
        if given:
            flag = given[0].replace("_", "-")
            raise ConfigError(f"--{flag} is for calibrated weights: give a text with --calibrate")
        return
    if args.calibration_tokens is not None and args.calibration_tokens < 256:
        raise ConfigError("--calibration-tokens must be at least 256")
    if args.damping is not None and not 0 < args.damping <= 1:
        raise ConfigError("--damping must lie above 0, and be at most 1")
    if args.calibrate != OWN_TEXT and not Path(args.calibrate).expanduser().is_file():
        raise ConfigError(
            f"--calibrate: {args.calibrate} is not a file; give a plain text in UTF-8, or "
            f"{OWN_TEXT}, with which the model writes one"
        )


def _calibrated(args: argparse.Namespace, out: Path) -> int:
    from penstock.workers.calibration.checkpoint import calibrate_into, plan_calibrated, widened
    from penstock.workers.calibration.rounding import Recipe
    from penstock.workers.weights.hub import resolve_model

    named = {"method": args.method, "act_order": args.act_order, "damping": args.damping}
    given = {name: value for name, value in named.items() if value is not None}
    recipe = Recipe(**given, **_grids(args), hadamard=bool(args.hadamard))
    folder = resolve_model(args.model)
    plan = plan_calibrated(
        folder,
        recipe,
        quantize_o=args.quantize_o,
        quantize_lm_head=args.quantize_lm_head,
    )
    windows, whose = _windows(args, folder)
    if args.bits_per_weight is not None:
        with _bar(args, "measure", plan.num_weights) as shown:
            plan = widened(plan, windows, args.bits_per_weight, shown.update)
    with _bar(args, "calibrate", plan.num_weights) as shown:
        experts = calibrate_into(plan, windows, out, shown.update)
    wide = f", {len(plan.wide)} of them in int8" if plan.wide else ""
    print(
        f"{out}: {plan.num_modules} weights in int4{wide}, {plan.bits_per_weight:.3f} bits a weight"
        f"; calibrated with {len(windows)} windows of {len(windows[0])} tokens {whose} "
        f"({recipe.method})"
    )
    if experts.without_text:
        print(
            f"{experts.without_text} of {experts.total} experts saw fewer than {experts.least} "
            "tokens and were rounded to the nearest codes; a longer text, or more "
            "--calibration-tokens, reaches more of them"
        )
    print(f"serve it with: penstock serve {out}")
    return 0


def _windows(args: argparse.Namespace, folder: Path) -> tuple[list[list[int]], str]:
    """The token ids that the model is calibrated on, and whose they are, as the report says."""
    from penstock.workers.calibration.own_text import own_windows
    from penstock.workers.calibration.text import NUM_TOKENS, read_windows
    from penstock.workers.model_config import ModelConfig

    num_tokens = args.calibration_tokens or NUM_TOKENS
    if args.calibrate == OWN_TEXT:
        with _bar(args, "write a text", num_tokens, "tok") as shown:
            return own_windows(folder, num_tokens, shown.update), "that the model wrote"
    windows = read_windows(
        Path(args.calibrate).expanduser(),
        folder,
        num_tokens=num_tokens,
        context=ModelConfig.from_pretrained(folder).max_position_embeddings,
    )
    return windows, f"of {args.calibrate}"


def _bar(args: argparse.Namespace, what: str, total: int, unit: str = "w") -> tqdm[Any]:
    from tqdm import tqdm

    return tqdm(
        total=total,
        unit=unit,
        unit_scale=True,
        desc=what,
        file=sys.stderr,
        disable=args.no_progress,
    )


def _grids(args: argparse.Namespace) -> dict[str, Any]:
    """What was said of int4's grids."""
    if args.to != "int4":
        return {}
    from penstock.workers.weights.int4_layout import GROUP, STEP_GROUP

    grid = args.grid or "zero-points"
    return {"grid": grid, "group": args.group_size or (STEP_GROUP if grid == "steps" else GROUP)}


def _plain(args: argparse.Namespace, out: Path) -> int:
    from penstock.workers.weights.hub import resolve_model
    from penstock.workers.weights.quantize import plan_quantize, write_quantized

    plan = plan_quantize(
        resolve_model(args.model),
        args.to,
        quantize_o=args.quantize_o,
        quantize_lm_head=args.quantize_lm_head,
        **_grids(args),
        hadamard=bool(args.hadamard),
    )
    with _bar(args, f"to {args.to}", plan.num_source_bytes, "B") as shown:
        write_quantized(plan, out, shown.update)
    wide = f", {plan.num_int8} of them in int8" if plan.num_int8 else ""
    print(
        f"{out}: {plan.num_quantized} weights in {args.to}{wide}; "
        f"{plan.num_source_bytes / 2**20:.1f} MiB became {plan.num_bytes / 2**20:.1f} MiB"
    )
    if args.to == "int4":
        print("rounded to the nearest codes; --calibrate self, or FILE, loses far less quality")
    print(f"serve it with: penstock serve {out}")
    return 0
