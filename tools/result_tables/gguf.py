"""Tables of GGUF files (token ids, perplexity, speed), and of weights calibrated on text."""

from __future__ import annotations

from tools.result_files import Result, fixed, markdown

_NAMES = {
    "decoded, fp32": "`--weights fp32`: decoded",
    "kept, fp32 activations": "codes kept, activations in fp32",
    "kept, bf16 activations": "`--weights auto`: codes kept, activations in bf16",
    "decoded, bf16": "`--weights bf16`: decoded",
    "llama.cpp": "llama.cpp",
}


def quality(result: Result) -> str:
    """Greedy ids against transformers, and perplexity against llama.cpp, for each way to load."""
    ids = {row["load"]: row for row in result.figures["ids"]}
    head = ("weights", "MiB", "prompts with transformers' ids", "ids", "largest margin elsewhere",
            "perplexity", "against llama.cpp")  # fmt: skip
    rows = []
    for row in result.figures["perplexity"]["rows"]:
        name, found = row["run"], ids.get(row["run"])
        same: tuple[object, ...] = ("", "", "")
        if found is not None:
            margin = found["largest_margin"]
            same = (
                f"{found['prompts_equal']} of {found['prompts']}",
                f"{found['tokens_equal']} of {found['tokens']}",
                fixed(margin, 2) if margin else "",
            )
        against = row.get("against_llama_cpp_percent", 0.0)
        change = "" if name == "llama.cpp" else f"{against:+.2f} %"
        mib = row.get("weights_mib", "")
        rows.append((_NAMES[name], mib, *same, fixed(row["perplexity"], 3), change))
    return markdown(head, rows)


def tokenizer(result: Result) -> str:
    """On which texts the ids are llama.cpp's."""
    texts = result.figures["tokenizer"]
    rows = [
        (who, f"{sum(row[key] for row in texts)} of {len(texts)}",
         ", ".join(row["text"] for row in texts if not row[key]))
        for who, key in (
            ("Penstock", "penstock_equal"), ("transformers, the same file", "transformers_equal"),
        )
    ]  # fmt: skip
    return markdown(("tokenizer", "texts with llama.cpp's ids", "not on"), rows)


def types(result: Result) -> str:
    """For each type of file, what keeping its codes changes, and what llama.cpp's rounding does."""
    head = ("file", "matrices", "MiB kept", "perplexity of the decoded weights in fp32",
            "codes kept, bf16 activations", "llama.cpp")  # fmt: skip
    rows = []
    for entry in result.figures["types"]:
        by_name = {row["run"]: row for row in entry["rows"]}
        kept = by_name["kept, bf16 activations"]
        matrices = ", ".join(f"{count} {kind}" for kind, count in entry["matrices"].items())
        changes = (
            f"{row['change_percent']:+.2f} ± {row['error_percent']:.2f} %"
            for row in (kept, by_name["llama.cpp"])
        )
        perplexity = fixed(by_name["decoded, fp32"]["perplexity"], 3)
        rows.append((entry["type"], matrices, kept["weights_mib"], perplexity, *changes))
    return markdown(head, rows)


def speed(result: Result) -> str:
    head = ("work", "codes kept, tokens/s", "bf16, tokens/s", "ratio (least to greatest)")
    rows = []
    for row in result.figures["rows"]:
        ends = f"{fixed(row['ratio_least'], 2)} to {fixed(row['ratio_greatest'], 2)}"
        ratio = f"{fixed(row['ratio'], 2)} ({ends})"
        rows.append((row["work"], row["kept_tokens_per_s"], row["bf16_tokens_per_s"], ratio))
    sizes = result.figures["weights_mib"]
    rows.append(("weights in memory, MiB", sizes["kept"], sizes["bf16"], ""))
    return markdown(head, rows)


def calibrated_quality(result: Result) -> str:
    """Change of the perplexity by recipe, and what it took."""
    head = (f"recipe ({result.figures['model']})", "bits a weight", "perplexity",
            "seconds of CPU", "int8 layers")  # fmt: skip
    rows = [
        (
            row["recipe"],
            f"{row['bits_per_weight']:.2f}",
            f"{row['change_percent']:+.2f} ± {row['error_percent']:.2f} %",
            fixed(row["cpu_seconds"], 0),
            f"{row['modules_int8']} of {row['modules']}",
        )
        for row in result.figures["rows"]
    ]
    return markdown(head, rows)
