"""Which weights int4 loses most by: perplexity with some of them in int4, others in int8 or plain.

The weights alone are rounded, after the Hadamard transform as at load, in transformers' model in
fp32; activations are not. A case gives each kind of linear layer a format; `chosen` are the layers
that `is_wide` (workers/quantization.py). Decision 45 has the figures.

    python -m benchmarks.engine.wide_layers MODEL --json out.json

MODEL is a folder with a Llama checkpoint (benchmarks/common/off_grid.py writes one).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common import record
from benchmarks.engine.calibrated_quality import CORPUS, WINDOW
from benchmarks.engine.gguf_quality import books
from penstock.kernels.quant import dequantize_weight, hadamard_transform, quantize_weight
from penstock.workers.evaluation.eval_set import cut_windows
from penstock.workers.quantization import is_wide
from penstock.workers.text.tokenizer import Tokenizer

PLAIN, INT8 = "plain", "int8"
BITS = {PLAIN: 32.0, INT8: 8.0, "16": 5.0, "32": 4.5}  # int4 is named by the size of its groups
QKV, GATE_UP = ("q", "k", "v"), ("gate", "up")
KINDS = (*QKV, "o", *GATE_UP, "down")
Format = Callable[[str, int, int], str]  # of kind, layer and number of layers


def alone(kind: str) -> Format:
    """int4 for this kind, and nothing else rounded."""
    return lambda each, layer, num: "16" if each == kind else PLAIN


def mixed(others: Mapping[str, str], wide: tuple[str, ...], where: Callable[..., bool]) -> Format:
    """int8 for the kinds `wide` in the layers `where`; else the format of `others`, int4 in groups
    of 16 unless it is given."""

    def found(kind: str, layer: int, num: int) -> str:
        return INT8 if kind in wide and where(layer, num) else others.get(kind, "16")

    return found


def everywhere(layer: int, num: int) -> bool:
    return True


SMALL = dict.fromkeys(GATE_UP, "32")
CASES: dict[str, Format] = {
    "int4 in all layers": mixed({}, (), is_wide),
    **{f"{kind} alone": alone(kind) for kind in KINDS},
    "q, k, v, down of the chosen": mixed({}, (*QKV, "down"), is_wide),
    "down of the chosen": mixed({}, ("down",), is_wide),
    "down of odd layers": mixed({}, ("down",), lambda layer, num: layer % 2 == 1),
    "down of the last half": mixed({}, ("down",), lambda layer, num: layer >= num // 2),
    "chosen, gate and up in 32": mixed(SMALL, (*QKV, "down"), is_wide),
    "chosen, all in 32": mixed(dict.fromkeys(KINDS, "32"), (*QKV, "down"), is_wide),
    "q, k, v of all, down of the chosen, gate and up in 32": lambda kind, layer, num: (
        mixed(SMALL, QKV, everywhere)(kind, layer, num)
        if kind != "down"
        else mixed({}, ("down",), is_wide)(kind, layer, num)
    ),
}


class Rounded:
    """A model whose linear layers take the formats of a case."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._linears = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) and name != "lm_head"
        }
        self._plain = {name: each.weight.detach().clone() for name, each in self._linears.items()}
        self._num_layers = self.model.config.num_hidden_layers

    def take(self, format: Format) -> float:
        """Round the weights; bits of one, on average, without scales of rows."""
        total = held = 0.0
        for name, module in self._linears.items():
            parts = name.split(".")
            kind = parts[-1].removesuffix("_proj")
            chosen = format(kind, int(parts[2]), self._num_layers)
            weight = self._plain[name]
            module.weight.data = _rounded(weight, chosen)
            total, held = total + weight.numel(), held + weight.numel() * BITS[chosen]
        return held / total

    @torch.inference_mode()
    def losses(self, windows: list[list[int]]) -> list[float]:
        """The mean -log p of each window's tokens."""
        found = []
        for window in windows:
            ids = torch.tensor([window])
            logits = self.model(ids[:, :-1]).logits[0]
            found.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
        return found


def _rounded(weight: Tensor, format: str) -> Tensor:
    if format == PLAIN:
        return weight
    if format == INT8:
        return dequantize_weight(quantize_weight(weight, "int8", hadamard=hadamard_transform))
    group = int(format)
    made = quantize_weight(weight, "int4", group, hadamard=hadamard_transform)
    return dequantize_weight(made)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens (default: 4)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer, rounded = Tokenizer.load(args.model), Rounded(args.model)
    ids = [tokenizer.encode(book, add_special_tokens=False) for book in books(CORPUS)]
    windows = [list(each) for each in cut_windows(ids, args.windows, WINDOW + 1)]
    base = rounded.losses(windows)
    rows: list[dict[str, Any]] = []
    for name, format in CASES.items():
        bits = rounded.take(format)
        change = sum(rounded.losses(windows)) - sum(base)
        percent = 100 * math.expm1(change / len(windows))
        rows.append({"case": name, "bits_per_weight": bits, "change_percent": percent})
        print(f"{name}: {bits:.2f} bits, {percent:+.2f} %", flush=True)
    if args.json is not None:
        found = {"windows": args.windows, "rows": rows}
        record.write(args.json, __file__, found, threads=args.threads)


if __name__ == "__main__":
    main()
