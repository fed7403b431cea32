"""`penstock plan`: upper bounds for a model on a device, by the roofline. No GPU, no weights.

Checks the flags of flags/plan.py and reports; workers/planning/roofline.py does the arithmetic.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from penstock.deployments.bench import report
from penstock.deployments.cli.flags.plan import DEFAULT_CONTEXT, HERE, PROMPT_LENS, WEIGHTS
from penstock.deployments.cli.planning import plan_report
from penstock.workers.config import DEFAULT_KV_GROUP
from penstock.workers.errors import ConfigError
from penstock.workers.gguf.header import GgufHeader, find_gguf, read_header
from penstock.workers.model_config import ModelConfig
from penstock.workers.planning.group import LINKS, Group
from penstock.workers.planning.hardware import KV_FORMATS, Device, device_named
from penstock.workers.planning.kept import kept_cost, stored_cost
from penstock.workers.planning.parameters import count_parameters
from penstock.workers.planning.roofline import Roofline
from penstock.workers.planning.shapes import shape_named
from penstock.workers.quantization import QUANTIZED_FORMATS
from penstock.workers.weights.hub import is_hub_id, resolve_model

FORMATS = ("fp32", "bf16", *QUANTIZED_FORMATS)  # that `penstock serve` makes of weights


def run_plan(args: argparse.Namespace) -> int:
    """`penstock plan`; the exit status. Raises ConfigError."""
    report.check_plot(args.plot)
    model, header = _model(args.model)
    context = args.context or min(DEFAULT_CONTEXT, model.max_position_embeddings)
    if context > model.max_position_embeddings:
        raise ConfigError(
            f"--context {context} is longer than the model's {model.max_position_embeddings}"
        )
    lens = _prompt_lens(args.prompt_lens, model)
    devices = [_device(name, model) for name in _names("--device", args.device)]
    rooflines = {device.name: _rooflines(args, model, header, device) for device in devices}
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
    if any(device.name == HERE for device in devices):
        print(f"`{HERE}` is measured: an estimate for its CPU, not a bound.")
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


def _device(name: str, model: ModelConfig) -> Device:
    """Of the table, or this machine, measured. Raises ConfigError."""
    if name != HERE:
        return device_named(name, [HERE])
    from penstock.deployments.cli.planning.measure import measured_here  # loads torch

    print("measuring this machine's CPU (some seconds)", file=sys.stderr)
    return measured_here(model, len(os.sched_getaffinity(0)))


def _rooflines(
    args: argparse.Namespace, model: ModelConfig, header: GgufHeader | None, device: Device
) -> list[Roofline]:
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
    kvs = _names("--kv", args.kv, KV_FORMATS)
    draft = _draft(args, base)
    groups = _groups(args, model)
    rooflines = []
    for weights in _weights(args.weights, model):
        if weights == "auto" and header is not None:
            cost, keeps_head = kept_cost(header)
            each = replace(base, stored=cost, quantised_head=keeps_head, quantised_output=True)
        elif weights == "auto":
            each = replace(base, stored=stored_cost(model), quantised_output=True)
        else:
            each = base
        rooflines += [
            replace(
                each,
                weights=weights,
                kv=kv,
                group=group,
                draft=None if draft is None else replace(draft, kv=kv),
            )
            for kv in kvs
            for group in groups
        ]
    return rooflines


def _draft(args: argparse.Namespace, base: Roofline) -> Roofline | None:
    """The draft model, in its format, head included. Raises ConfigError."""
    if args.speculate != "draft":
        if args.draft_model is not None:
            raise ConfigError(f"--draft-model {args.draft_model} needs --speculate draft")
        return None
    model = base.model if args.draft_model is None else _model(args.draft_model)[0]
    group = _kv_group(args.kv_group, model.head_dim)
    return replace(
        base,
        model=model,
        weights=args.draft_weights,
        kv_group=group,
        quantised_head=True,
        wide_layers=False,
    )


def _groups(args: argparse.Namespace, model: ModelConfig) -> list[Group]:
    """Raises ConfigError."""
    ranks = _numbers("--tensor-parallel-size", args.tensor_parallel_size)
    stages = _numbers("--pipeline-parallel-size", args.pipeline_parallel_size)
    whole = args.enable_expert_parallel
    groups = [Group(r, LINKS[args.link], s, whole) for r in ranks for s in stages]
    for group in groups:
        group.check(model)
    return groups


def _numbers(flag: str, text: str) -> list[int]:
    names = _names(flag, text)
    if not all(name.isdecimal() for name in names):
        raise ConfigError(f"{flag} takes whole numbers with commas between; got {text}")
    return [int(name) for name in names]


def _weights(text: str | None, model: ModelConfig) -> list[str]:
    """The formats to compare. For a quantised checkpoint or a GGUF file, `auto` is that of the
    file, and so is a format that would leave the file's codes as they are."""
    scheme = model.stored_scheme
    if scheme is None:
        return _names("--weights", text or WEIGHTS, FORMATS)
    if scheme.method != "gguf":  # another quantised format would round twice, and is refused
        known = ("auto", "bf16", "fp32", *scheme.formats)
        names = _names("--weights", text or "auto,bf16", known)
        return list(dict.fromkeys("auto" if name in scheme.formats else name for name in names))
    names = _names("--weights", text or f"auto,{WEIGHTS}", ("auto", *FORMATS))
    kept = [name for name in names if not scheme.is_opened(name)]
    return list(dict.fromkeys("auto" if name in kept else name for name in names))


def _kv_group(text: str, head_dim: int) -> int:
    """As the engine reads its own setting; and any other number, of which the roofline judges."""
    if text == "head" or (text == "auto" and head_dim % DEFAULT_KV_GROUP):
        return head_dim
    try:
        return DEFAULT_KV_GROUP if text == "auto" else int(text)
    except ValueError:
        raise ConfigError(f"--kv-group takes a number, head or auto; got {text!r}") from None


def _model(name: str) -> tuple[ModelConfig, GgufHeader | None]:
    """The configuration of a folder, a GGUF file, a built-in model, or a published shape; and the
    header of such a file. No download."""
    if not is_hub_id(name):
        path = resolve_model(name)
        file = find_gguf(path)
        return ModelConfig.from_pretrained(path), None if file is None else read_header(file)
    try:
        return shape_named(name), None
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
