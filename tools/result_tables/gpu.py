"""Tables of what ran on a GPU: checks of the Triton kernels, their times, tiles, and decoding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tools.result_files import Result, fixed, markdown

TIMED = ("case", "us", "floor, us", "over the floor", "bound by")


def checks(result: Result) -> str:
    """A line for each kernel: its cases in all types, and the worst error over what is allowed."""
    kernels: dict[str, list[Mapping[str, Any]]] = {}
    for group in result.figures["kernels"]:
        kernels.setdefault(group["kernel"], []).append(group)
    rows = [
        (
            name,
            str(sum(each["cases"] for each in groups)),
            str(sum(each["wrong"] for each in groups)),
            *(_error(groups, dtype) for dtype in ("float32", "float16", "bfloat16")),
        )
        for name, groups in kernels.items()
    ]
    cases = sum(each["cases"] for each in result.figures["kernels"])
    wrong = sum(each["wrong"] for each in result.figures["kernels"])
    head = ("kernel", "cases", "wrong", "fp32", "fp16", "bf16")
    return markdown(head, [*rows, ("all", str(cases), str(wrong), None, None, None)])


def _error(groups: Iterable[Mapping[str, Any]], dtype: str) -> str | None:
    for each in groups:
        if each["dtype"] == dtype:
            return "0" if each["worst"] == 0 else f"{each['worst']:.0e} of {each['allowed']:.0e}"
    return None


def times(result: Result) -> str:
    """Calls of at least 20 us, which is what Python needs to launch one."""
    rows = [
        (row["kernel"], *_timed(row))
        for row in result.figures["timings"]
        if row["floor_us"] >= 20 and not row["kernel"].startswith(("linear", "experts"))
    ]
    return markdown(("kernel", *TIMED), rows)


def experts(result: Result) -> str:
    rows = [
        (row["kernel"].removeprefix("experts "), *_timed(row))
        for row in result.figures["timings"]
        if row["kernel"].startswith("experts") and row["floor_us"] >= 100
    ]
    return markdown(("format", *TIMED), rows)


def _timed(row: Mapping[str, Any]) -> tuple[str, ...]:
    over = f"{row['called_us'] / row['floor_us']:.1f}x"
    return row["case"], fixed(row["called_us"], 0), fixed(row["floor_us"], 0), over, row["bound"]


def tiles(result: Result) -> str:
    """For each weight and number of rows: the fastest tiles' time in each format."""
    bandwidth = result.figures["gb_per_s"]
    times: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in result.figures["timings"]:
        cells = times.setdefault((row["outputs"], row["inputs"], row["rows"]), {})
        cells[row["format"]] = min(row["us"], cells.get(row["format"], float("inf")))
    names = ("plain", "fp8", "int8", "int4", "int4_steps")
    rows = [
        (
            f"{inputs} x {outputs}",
            str(num_rows),
            fixed(2 * outputs * inputs / bandwidth / 1e3, 0),
            *(fixed(cells[name], 0) if name in cells else None for name in names),
        )
        for (outputs, inputs, num_rows), cells in times.items()
    ]
    head = ("weight", "rows", "16 bit floor", "16 bit", "fp8", "int8", "int4 of files", "int4")
    return markdown(head, rows)


def decode(result: Result) -> str:
    """transformers, and the ways in which the engine runs its steps."""
    engines = result.figures["engines"]
    base = engines[0]["decode_tokens_per_s"]
    rows = [
        (
            each["name"].replace(", kv auto", ""),
            fixed(1e3 * each["first_s"], 0),
            fixed(each["batch_ms"], 2),
            fixed(each["decode_tokens_per_s"], 0),
            f"{each['decode_tokens_per_s'] / base:.1f}x",
        )
        for each in engines
    ]
    size = result.figures
    head = f"batch {size['batch']}, {size['prompt']} + {size['new']} tokens"
    return markdown((head, "first tokens, ms", "ms a step", "decode tokens/s", "ratio"), rows)
