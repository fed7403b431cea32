"""`penstock plan`: upper bounds for a model on a device, by the roofline. No GPU, no weights.

Flags and report only: workers/planning/roofline.py does the arithmetic.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock.deployments.bench import report
from penstock.deployments.cli import plan_report
from penstock.workers.config import DEFAULT_KV_GROUP
from penstock.workers.errors import ConfigError
from penstock.workers.model_config import ModelConfig
from penstock.workers.planning.hardware import (
    DEVICES,
    KV_FORMATS,
    WEIGHT_FORMATS,
    Device,
    device_named,
)
from penstock.workers.planning.parameters import count_parameters
from penstock.workers.planning.roofline import Roofline
from penstock.workers.planning.shapes import SHAPES, shape_named
from penstock.workers.weights.hub import BUILTIN, resolve_model

EXAMPLES = f"""\
examples:
  penstock plan Llama-3-8B                                 on every device of the table
  penstock plan Qwen2.5-7B --device L4,4090 --context 8192
  penstock plan ./my-checkpoint --device A100 --weights bf16,int4 --kv int8 --price-per-hour 1.8
  penstock plan Mixtral-8x7B --device H200 --json plan.json --plot plan.png

Reading the table. blocks: KV blocks that fit next to weights and activations. batch: sequences of
--context tokens that fit in them. step: one decode step of that batch. nt: the ridge, the tokens
that a step computes in the time of one. TTFT: ms, for a prompt that runs alone. cost/M: of a
million generated tokens. These are bounds, nothing can be faster: for an estimate give
--compute-share 0.5 --bandwidth-share 0.8, or the shares that you have measured.

models:  {", ".join(SHAPES)}
devices: {", ".join(DEVICES)}
"""
DEFAULT_CONTEXT = 2048
PROMPT_LENS = (128, 1024, 8192)


def add_plan(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `plan` to the commands of the command line."""
    plan = commands.add_parser(
        "plan",
        help="bound a model's batch, speed and cost on a device",
        description="Roofline bounds for each number format: KV blocks, largest batch, step time, "
        "tokens/s, ridge, TTFT, cost. Needs no GPU and no weights.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    plan.add_argument("model", metavar="MODEL", help="folder with config.json, or a name below")
    group = plan.add_argument_group("what to compare; comma-separated")
    group.add_argument(
        "--device", default=",".join(DEVICES), metavar="NAMES", help="(default: all of them)"
    )
    group.add_argument(
        "--weights",
        default="bf16,int8,fp8,int4,nf4",
        metavar="FORMATS",
        help="(default: %(default)s)",
    )
    group.add_argument(
        "--kv", default="bf16,int8", metavar="FORMATS", help="(default: %(default)s)"
    )
    group = plan.add_argument_group("the load")
    group.add_argument(
        "--context",
        type=_positive_int,
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
        type=_positive_int,
        metavar="N",
        help="batch size to plan for (default: the largest that fits)",
    )
    group = plan.add_argument_group("memory and machine")
    group.add_argument(
        "--block-size",
        type=_positive_int,
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
        "--quantize-o",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="apply --weights to the attention output projections too (default: yes)",
    )
    group.add_argument(
        "--quantize-lm-head",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="apply --weights to the LM head too (default: no)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=_positive_int,
        default=2048,
        metavar="N",
        help="maximum tokens of one step; sets the memory for activations (default: 2048)",
    )
    group.add_argument(
        "--reserve-gb",
        type=_finite,
        default=1.0,
        metavar="X",
        help="GB kept free for everything else (default: 1)",
    )
    group.add_argument(
        "--compute-share",
        type=_finite,
        default=1.0,
        metavar="X",
        help="share of the peak compute rate that is reached (default: 1)",
    )
    group.add_argument(
        "--bandwidth-share",
        type=_finite,
        default=1.0,
        metavar="X",
        help="share of the peak memory bandwidth that is reached (default: 1)",
    )
    group.add_argument(
        "--price-per-hour",
        type=_finite,
        metavar="X",
        help="price of one device, for the cost column",
    )
    group = plan.add_argument_group("output in addition to the table")
    group.add_argument("--json", metavar="FILE", help="write all figures")
    group.add_argument("--plot", metavar="FILE.png", help="write a picture; needs matplotlib")
    plan.set_defaults(run=run)


def run_plan(args: argparse.Namespace) -> int:
    """`penstock plan`; the exit status. Raises ConfigError."""
    report.check_plot(args.plot)
    model = _model(args.model)
    context = args.context or min(DEFAULT_CONTEXT, model.max_position_embeddings)
    if context > model.max_position_embeddings:
        raise ConfigError(
            f"--context {context} is longer than the model's {model.max_position_embeddings}"
        )
    lens = _prompt_lens(args.prompt_lens, model)
    devices = [device_named(name) for name in _names("--device", args.device)]
    rooflines = {device.name: _rooflines(args, model, device) for device in devices}
    rows = {
        name: [
            plan_report.row_of(each, context, lens, args.batch, args.price_per_hour)
            for each in found
        ]
        for name, found in rooflines.items()
    }
    total = count_parameters(model).total
    print(f"{args.model}: {total / 1e9:.3g} G parameters, {context} tokens a sequence")
    for device in devices:
        print("\n" + plan_report.table(device, rows[device.name], lens))
    shares = f"{args.compute_share:.0%} of peak compute, {args.bandwidth_share:.0%} of bandwidth"
    print(f"\nBounds by the roofline at {shares}, not measurements; see `penstock plan --help`.")
    if args.json is not None:
        found = [
            {**asdict(device), "rows": [asdict(row) for row in rows[device.name]]}
            for device in devices
        ]
        content = {"model": args.model, "parameters": total, "context": context, "devices": found}
        report.write_json(args.json, content)
    if args.plot is not None:
        plan_report.plot(args.plot, rooflines, context, model.max_position_embeddings, args.model)
    return 0


def _rooflines(args: argparse.Namespace, model: ModelConfig, device: Device) -> list[Roofline]:
    base = Roofline(
        model,
        device.at(args.compute_share, args.bandwidth_share),
        kv_group=_kv_group(args.kv_group, model.head_dim),
        quantised_output=args.quantize_o,
        quantised_head=args.quantize_lm_head,
        block_size=args.block_size,
        batched_tokens=args.max_num_batched_tokens,
        reserve_bytes=args.reserve_gb * 1e9,
    )
    weights = _names("--weights", args.weights, WEIGHT_FORMATS)
    kvs = _names("--kv", args.kv, KV_FORMATS)
    return [replace(base, weights=w, kv=kv) for w in weights for kv in kvs]


def _kv_group(text: str, head_dim: int) -> int:
    """As the engine reads its own setting; and any other number, of which the roofline judges."""
    if text == "head" or (text == "auto" and head_dim % DEFAULT_KV_GROUP):
        return head_dim
    try:
        return DEFAULT_KV_GROUP if text == "auto" else int(text)
    except ValueError:
        raise ConfigError(f"--kv-group takes a number, head or auto; got {text!r}") from None


def _model(name: str) -> ModelConfig:
    """The configuration of a folder, a built-in model, or a published shape. No download."""
    if name in BUILTIN or Path(name).expanduser().is_dir():
        return ModelConfig.from_pretrained(resolve_model(name))
    try:
        return shape_named(name)
    except ConfigError as error:
        raise ConfigError(f"{name!r} is not a folder with a config.json, and {error}") from None


def _names(flag: str, text: str, known: Sequence[str] | dict[str, Any] = ()) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{flag} needs at least one name")
    for name in names:
        if known and name not in known:
            raise ConfigError(f"{flag}: {name!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _prompt_lens(text: str | None, model: ModelConfig) -> list[int]:
    longest = model.max_position_embeddings
    if text is None:
        return [n for n in PROMPT_LENS if n <= longest] or [longest]
    try:
        numbers = [int(part) for part in _names("--prompt-lens", text)]
    except ValueError:
        raise ConfigError(
            f"--prompt-lens takes whole numbers with commas between; got {text!r}"
        ) from None
    if min(numbers) < 1 or max(numbers) > longest:
        raise ConfigError(f"--prompt-lens must lie in [1, {longest}], the model's; got {text}")
    return numbers


def _positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number
