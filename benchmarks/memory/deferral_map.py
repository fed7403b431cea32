"""Where deferred commit pays: a sweep over models, devices, batches, contexts and links.

Each cell runs the real scheduler on a made-up device (deferral_sim.py): `batch` sequences in a KV
pool for 85 % of them, so that blocks run out again and again. Compared are eager commit, which
preempts; deferred commit under pressure; and deferring in every step, as the idea was published.
Times are those of the roofline at half of the device's FLOP/s and 80 % of its bandwidth; nothing
here was measured on these devices. A preempted sequence is computed again, or loaded over the link
from host memory where that is faster.

    python -m benchmarks.memory.deferral_map --out OUT.json --plot OUT.png
    python -m benchmarks.memory.deferral_map --read OUT.json --plot OUT.png
    python -m benchmarks.memory.deferral_map --devices L4 --models Llama-3-8B --links 0 --seeds 1

Speed is tokens a second over eager's with the same requests; a gap is the time between two tokens
of one answer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common import record
from benchmarks.memory.deferral_sim import Case, Outcome, run
from penstock.workers.planning.hardware import device_named
from penstock.workers.planning.roofline import Roofline
from penstock.workers.planning.shapes import shape_named

SHARES = (0.5, 0.8)  # of the peaks of compute and bandwidth
MODES = ("eager", "pressure", "always")


def cell(args: argparse.Namespace, model: str, device: str, where: tuple[int, int, float]) -> Any:
    """All modes in one place of the map: medians over the seeds."""
    batch, context, link = where
    weights = "fp32" if device == "cpu" else "bf16"
    bound = Roofline(shape_named(model), device_named(device).at(*SHARES), weights=weights)
    case = Case(bound, batch, context, link * 1e9 or None)
    # To defer in every step is no setting for a server: shown once, without a link.
    modes = MODES if not link else MODES[:2]
    runs = {mode: [run(case, mode, seed, args.rounds) for seed in range(args.seeds)]
            for mode in modes}  # fmt: skip
    found: dict[str, Any] = {
        "model": model,
        "device": device,
        "batch": batch,
        "context": context,
        "link_gb_per_s": link,
        "ridge_tokens": bound.ridge_tokens,
    }
    for mode, outcomes in runs.items():
        pairs = list(zip(outcomes, runs["eager"], strict=True))
        found[mode] = {
            "speed": statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs),
            "longest_gap": statistics.median(_longest(a) / _longest(b) for a, b in pairs),
            "preemptions": sum(a.num_preemptions for a in outcomes),
            "avoided": sum(a.num_avoided for a in outcomes),
        }
    return found


def _longest(outcome: Outcome) -> float:
    """The gap that one token in a thousand exceeds."""
    return sorted(outcome.gaps_s)[int(0.999 * len(outcome.gaps_s))]


def plot(cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Speed under pressure by device and link (panels), model and batch x context (squares)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def kinds(name: str) -> list[Any]:
        return list(dict.fromkeys(each[name] for each in cells))

    devices, links, models = kinds("device"), kinds("link_gb_per_s"), kinds("model")
    places = [(batch, context) for batch in kinds("batch") for context in kinds("context")]
    figure, axes = pyplot.subplots(
        len(devices), len(links), figsize=(4 * len(links), 1.9 * len(devices)), squeeze=False,
        sharex=True, sharey=True, layout="constrained",
    )  # fmt: skip
    for device, row in zip(devices, axes, strict=True):
        for link, axis in zip(links, row, strict=True):
            speeds = {
                (each["model"], (each["batch"], each["context"])): each["pressure"]["speed"]
                for each in cells
                if (each["device"], each["link_gb_per_s"]) == (device, link)
            }
            grid = [[100 * (speeds[model, place] - 1) for place in places] for model in models]
            axis.imshow(grid, cmap="RdYlGn", vmin=-8, vmax=8, aspect="auto")
            for y, line in enumerate(grid):
                for x, percent in enumerate(line):
                    axis.text(x, y, f"{percent:+.1f}", ha="center", va="center", fontsize=7)
            axis.set_title(
                f"{device}, {f'{link:g} GB/s' if link else 'no host memory'}", fontsize=9
            )
            axis.set_xticks(range(len(places)), [f"{b} x {c}" for b, c in places], rotation=45,
                            fontsize=7)  # fmt: skip
            axis.set_yticks(range(len(models)), models, fontsize=7)
    figure.suptitle("tokens/s of deferred commit under pressure, % of eager commit (simulated)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["Llama-2-7B", "Llama-3-8B", "Qwen2.5-0.5B"])
    parser.add_argument("--devices", nargs="+", default=["H200", "A100", "L4", "cpu"])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 96])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--links", type=float, nargs="+", default=[0, 4, 25],
                        help="GB/s to host memory; 0: there is none")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=5, help="requests for each place of the batch"
    )
    parser.add_argument("--out", type=Path, help="write the result file")
    parser.add_argument("--plot", type=Path, help="write the picture of the map, as PNG or SVG")
    parser.add_argument("--read", type=Path, help="plot this result file; nothing is run")
    args = parser.parse_args()
    if args.read:
        plot(json.loads(args.read.read_text())["results"]["cells"], args.plot)
        return
    places = list(
        itertools.product(
            args.devices, args.models, itertools.product(args.batches, args.contexts, args.links)
        )
    )
    cells = []
    for device, model, where in tqdm(places, unit="cell"):
        cells.append(cell(args, model, device, where))
        found = cells[-1]
        tqdm.write(
            f"{device:6}{model:14}{where[0]:4} x {where[1]:5}, {where[2]:4g} GB/s: "
            + ", ".join(
                f"{mode} {found[mode]['speed']:.3f}x, preempted {found[mode]['preemptions']}, gap "
                f"{found[mode]['longest_gap']:.2f}"
                for mode in MODES
                if mode in found
            )
        )
    if args.out:
        record.write(args.out, __file__, {"cells": cells})
    if args.plot:
        plot(cells, args.plot)


if __name__ == "__main__":
    main()
