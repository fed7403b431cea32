"""Tables of kernels, number formats, KV memory, dropped tokens and experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tools.result_files import Result, fixed, markdown, signed, significant


def matmul(results: Sequence[Result]) -> str:
    """Per machine and format: the ratio to the fastest torch operator, least to greatest."""
    head = ("machine", "format", "lines", "ratio, least", "median", "greatest", "below 0.95")
    rows = []
    for result in results:
        lines = [line for run in result.runs for line in run["lines"]]
        for name in FORMATS:
            ratios = sorted(line["ratio"] for line in lines if line["format"] == name)
            if ratios:
                middle = ratios[len(ratios) // 2]
                below = sum(ratio < 0.95 for ratio in ratios)
                machine = result.path.removeprefix("matmul/")
                figures = (fixed(x, 2) for x in (ratios[0], middle, ratios[-1]))
                rows.append((machine, name, len(ratios), *figures, below))
    return markdown(head, rows)


def int4_by_rows(result: Result) -> str:
    """The time of each kind of int4 against int8's, by the number of rows."""
    shapes = result.figures["shapes"]
    rows = [
        (each["shape"], kind, fixed(found["bits_per_weight"], 2),
         *(fixed(ratio, 2) for ratio in found["ratio"].values()))
        for each in shapes
        for kind, found in each["kinds"].items()
        if kind != "int8"
    ]  # fmt: skip
    counts = shapes[0]["kinds"]["int8"]["ratio"]
    return markdown(("K x N", "weights", "bits", *(f"{n} rows" for n in counts)), rows)


FORMATS = ("fp32", "bf16", "int8", "int4", "nf4", "fp8")


def int4_quality(result: Result) -> str:
    """What `penstock eval`'s judge says of each format, with KV plain."""
    rows = [
        (row["weights"], fixed(row["bits_per_weight"], 2), _change(row, "auto"),
         fixed(row["kl"]["auto"], 4), f"{row['same_top1_percent']['auto']:.1f} %")
        for row in result.figures["rows"]
    ]  # fmt: skip
    name = result.figures["model"]
    return markdown((f"weights ({name})", "bits a weight", "perplexity", "KL", "same top-1"), rows)


def wide_layers(result: Result) -> str:
    """What is lost where some weights are int4, and others int8 or plain."""
    rows = [
        (row["case"], fixed(row["bits_per_weight"], 2), f"{row['change_percent']:+.2f} %")
        for row in result.figures["rows"]
    ]
    return markdown(("weights", "bits a weight", "perplexity"), rows)


def format_quality(result: Result) -> str:
    """Change of the perplexity against fp32, in percent, with its standard error."""
    heads = {"auto": "KV plain", "int8-32": "KV int8 (groups of 32)", "fp8": "KV fp8"}
    found = {name for row in result.figures["rows"] for name in row["change_percent"]}
    kv = [name for name in heads if name in found]
    rows = [
        (row["weights"], *(_change(row, name) for name in kv)) for row in result.figures["rows"]
    ]
    before = result.figures.get("before_training_for_rounding")
    for row in before["rows"] if before else ():
        text = f"{row['change_percent']:+.2f} ± {row['error_percent']:.2f} %"
        rows.append((f"{row['weights']}, before the training for rounding", text, "", ""))
    head = (f"weights ({result.figures['model']})", *(heads[name] for name in kv))
    return markdown(head, rows)


def _change(row: Mapping[str, Any], name: str) -> str:
    if name not in row["change_percent"]:
        return ""
    return f"{row['change_percent'][name]:+.2f} ± {row['error_percent'][name]:.2f} %"


def kv_formats(result: Result) -> str:
    head = ("KV", "bytes a block", "blocks", "mean running", "factor", "preemptions", "tokens/s")
    rows = [
        (
            row["format"],
            fixed(row["block_bytes"], 0),
            row["num_blocks"],
            row["mean_running"],
            f"{row['running_factor']:.2f}x",
            row["preemptions"],
            f"{fixed(row['tokens_per_s'], 0)} ({row['speed_factor']:.2f}x)",
        )
        for row in result.figures["rows"]
    ]
    return markdown(head, rows)


def kv_attention(result: Result) -> str:
    formats = list(result.figures["rows"][0]["ms"])
    rows = []
    for row in result.figures["rows"]:
        rows.append((row["work"], *(f"{row['ms'][name]:g}" for name in formats)))
    return markdown(("milliseconds", *formats), rows)


def kv_attention_change(after: Result, before: Result) -> str:
    """Milliseconds after a change, and before it in brackets."""
    formats = list(after.figures["rows"][0]["ms"])
    rows = []
    for new, old in zip(after.figures["rows"], before.figures["rows"], strict=True):
        cells = (f"{new['ms'][name]:.3g} ({old['ms'][name]:.3g})" for name in formats)
        rows.append((new["work"], *cells))
    return markdown(("milliseconds (before)", *formats), rows)


def pressure(result: Result) -> str:
    """Policies for a KV pool that is too small: CPU speed against eager commit."""
    head = (
        *(
            "load",
            "policy",
            "tokens per CPU second (range)",
            "preempted",
            "went on without a block",
        ),
        *("prompt tokens again", "token-passes", "tokens loaded"),
    )
    rows = []
    for pool in result.figures["pools"]:
        for row in pool["summary"]:
            low, high = row["speed_cpu_s_range"]
            rows.append(
                (
                    f"{pool['name']} ({pool['load']['num_blocks']} blocks)",
                    row["name"],
                    f"{row['speed_cpu_s']:.2f}x ({low:.2f} to {high:.2f})",
                    row["num_preemptions"],
                    row["num_preemptions_avoided"],
                    fixed(row["computed_again"], 0),
                    fixed(row["num_recomputed_tokens"], 0),
                    fixed(row["num_loaded_tokens"], 0),
                )
            )
    links = [
        (
            f"{row['link']}, {row['bytes_per_s'] / 1e6:.1f} MB/s",
            row["mode"],
            fixed(row["loaded"], 0),
            fixed(row["computed"], 0),
            fixed(1e3 * row["seconds"], 0, " ms"),
        )
        for row in result.figures["links"]
    ]
    restore = ("link", "`kv_restore`", "tokens loaded", "tokens computed", "first token, median")
    return "\n\n".join((markdown(head, rows), markdown(restore, links)))


def deferral_map(result: Result) -> str:
    """Deferred commit under pressure against eager commit, by device, link and model."""
    head = ("device", "model", "host memory", "nt", "tokens/s: least", "median", "most",
            "preempted: eager", "deferred", "in every step, tokens/s")  # fmt: skip
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for cell in result.figures["cells"]:
        key = (cell["device"], cell["model"], cell["link_gb_per_s"])
        groups.setdefault(key, []).append(cell)
    rows = []
    for (device, model, link), cells in groups.items():
        speeds = [each["pressure"]["speed"] for each in cells]
        always = [each["always"]["speed"] for each in cells if "always" in each]
        rows.append(
            (
                *(device, model, f"{link:g} GB/s" if link else "none"),
                fixed(cells[0]["ridge_tokens"], 0),
                *(fixed(each, 3, "x") for each in (min(speeds), median(speeds), max(speeds))),
                *(
                    sum(each[mode]["preemptions"] for each in cells)
                    for mode in ("eager", "pressure")
                ),
                f"{min(always):.2f}x to {max(always):.2f}x" if always else "",
            )
        )
    return markdown(head, rows)


def long_quality(result: Result, full: Result) -> str:
    """Perplexity by the engine over a long text, by stretches of it. `full`: of the full context,
    as far as the model's own."""
    runs = [*full.figures["rows"], *result.figures["rows"]]
    stretches = max((row["stretches"] for row in runs), key=len)
    head = ("policy (sinks + window)", "roll", "perplexity",
            *(f"{each['from']:,} to {each['to']:,}" for each in stretches))  # fmt: skip
    rows = []
    for row in runs:
        cells = [fixed(each["perplexity"], 1) for each in row["stretches"]]
        cells += [""] * (len(stretches) - len(cells))
        roll = row["roll"] if row["window"] else ""
        rows.append((row["policy"], roll, fixed(row["perplexity"], 1), *cells))
    return markdown(head, rows)


def streaming_quality(result: Result) -> str:
    """Perplexity by context policy, and against the same window computed from scratch."""
    change = {
        (row["cache"], policy["name"]): policy
        for row in result.figures["recompute"]
        if row.get("marked", True)
        for policy in row["policies"]
    }
    head = ("policy (sinks + window)", "KV tokens", "perplexity", "beyond training", "from scratch")
    rows = []
    for row in result.figures["long"]:
        found = change.get((row["cache"], row["name"]))
        rows.append(
            (
                row["name"],
                fixed(row["cache"], 0) or "all",
                fixed(row["perplexity_trained"]),
                fixed(row["perplexity_beyond"]),
                found and f"{found['percent']:+.1f} ± {found['error_percent']:.1f} %",
            )
        )
    return markdown(head, rows)


def endless(result: Result) -> str:
    figures = result.figures
    flat, near = figures["flatness"], figures["neighbours"]
    low, high = flat["blocks_alone"]
    pause = flat["pause_s"]
    quarters = ", ".join(fixed(ms, 2) for ms in flat["ms_by_quarter"])
    rows = [
        ("tokens; evicted", f"{figures['completion_tokens']:,}; {figures['evicted_tokens']:,}"),
        ("KV blocks of the answer alone", f"{low} to {high}"),
        ("worker's RSS, start and end", " and ".join(fixed(x, 1, " MiB") for x in flat["rss_mib"])),
        ("worker's RSS, fitted", signed(1024 * flat["rss_slope_mib"], 0, " KiB per 1,000 tokens")),
        ("time per token by quarter", f"{quarters} ms; last over first {flat['time_ratio']:.2f}"),
        ("worker's CPU per token, last quarter over first", fixed(flat["cpu_ratio"], 2)),
        (
            "between two tokens at the client",
            f"p99 {1e3 * pause['p99']:.0f} ms, longest {pause['longest']:.2f} s",
        ),
        (
            "neighbours finished; ids equal to those alone",
            f"{near['finished']} of {near['num']}; {near['same_ids']}",
        ),
        ("ids equal to a bare engine's", "yes" if figures["same_answer"] else "no"),
    ]
    return markdown((f"after the first roll, {flat['rolls']} rolls", "figure"), rows)


def second_turn(result: Result) -> str:
    head = (
        *("tokens of the second prompt", "computed", "first token"),
        *("computed without the cache", "first token", "ids"),
    )
    rows = [
        (
            f"{row['prompt']:,}",
            f"{row['cached_computed']:,}",
            fixed(1e3 * row["cached_first_s"], 0, " ms"),
            f"{row['plain_computed']:,}",
            fixed(1e3 * row["plain_first_s"], 0, " ms"),
            "equal" if row["equal"] else "differ",
        )
        for row in result.figures["rows"]
    ]
    return markdown(head, rows)


def expert_accuracy(result: Result) -> str:
    head = (
        *("layer", "predicted", "router on this layer's state", "experts of the token before"),
        *("control", "neurons"),
    )
    names = ("P1", "P0", "previous token", "control", "neurons")
    rows = [
        (row["layer"], *(None if row[n] is None else fixed(100 * row[n], 1, " %") for n in names))
        for row in result.figures["accuracy"]
    ]
    return markdown(head, rows)


def expert_memory(result: Result) -> str:
    rows = []
    for label, key in (("one copy in shared memory", "one_copy"), ("a copy each", "own_copies")):
        pss = [row["Pss"] for row in result.figures["memory"][key]]
        shared = sum(row["Pss_Shmem"] for row in result.figures["memory"][key])
        rows.append((label, *(fixed(x, 0) for x in (*pss, sum(pss), shared))))
    return markdown(("PSS, MiB", "process 1", "process 2", "sum", "of it shared memory"), rows)


def expert_quality(plain: Result, int4: Result) -> str:
    """Perplexity by share of kept neurons and score, above the exact model's."""
    sources = [(plain, ("gate", "up", "product", "by lot")), (int4, ("product",))]
    rows: dict[float, list[str]] = {}
    head = ["kept share"]
    for result, scores in sources:
        for score in scores:
            head.append({"by lot": "at random"}.get(score, score))
            head[-1] += " (int4 copies)" if result is int4 else ""
            for row in result.figures["rows"]:
                if row["mode"] == "sparse" and row["score"] == score:
                    rows.setdefault(row["keep"], []).append(_higher(row))
    return markdown(head, [(keep, *cells) for keep, cells in rows.items()])


def _higher(row: Mapping[str, Any]) -> str:
    percent = 100 * math.expm1(row["more_nll"])
    return f"{fixed(percent, 2)} ± {100 * row['more_nll_error']:.2f} %"


def expert_speed(*results: Result) -> str:
    """Milliseconds a token by cache size and mode, once for each link speed."""
    return "\n\n".join(map(_expert_speed, results))


def _expert_speed(result: Result) -> str:
    parts = []
    if result.figures.get("experts"):
        parts.append(f"A made-up model of {result.figures['experts']} experts a layer:")
    for link in result.figures["decode"]:
        columns = _columns(link, "mode")
        table: dict[str, dict[str, str]] = {}
        for row in link["rows"]:
            table.setdefault(_cache(row), {})[row["mode"]] = significant(row["token_ms"])
        rows = []
        for size, cells in table.items():
            alone = cells.get("no cache of experts") or cells.get("demand")
            if alone:
                rows.append((size, alone, *("" for _ in columns[1:])))
            else:
                rows.append((size, *(cells.get(name, "") for name in columns)))
        parts.append(markdown((_link(link), *map(_mode, columns)), rows))
    for row in result.figures.get("prompt", ()):
        rate = f"{row['bytes_per_s'] / 1e9:g} GB/s"
        parts.append(
            f"A prompt of 512 tokens with {row['slots']} slots at {rate}: "
            f"{row['on demand']:.0f} ms on demand, {row['streamed']:.0f} ms streamed."
        )
    return "\n\n".join(parts)


def expert_formats(result: Result) -> str:
    """Milliseconds a token by cache size and number format, of whole experts and of neurons."""
    parts = []
    for link in result.figures["formats"]:
        columns = _columns(link, "weights")
        table: dict[str, dict[str, str]] = {}
        for row in link["rows"]:
            if row["mode"] != "fair + always":
                kind = "neurons " if row["mode"].endswith("neurons") else ""
                cells = table.setdefault(_cache(row), {})
                cells[kind + row["weights"]] = significant(row["token_ms"])
        names = (*columns, *(f"neurons {name}" for name in columns))
        rows = [(size, *(cells.get(name, "") for name in names)) for size, cells in table.items()]
        parts.append(markdown((_link(link), *names), rows))
    return "\n\n".join(parts)


def _columns(link: Mapping[str, Any], label: str) -> list[str]:
    names = dict.fromkeys(row[label] for row in link["rows"])
    return [name for name in names if name not in ("no cache of experts", "demand")]


def _link(link: Mapping[str, Any]) -> str:
    return f"ms/token, link {link['bytes_per_s'] / 1e9:g} GB/s"


def _mode(name: str) -> str:
    return name.replace("always", "prefetch always").replace("twins", "int8 copies")


def _cache(row: Mapping[str, Any]) -> str:
    if row["mode"] == "no cache of experts":
        return "no expert cache"
    if row["mode"] == "demand":
        return "nothing kept"
    return f"{row['slots']} experts ({row['percent']} %)"


def expert_compact(result: Result) -> str:
    head = ("shape", "hidden x neurons", "dtype", "kept share", "whole", "rows", "int8", "int4")
    rows = [
        (
            row["name"],
            f"{row['hidden']} x {row['inner']}",
            row["dtype"],
            row["keep"],
            fixed(row["whole"], 0, " us"),
            *(
                f"{row[way]:.0f} us ({row[way] / row['whole']:.2f}x)"
                for way in ("rows", "int8", "int4")
            ),
        )
        for row in result.figures["rows"]
    ]
    return markdown(head, rows)
