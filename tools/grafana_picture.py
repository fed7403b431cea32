"""Draws the panels of docs/grafana/penstock.json from a live Prometheus, for the documentation.

    python -m tools.grafana_picture --minutes 2 --out board.png

Every curve is the answer of Prometheus to the expression in the board; only the drawing is not
Grafana's. Needs matplotlib (the extra `bench`). An expression that Prometheus refuses ends it.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot

BOARD = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "penstock.json"
STEP_S = 1
COLUMNS = 3
UNITS = {"s": (1000.0, "ms"), "percentunit": (100.0, "%"), "reqps": (1.0, "/s")}
Curve = tuple[str, list[float], list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--interval", default="10s", help="for $__rate_interval")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    panels = [each for each in json.loads(BOARD.read_text())["panels"] if each["type"] != "row"]
    end_s = time.time()
    with httpx.Client(base_url=args.prometheus, timeout=30) as http:
        curves = [
            _curves(http, panel, end_s - 60 * args.minutes, end_s, args.interval)
            for panel in panels
        ]
    _draw(panels, curves, args.title, args.out)
    for panel, found in zip(panels, curves):
        print(f"{len(found):3} curves  {panel['title']}")
    return 0


def _curves(
    http: httpx.Client, panel: dict[str, Any], start_s: float, end_s: float, interval: str
) -> list[Curve]:
    found: list[Curve] = []
    for target in panel["targets"]:
        expr = target["expr"].replace("$__rate_interval", interval).replace("$model", ".*")
        span = {"start": start_s, "end": end_s, "step": STEP_S}
        answer = http.get("/api/v1/query_range", params={"query": expr, **span}).json()
        if answer["status"] != "success":
            raise SystemExit(f"{panel['title']}: {expr}: {answer['error']}")
        for series in answer["data"]["result"]:
            name = target["legendFormat"]
            for label, value in series["metric"].items():
                name = name.replace("{{" + label + "}}", value)
            seconds = [float(at) - start_s for at, _ in series["values"]]
            found.append((name, seconds, [float(value) for _, value in series["values"]]))
    return found


def _draw(panels: list[dict[str, Any]], curves: list[list[Curve]], title: str, out: str) -> None:
    rows = -(-len(panels) // COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(5 * COLUMNS, 2.2 * rows))
    for spare in axes.flat[len(panels) :]:
        spare.set_axis_off()
    for panel, found, axis in zip(panels, curves, axes.flat):
        defaults = panel["fieldConfig"]["defaults"]
        factor, unit = UNITS.get(defaults["unit"], (1.0, ""))
        scaled = [(name, x, [factor * value for value in y]) for name, x, y in found]
        stacks = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
        if stacks and scaled:
            _stack(axis, scaled)
        else:
            for name, x, y in scaled:
                axis.plot(x, y, label=name, linewidth=1)
        axis.set_title(panel["title"] + (f" ({unit})" if unit else ""), fontsize=9, loc="left")
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        if scaled:
            axis.legend(fontsize=6, loc="upper left", ncols=2, framealpha=0.6)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=76)
    Image.open(drawn).convert("RGB").quantize(48, dither=Image.Dither.NONE).save(out, optimize=True)


def _stack(axis: Any, curves: list[Curve]) -> None:
    """One upon the other; where a curve has no value there is none of it."""
    seconds = sorted({at for _, x, _ in curves for at in x})
    filled = []
    for _, x, y in curves:
        known = dict(zip(x, y))
        filled.append([known.get(at, 0.0) for at in seconds])
    # What divides by nothing is not a number, and would leave all above it undrawn.
    clean = [[0.0 if value != value else value for value in each] for each in filled]
    axis.stackplot(seconds, *clean, labels=[name for name, _, _ in curves], alpha=0.8)


if __name__ == "__main__":
    raise SystemExit(main())
