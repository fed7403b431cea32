"""The length predictor against what needs no text, strictly online: predict, then see, one by one.

Every predictor starts from nothing and meets the requests in the same order; nothing is fitted
beforehand. Three worlds: `text` (the 1,024 prompts with text that PPL's benchmark uses), `cut` (the
same, each with max_tokens 256, 512 or 1024 by a fixed seed, so that many lengths are only known to
be longer), and `tenants` (the same prompts mixed with as many requests of Azure's chat trace as a
second tenant without text). Quantiles are of the natural length, which the file knows and a
predictor in the `cut` world often does not. CPU times are of this thread.

    python -m benchmarks.prediction.online
    python -m benchmarks.prediction.online --data FOLDER --orders 5 --json out.json --plot out.png

The data are not part of the project: docs/design/prediction.md says which files are meant.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common import record
from benchmarks.prediction.contenders import CONTENDERS, Contender
from penstock.deployments.prediction.conformal import LEVELS
from penstock.deployments.prediction.distribution import LengthDistribution
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.predictor import Ended, LengthPredictor
from penstock.deployments.prediction.snapshot import snapshot
from penstock.deployments.prediction.text_digest import digest_text

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
TEXTS, LENGTHS = "ppl_samples_1024.json", "ppl_samples_1024_lengths.json"
AZURE = "AzureLLMInferenceTrace_conv_2023.csv"
LIMITS = (256, 512, 1024)
SETTLED = 512  # figures are also given from here on
CONDITIONS = (64, 256)


@dataclass(frozen=True)
class Answered:
    """One request and how long its answer was by nature."""

    features: Features
    natural: int

    @property
    def served(self) -> int:
        limit = self.features.max_tokens
        return self.natural if limit is None else min(self.natural, limit)

    @property
    def ended(self) -> Ended:
        return Ended.STOP if self.served == self.natural else Ended.LENGTH


def read_texts(folder: Path) -> list[Answered]:
    texts = json.loads((folder / TEXTS).read_text())
    lengths = {row["id"]: row for row in json.loads((folder / LENGTHS).read_text())}
    return [
        Answered(
            Features(
                "model",
                tenant="chat",
                prompt_tokens=lengths[row["id"]]["prompt_tokens"],
                text=digest_text(row["conversations"][0]["value"]),
            ),
            lengths[row["id"]]["gen_tokens"],
        )
        for row in texts
    ]


def read_azure(folder: Path, num: int) -> list[Answered]:
    with (folder / AZURE).open(newline="") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(num))]
    return [
        Answered(
            Features("model", tenant="azure", prompt_tokens=int(row["ContextTokens"])),
            int(row["GeneratedTokens"]),
        )
        for row in rows
    ]


def worlds(folder: Path) -> dict[str, list[Answered]]:
    texts = read_texts(folder)
    limits = np.random.default_rng(0).choice(LIMITS, len(texts)).tolist()
    cut = [
        replace(each, features=replace(each.features, max_tokens=limit))
        for each, limit in zip(texts, limits)
    ]
    pairs = zip(texts, read_azure(folder, len(texts)))
    return {"text": texts, "cut": cut, "tenants": [each for pair in pairs for each in pair]}


def run_online(contender: Contender, requests: Sequence[Answered], tick: Callable[[], Any]) -> Any:
    """[requests, columns]: natural length, its quantiles, mean, ln P, conditional 0.9 quantiles."""
    rows, spent = [], defaultdict(list)
    for each in requests:
        start = time.thread_time()
        distribution = contender.predict(each.features)
        spent["predict_us"].append((time.thread_time() - start) * 1e6)
        natural = LengthDistribution(distribution.cumulative)
        density = natural.survival(each.natural - 1) - natural.survival(each.natural)
        rows.append(
            [each.natural, *map(natural.quantile, LEVELS), natural.mean]
            + [math.log(max(density, 1e-12))]
            + [natural.given(t).quantile(0.9) for t in CONDITIONS]
        )
        start = time.thread_time()
        contender.observe(each.features, each.served, each.ended)
        spent["observe_us"].append((time.thread_time() - start) * 1e6)
        tick()
    return np.array(rows), {name: float(np.median(values)) for name, values in spent.items()}


def figures(rows: Any) -> dict[str, float]:
    """What is shown of one run or of a part of it."""
    length, median, p90, p99, mean = rows[:, :5].T
    found = {
        "mae": float(np.abs(median - length).mean()),
        "tau": kendall_tau(mean, length),
        "nll": float(-rows[:, 5].mean()),
        "pinball_90": float(np.maximum(0.9 * (length - p90), 0.1 * (p90 - length)).mean()),
        "coverage_50": float((length <= median).mean()),
        "coverage_90": float((length <= p90).mean()),
        "coverage_99": float((length <= p99).mean()),
    }
    for i, t in enumerate(CONDITIONS):
        longer = length > t
        found[f"coverage_90_after_{t}"] = float((length <= rows[:, 6 + i])[longer].mean())
    return found


def kendall_tau(one: Any, other: Any) -> float:
    """Kendall's tau-b, by all pairs; 0 where one of them is constant."""
    first = np.sign(one[:, None] - one[None, :])
    second = np.sign(other[:, None] - other[None, :])
    scale = math.sqrt(float((first**2).sum()) * float((second**2).sum()))
    return float((first * second).sum()) / scale if scale else 0.0


def orders_of(num: int, count: int) -> list[Any]:
    """The file's own order first, then shuffles of fixed seeds."""
    return [np.arange(num)] + [np.random.default_rng(s).permutation(num) for s in range(1, count)]


def evaluate(requests: Sequence[Answered], count: int, bar: Any) -> tuple[dict, dict]:
    """Figures by contender (means and ranges over orders), and the file order's rows."""
    found: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    for name, make in CONTENDERS.items():
        parts: dict[str, list[dict[str, float]]] = {"all": [], "settled": []}
        costs = []
        for i, order in enumerate(orders_of(len(requests), count)):
            bar.set_postfix_str(name)
            contender = make()
            rows, cost = run_online(contender, [requests[j] for j in order], bar.update)
            parts["all"].append(figures(rows))
            parts["settled"].append(figures(rows[SETTLED:]))
            costs.append(cost)
            if i == 0:
                curves[name] = rows
        found[name] = {
            part: {
                key: {
                    "mean": float(np.mean([run[key] for run in runs])),
                    "min": min(run[key] for run in runs),
                    "max": max(run[key] for run in runs),
                }
                for key in runs[0]
            }
            for part, runs in parts.items()
        }
        found[name]["cost"] = {key: float(np.median([c[key] for c in costs])) for key in costs[0]}
        if isinstance(contender, LengthPredictor):
            found[name]["snapshot_bytes"] = len(snapshot(contender))
            last = contender.explain(requests[int(order[-1])].features)
            found[name]["text_weight"] = last.text_weight
            found[name]["size_weight"] = last.size_weight
    return found, curves


def table(world: str, num: int, found: dict[str, Any]) -> str:
    lines = [
        f"\n{world}: {num} requests; in brackets from request {SETTLED} on",
        "| predictor | MAE, tokens | Kendall tau | NLL, nats | 0.9 quantile covers "
        "| after 64 / 256 | CPU us: predict, observe |",
        "|" + " --- |" * 7,
    ]
    for name, each in found.items():
        a, b, cost = each["all"], each["settled"], each["cost"]
        lines.append(
            f"| {name} | {a['mae']['mean']:.1f} ({b['mae']['mean']:.1f}) "
            f"| {a['tau']['mean']:.3f} ({b['tau']['mean']:.3f}) "
            f"| {a['nll']['mean']:.3f} ({b['nll']['mean']:.3f}) "
            f"| {a['coverage_90']['mean']:.3f} ({a['coverage_90']['min']:.3f}"
            f"-{a['coverage_90']['max']:.3f}) "
            f"| {a['coverage_90_after_64']['mean']:.3f} / {a['coverage_90_after_256']['mean']:.3f} "
            f"| {cost['predict_us']:.0f}, {cost['observe_us']:.0f} |"
        )
    return "\n".join(lines)


def digest_cost_us(folder: Path) -> float:
    """Median CPU time of reading one prompt, at the ingress."""
    spent = []
    for row in json.loads((folder / TEXTS).read_text()):
        start = time.thread_time()
        digest_text(row["conversations"][0]["value"])
        spent.append((time.thread_time() - start) * 1e6)
    return float(np.median(spent))


def draw(path: Path, curves: dict[str, Any]) -> None:
    """Error and coverage of the `text` world in the file's order, as requests come in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for name, rows in curves.items():
        seen = np.arange(1, len(rows) + 1)
        style = {"lw": 2.2, "color": "black"} if name == "predictor" else {"lw": 1.0}
        error = np.cumsum(np.abs(rows[:, 1] - rows[:, 0])) / seen
        left.plot(seen[50:], error[50:], label=name, **style)
        right.plot(seen[50:], (np.cumsum(rows[:, 0] <= rows[:, 2]) / seen)[50:], **style)
    left.set(xlabel="requests seen", ylabel="mean absolute error so far, tokens")
    left.legend(fontsize=8)
    right.axhspan(0.88, 0.92, color="0.9")
    right.set(xlabel="requests seen", ylabel="covered by the 0.9 quantile so far", ylim=(0.8, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the trace files")
    parser.add_argument("--orders", type=int, default=3, help="the file's order and shuffles")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--plot", type=Path, help="also draw the course of the `text` world")
    args = parser.parse_args()
    if args.orders < 1:
        parser.error("--orders must be at least 1")
    for name in (TEXTS, LENGTHS, AZURE):
        if not (args.data / name).exists():
            sys.exit(f"{args.data / name} is missing: name its folder with --data")
    each = worlds(args.data)
    total = sum(map(len, each.values())) * args.orders * len(CONTENDERS)
    by_world: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    with tqdm(total=total, unit="request") as bar:
        for name, requests in each.items():
            by_world[name], drawn = evaluate(requests, args.orders, bar)
            curves = curves or drawn
    cost_us = digest_cost_us(args.data)
    for name, requests in each.items():
        print(table(name, len(requests), by_world[name]))
    print(f"\nreading one prompt's text at the ingress: {cost_us:.0f} us of CPU (median)")
    print(f"{platform.machine()}, numpy {np.__version__}, {args.orders} orders")
    if args.json:
        head = {"orders": args.orders, "settled": SETTLED, "digest_us": cost_us}
        record.write(args.json, __file__, head | {"worlds": by_world})
    if args.plot:
        draw(args.plot, curves)


if __name__ == "__main__":
    main()
