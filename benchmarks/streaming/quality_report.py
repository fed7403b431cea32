"""The tables and the picture of benchmarks/streaming/quality.py, from its JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def report(found: dict[str, Any]) -> str:
    """The tables of what was measured, as text."""
    args = found["args"]
    lines = [
        f"Perplexity of {args['model']} on the first {args['tokens']:,} tokens of {args['book']}, "
        "one sequence, fp32",
    ]
    lines += _long(found["long"], args["stretch"])
    lines += _recompute(found["recompute"])
    lines += _short(found["short"])
    lines += _attention(found["attention"])
    return "\n".join(lines) + "\n"


def _long(rows: list[dict[str, Any]], stretch: int) -> list[str]:
    if not rows:
        return []
    longest = max(len(row["by_position"]) for row in rows)
    heads = "".join(f"{i * stretch / 1024:>7g}K" for i in range(longest))
    lines = [
        "",
        f"By position (stretches of {stretch:,} tokens); `trained` is up to 2,048",
        f"{'policy':<18}{'trained':>9}{'beyond':>9} |{heads}",
    ]
    for row in rows:
        cells = "".join(f"{value:8.1f}" for value in row["by_position"])
        beyond = row["perplexity_beyond"]
        beyond = f"{'':9}" if beyond is None else f"{beyond:9.2f}"
        lines.append(f"{row['name']:<18}{row['perplexity_trained']:9.2f}{beyond} |{cells}")
    return lines


def _recompute(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        lines += [
            "",
            f"Against the last {row['cache']:,} tokens run from scratch, "
            f"{'after the mark' if row['marked'] else 'text alone'}, at {row['samples']:,} "
            f"random positions (perplexity {row['perplexity']:.2f} there)",
            f"{'policy':<18}{'perplexity':>11}{'higher by':>12}{'std. error':>12}",
        ]
        for each in row["policies"]:
            higher = f"{each['percent']:10.2f} %{each['error_percent']:10.2f} %"
            lines.append(f"{each['name']:<18}{each['perplexity']:11.2f}{higher}")
    return lines


def _short(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [
        "",
        "Passages within the trained context: tokens after the first eviction, against the full "
        "context",
        f"{'policy':<18}{'cache':>6}{'begins with':>15}{'tokens':>9}{'perplexity':>12}"
        f"{'higher by':>12}{'std. error':>12}",
    ]
    for row in rows:
        begins = "<|endoftext|>" if row["marked"] else "text"
        lines.append(
            f"{row['name']:<18}{row['cache']:6}{begins:>15}{row['tokens']:9,}"
            f"{row['perplexity']:12.2f}{row['percent']:10.2f} %{row['error_percent']:10.2f} %"
        )
    return lines


def _attention(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    names = ("first", "first_4", "first_16", "older_than_256", "uniform")
    lines = [
        "",
        "Attention, full context: mean share of a query's weight (from position 256 on);",
        "`uniform` is what the first token would get if all had the same",
        f"{'begins with':<15}{'layer':>6}{'head':>6}" + "".join(f"{name:>16}" for name in names),
    ]
    for row in rows if len(rows) <= 64 else _means(rows, names):
        begins = "<|endoftext|>" if row["marked"] else "text"
        cells = "".join(f"{row[name]:16.5f}" for name in names)
        lines.append(f"{begins:<15}{row['layer']:6}{row['head']:>6}{cells}")
    return lines


def _means(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Over the heads of each layer."""
    means = []
    for marked, layer in dict.fromkeys((row["marked"], row["layer"]) for row in rows):
        heads = [row for row in rows if (row["marked"], row["layer"]) == (marked, layer)]
        mean = {name: sum(row[name] for row in heads) / len(heads) for name in names}
        means.append({"marked": marked, "layer": layer, "head": "mean"} | mean)
    return means


def plot(found: dict[str, Any], out: Path) -> None:
    """Perplexity over position, one panel a cache size, with recomputation as a level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stretch = found["args"]["stretch"]
    recomputed = {row["cache"]: row for row in found["recompute"] if row["marked"]}
    figure, axes = pyplot.subplots(1, len(recomputed), figsize=(6 * len(recomputed), 4))
    for axis, (cache, row) in zip(figure.axes, recomputed.items()):
        shown = [each for each in found["long"] if each["cache"] in (None, cache)]
        for each in shown:
            middles = [(i + 0.5) * stretch / 1024 for i in range(len(each["by_position"]))]
            axis.plot(middles, each["by_position"], marker=".", linewidth=1, label=each["name"])
        axis.axhline(
            row["perplexity"],
            linestyle=":",
            color="black",
            label=f"recomputed, {row['samples']:,} positions",
        )
        axis.set_yscale("log")
        axis.set_xlabel("position, thousands of tokens (1,024)")
        axis.set_ylabel(f"perplexity of {stretch:,} tokens")
        axis.set_title(f"a cache of {cache:,} tokens", fontsize=10, loc="left")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.suptitle(f"{found['args']['model']}, {found['args']['book']}, one sequence", fontsize=10)
    figure.tight_layout()
    figure.savefig(out, dpi=90)
