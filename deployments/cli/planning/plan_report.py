"""The report of `penstock plan`: rows, a table, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.workers.planning.hardware import Device
from penstock.workers.planning.roofline import Roofline

CURVE_POINTS = 60
MOST_DRAFTED = 32  # sequences that a draft model drafts for in a step


@dataclass(frozen=True, slots=True)
class Row:
    """One choice of number formats on one device. None: the model does not fit."""

    weights: str
    kv: str
    ranks: int
    stages: int
    weight_gb: float
    kv_bytes_per_token: float
    num_blocks: int
    batch: int
    step_ms: float | None
    memory_ms: float | None  # of it, what is read: weights, K and V
    compute_ms: float | None  # and what is computed; the two overlap in part
    exchange_ms: float | None  # and what the devices of a group send one another
    tokens_per_s: float | None
    ridge_tokens: float
    link_threshold_gb_per_s: float
    ttft_ms: dict[int, float] | None  # by prompt length
    cost_per_million: float | None
    draft_gb: float | None = None  # weights of the draft model; None: there is none
    draft_ms: float | None = None  # its step of one token a sequence


def row_of(
    roofline: Roofline,
    context: int,
    prompt_lens: Sequence[int],
    batch: int | None = None,
    price_per_hour: float | None = None,
) -> Row:
    """The figures of one choice, at the largest batch, or at `batch` if that fits."""
    largest = roofline.largest_batch(context)
    chosen = largest if batch is None else min(batch, largest)
    chunk = roofline.batched_tokens
    fits = chosen > 0
    step = roofline.decode(chosen, context) if fits else None
    return Row(
        weights=roofline.weights,
        kv=roofline.kv,
        ranks=roofline.group.ranks,
        stages=roofline.group.stages,
        weight_gb=roofline.weight_bytes / 1e9,
        kv_bytes_per_token=roofline.kv_bytes_per_token,
        num_blocks=roofline.num_blocks,
        batch=chosen,
        step_ms=None if step is None else step.seconds * 1e3,
        memory_ms=None if step is None else step.memory_s * 1e3,
        compute_ms=None if step is None else step.compute_s * 1e3,
        exchange_ms=None if step is None else step.exchange_s * 1e3,
        tokens_per_s=roofline.tokens_per_s(chosen, context) if fits else None,
        ridge_tokens=roofline.ridge_tokens,
        link_threshold_gb_per_s=roofline.link_threshold() / 1e9,
        ttft_ms={n: roofline.prefill_s(n, chunk) * 1e3 for n in prompt_lens} if fits else None,
        cost_per_million=roofline.group.devices
        * roofline.cost_per_million(chosen, context, price_per_hour)
        if fits and price_per_hour is not None
        else None,
        draft_gb=None if roofline.draft is None else roofline.draft_bytes / 1e9,
        draft_ms=roofline.draft.decode(min(chosen, MOST_DRAFTED), context).seconds * 1e3
        if fits and roofline.draft is not None
        else None,
    )


def table(device: Device, rows: Sequence[Row], prompt_lens: Sequence[int]) -> str:
    """The rows of one device, for people."""
    title = (
        f"{device.name}: {device.memory_bytes / 1e9:.0f} GB, {device.bandwidth / 1e9:.0f} GB/s, "
        f"{device.peak('bf16') / 1e12:.3g} TFLOP/s bf16 ({device.source})"
    )
    is_staged = any(row.stages > 1 for row in rows)
    is_grouped = is_staged or any(row.ranks > 1 for row in rows)
    heads = [
        "weights",
        "kv",
        *["tp"] * is_grouped,
        *["pp"] * is_staged,
        "weights GB",
        "blocks",
        "batch",
        "step ms",
    ]
    heads += ["memory ms", "compute ms", *["link ms"] * is_grouped, "tokens/s", "nt"]
    heads += [f"TTFT {n}" for n in prompt_lens]
    costs = any(row.cost_per_million is not None for row in rows)
    drafts = any(row.draft_gb is not None for row in rows)
    heads += [*["cost/M"] * costs, *["draft GB", "draft ms"] * drafts]
    lines = [title, _line(heads)]
    for row in rows:
        cells = [row.weights, row.kv, *[str(row.ranks)] * is_grouped]
        cells += [*[str(row.stages)] * is_staged, f"{row.weight_gb:.1f}"]
        exchange = [row.exchange_ms] * is_grouped
        times = (row.step_ms, row.memory_ms, row.compute_ms, *exchange, row.tokens_per_s)
        if row.ttft_ms is None or None in times:
            lines.append(_line(cells) + "   does not fit")
            continue
        cells += [str(row.num_blocks), str(row.batch)]
        cells += [_short(each) for each in times if each is not None]
        cells += [f"{row.ridge_tokens:.0f}"]
        cells += [_short(each) for each in row.ttft_ms.values()]
        last = (row.cost_per_million, row.draft_gb, row.draft_ms)
        cells += [_short(each) for each in last if each is not None]
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"  {cells[0]:8}{cells[1]:5}" + "".join(f"{cell:>11}" for cell in cells[2:])


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def plot(
    path: str, rooflines: dict[str, list[Roofline]], context: int, longest: int, title: str
) -> None:
    """A row of panels for each device: tokens/s by batch, and TTFT by prompt length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4 * len(rooflines)), layout="constrained")
    panels = figure.subplots(len(rooflines), 2, squeeze=False)
    figure.suptitle(f"{title}, {context} tokens a sequence: bounds by the roofline")
    for (flow, first), (name, choices) in zip(panels, rooflines.items()):
        for each in choices:
            largest, label = each.largest_batch(context), f"{each.weights}, kv {each.kv}"
            if each.group.ranks > 1:
                label += f", tp {each.group.ranks}"
            if each.group.stages > 1:
                label += f", pp {each.group.stages}"
            if largest == 0:
                continue
            batches = _spaced(largest)
            line = flow.plot(batches, [each.tokens_per_s(b, context) for b in batches], label=label)
            flow.plot(largest, each.tokens_per_s(largest, context), "o", color=line[0].get_color())
            lens = _spaced(longest)
            times = [each.prefill_s(n, each.batched_tokens) for n in lens]
            if each.kv == choices[0].kv:  # it hardly matters to the first token
                without_kv = label.replace(f", kv {each.kv}", "")
                first.plot(lens, times, label=without_kv, color=line[0].get_color())
        flow.set(xscale="log", yscale="log", xlabel="batch", ylabel="tokens/s", title=name)
        first.set(xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="TTFT, s", title=name)
        for panel in (flow, first):
            panel.grid(alpha=0.3)
            if panel.lines:
                panel.legend(fontsize="x-small", ncols=2)
            else:
                panel.set_title(f"{name}: does not fit")
    figure.savefig(path, dpi=120)


def _spaced(end: int) -> list[int]:
    """Whole numbers from 1 to `end`, evenly on a logarithmic axis."""
    powers = (end ** (i / CURVE_POINTS) for i in range(CURVE_POINTS + 1))
    return sorted({min(end, round(power)) for power in powers})
