"""Tables of the engine and the cluster around it."""

from __future__ import annotations

import statistics

from tools.result_files import Result, fixed, markdown, medians, significant


def offline(result: Result) -> str:
    """Systems against transformers' `generate`: medians over the runs of one file."""
    systems = {name: medians(runs) for name, runs in result.figures["runs"].items()}
    base = systems["transformers"]["tokens_per_s"]
    num_runs = len(result.figures["runs"]["transformers"])
    is_alone = result.figures["args"]["workload"] == "W1"
    rows = [
        (
            _system(name),
            fixed(row["first_token_ms"], 0, " ms") if is_alone else None,
            fixed(row["ms_per_token"], 1) if is_alone else None,
            fixed(row["tokens_per_s"], 1),
            f"{row['tokens_per_s'] / base:.2f}x",
        )
        for name, row in systems.items()
    ]
    head = f"{result.figures['args']['workload']}, {'median of ' * (num_runs > 1)}{num_runs} run"
    head += "s" * (num_runs > 1)
    if not is_alone:
        return markdown((head, "generated tokens/s", "ratio"), [(r[0], *r[3:]) for r in rows])
    return markdown((head, "first token", "ms/token", "generated tokens/s", "ratio"), rows)


def _system(name: str) -> str:
    names = {"transformers": "transformers `generate`", "penstock": "Penstock, bf16"}
    weights = name.removeprefix("penstock, ").removesuffix(" weights")
    return names.get(name) or (f"Penstock, {weights}" if name.startswith("penstock") else name)


def peers(result: Result) -> str:
    """Each system's formats: size, loss and speed on one model."""
    head = (
        *("system", "weights", "bits a weight", "MiB", "perplexity"),
        *("W1 first token", "W1 ms/token", "W2 tokens/s"),
    )
    rows = []
    for row in result.figures["rows"]:
        change = f"{row['perplexity']:.2f}"
        if "change_percent" in row:
            change = f"{row['change_percent']:+.2f} ± {row['error_percent']:.2f} %"
        rows.append(
            (
                *(row["system"], row["format"], f"{row['bits_per_weight']:.2f}"),
                *(fixed(row["weights_mib"], 0), change),
                fixed(row.get("w1_first_token_ms"), 0, " ms"),
                fixed(row.get("w1_ms_per_token"), 2),
                fixed(row.get("w2_tokens_per_s"), 0),
            )
        )
    return markdown(head, rows)


def peers_speed(result: Result) -> str:
    head = ("system", "W1 first token, ms", "W1 ms/token", "W2 tokens/s")
    rows = [
        (
            row["system"],
            fixed(row["w1_first_token_ms"], 0),
            fixed(row["w1_ms_per_token"]),
            None if row["w2_tokens_per_s"] is None else significant(row["w2_tokens_per_s"]),
        )
        for row in result.figures["rows"]
    ]
    served = result.figures["served"]
    default, again = served["server_tokens_per_s"]
    engine = served["engine_tokens_per_s"]
    return "\n".join(
        (
            markdown(head, rows),
            "",
            f"W2 of Penstock int8 an hour later: {result.figures['w2_penstock_int8_an_hour_later']}"
            f" tokens/s. Through `penstock serve` (int8, {served['threads']} threads, "
            f"{served['requests']} requests): {default} and {again} tokens/s, "
            f"{100 * default / engine:.0f} % of the bare engine's {engine}; with `--threads 1` "
            f"{served['one_thread_tokens_per_s']}.",
        )
    )


def overhead(result: Result) -> str:
    """The paths of each run against the bare engine."""
    head = (
        *("run", "path", "TTFT p50", "added (quartiles)", "tokens/s", "of bare"),
        *("ingress CPU per token", "above rest", "engine CPU per token"),
    )
    rows = []
    for number, run in enumerate(result.runs, 1):
        for path, row in run["summary"].items():
            low, middle, high = row.get("added_ttft_ms", (None, None, None))
            ratio = row.get("throughput_ratio")
            rows.append(
                (
                    number,
                    path,
                    fixed(row["ttft_ms"], 1, " ms"),
                    middle and f"{middle:+.1f} ms ({low:+.1f}, {high:+.1f})",
                    fixed(row["tokens_per_s"], 0),
                    ratio and f"{100 * ratio:.0f} %",
                    fixed(row.get("ingress_cpu_ms"), 3, " ms") if middle else None,
                    fixed(row.get("ingress_cpu_above_rest_ms"), 3, " ms") if middle else None,
                    fixed(row["engine_cpu_ms"], 3, " ms"),
                )
            )
    return markdown(head, rows)


def slow_readers(result: Result) -> str:
    figures = result.figures
    rounds, made = figures["company"]["rounds"], figures["company"]["tokens_of_each"]
    rows = []
    for name in rounds[0]:
        label = f"{name[:-1]}, each of {made[name]} tokens)" if name in made else name
        cells = [COMPANY.get(name, label.replace("nobody", "no other client"))]
        for key in ("p50", "p99"):
            without, with_them = (
                [each[name][which][key] for each in rounds] for which in ("good", "bad")
            )
            low, middle, high = _quartiles([b / a for a, b in zip(without, with_them)])
            cells += [
                fixed(statistics.median(without), 1, " ms"),
                fixed(statistics.median(with_them), 1, " ms"),
                f"{middle:.2f} ({low:.2f}, {high:.2f})",
            ]
        rows.append(cells)
    quality = "ratio (quartiles)"
    head = ("other clients", "ITL p50 without", "with", quality, "p99 without", "with", quality)
    releases = [
        (way, fixed(1e3 * statistics.median(s), 0, " ms"), fixed(1e3 * max(s), 0, " ms"))
        for way, s in figures["release_s"].items()
    ]
    expired = figures["expired"]
    return "\n".join(
        (
            markdown(head, rows),
            "",
            markdown(("a client leaves by", "blocks free within, p50", "most of 10"), releases),
            "",
            f"Of {expired['sent']} calls that expired in the queue, "
            f"{expired['prompt_tokens'] - expired['of_the_holders']} prompt tokens were computed, "
            f"and {expired['live_blocks_left']} blocks stayed in use.",
        )
    )


COMPANY = {
    "nobody (against nobody: what the host does)": "none (none: what the host does)",
    "clients that do not read (against the same, reading)": (
        "8 clients that do not read (the same clients, reading)"
    ),
}


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ingress_cpu(result: Result) -> str:
    head = ("engine step", "path", "ingress CPU per token", "messages per token", "worker channel")
    rows = [
        (
            f"{row['step_ms']} ms",
            row["path"],
            fixed(row["ingress_cpu_ms_per_token"], 3, " ms"),
            fixed(row["messages_per_token"], 2),
            fixed(row["channel_cpu_ms_per_token"], 3, " ms"),
        )
        for row in result.figures["rows"]
    ]
    return markdown(head, rows)


def channel_cpu(result: Result) -> str:
    ends = {"engine": "engine's thread", "ingress": "ingress"}
    head = ["tokens in a step"]
    for name in ends.values():
        head += [f"{name}, in the clear", "under TLS", "added (range)"]
    rows = []
    for row in result.figures["rows"]:
        cells = [f"{row['tokens']}"]
        for end in ends:
            low, high = row[f"{end}_added_range_us"]
            cells += [
                fixed(row[f"{end}_clear_us"], 1, " us"),
                fixed(row[f"{end}_tls_us"], 1, " us"),
                f"{row[f'{end}_added_us']:+.1f} us ({low:+.1f} to {high:+.1f})",
            ]
        rows.append(cells)
    return markdown(head, rows)


def ablation(result: Result) -> str:
    head = (
        *("without", "tokens/s", "gain of the part (95 % interval)", "gap p99", "running at once"),
        *("steps", "as published"),
    )
    rows = []
    for row in result.figures["rows"]:
        cell = ""
        if row["gain"] is not None:
            low, high = (f"{100 * bound:+.0f}" for bound in row["interval"])
            cell = f"{100 * row['gain']:+.0f} % ({low} to {high})"
        rows.append(
            (
                row["without"],
                fixed(row["tokens_per_s"]),
                cell,
                fixed(row["gap_p99_ms"], 0, " ms"),
                fixed(row["at_once"], 0),
                fixed(row["steps"], 0),
                row["published"],
            )
        )
    return markdown(head, rows)


def served_ablation(result: Result) -> str:
    """Each part left out of one server, beside another one that has all."""
    head = (
        *("without", "tokens/s", "with all", "gain of the part (95 % interval)"),
        *("gap p99", "with all", "TTFT p50", "with all", "as published"),
    )
    rows = []
    for row in result.figures["rows"]:
        low, high = (f"{100 * bound:+.0f}" for bound in row["interval"])
        gain = f"{100 * row['gain']:+.0f} % ({low} to {high})"
        rates = [fixed(row[f"{of}tokens_per_s"]) for of in ("", "with_all_")]
        times = [
            fixed(row[of + name], 0, " ms")
            for name in ("gap_p99_ms", "ttft_p50_ms")
            for of in ("", "with_all_")
        ]
        rows.append((row["without"], *rates, gain, *times, row["published"]))
    return markdown(head, rows)


def planner(result: Result) -> str:
    """Predicted and measured decoding."""
    head = ("model", "weights", "batch", "predicted tokens/s", "measured tokens/s", "ratio")
    names = {"smollm2": "SmolLM2-135M", "B": "model B"}
    rows = [
        (
            names[row["model"]],
            row["weights"],
            row["batch"],
            fixed(row["predicted_tokens_per_s"]),
            fixed(row["measured_tokens_per_s"]),
            f"{row['predicted_tokens_per_s'] / row['measured_tokens_per_s']:.2f}x",
        )
        for row in result.figures["rows"]
    ]
    return markdown(head, rows)


def state_stores(result: Result) -> str:
    head = (
        *("store", "records a call", "callers", "appends/s", "client's CPU an append"),
        *("server's", "a call, p50", "p99"),
    )
    rows = [
        (
            row["store"],
            fixed(row["batch"], 0),
            fixed(row["callers"], 0),
            significant(row["appends_per_s"]),
            fixed(row["cpu_us"], 0, " us"),
            fixed(row["server_cpu_us"], 0, " us") if row["store"].startswith("Redis") else None,
            fixed(row["p50_ms"], 2, " ms"),
            fixed(row["p99_ms"], 1, " ms"),
        )
        for row in result.figures["rows"]
    ]
    return markdown(head, rows)
