"""Accuracy of expert prediction: each layer's experts from the layer before, on held-out text.

The built-in MoE model. P1: the next layer's norm and router; P0: its router on this layer's normed
state. Baseline: the experts of the previous token. Control: a layer's own router on its own state.
For neurons: how many of those that a token keeps (product score, keep 0.2) the state of the layer
before would have kept. speed.py measures time, quality.py what the inexact modes cost.

    python -m benchmarks.experts.prediction_accuracy --out OUT
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.experts.common import MODEL, books, drain, finish, parser_of
from penstock.kernels.quant import Int8Rows
from penstock.kernels.rowwise import rms_norm
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.experts.lookahead import num_common
from penstock.workers.memory.workspace import Workspace
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.models.moe import MoeMlp

WINDOW = 1024  # tokens of one held-out text
KEEP = 0.2  # neurons of an expert


@dataclass(frozen=True)
class Routed:
    """One layer over one text: its state before the MLP, what its router saw, and its choice."""

    layer: int
    state: Tensor  # [T, hidden]
    normed: Tensor  # [T, hidden]
    ids: Tensor  # [T, k]


@contextmanager
def watched(model: Decoder, seen: list[Routed]) -> Iterator[None]:
    """Notes what each MoE layer of `model` does."""
    layer_of = {id(layer.mlp): index for index, layer in enumerate(model.layers)}
    call, routing = MoeMlp.__call__, MoeMlp._routing
    normed: list[Tensor] = []

    def noting_call(self: MoeMlp, x: Tensor | Int8Rows, workspace: Workspace) -> Tensor:
        assert isinstance(x, Tensor)
        normed.append(x.clone())
        return call(self, x, workspace)

    def noting_routing(self: MoeMlp, ids: Tensor, x: Tensor, scores: Tensor, workspace: Any) -> Any:
        state = workspace.residual.clone()
        seen.append(Routed(layer_of[id(self)], state, normed.pop(), ids.clone()))
        return routing(self, ids, x, scores, workspace)

    MoeMlp.__call__, MoeMlp._routing = noting_call, noting_routing  # type: ignore[method-assign]
    try:
        yield
    finally:
        MoeMlp.__call__, MoeMlp._routing = call, routing  # type: ignore[method-assign]


def accuracy(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Shares of a token's experts that were foreseen, by layer."""
    model = load_model(
        MODEL,
        weights="fp32",
        progress=False,
        experts=ExpertSettings(num_slots=10**6, mode="sparse", keep=KEEP),
    )
    engine = Engine(
        EngineConfig(
            max_num_batched_tokens=WINDOW,
            max_num_seqs=1,
            num_blocks=200,
            activation_memory="separate",  # so that a text is one step
        ),
        model,
    )
    assert model.routed is not None and model.routed.predictor is not None
    predictor, top_k = model.routed.predictor, model.config.num_experts_per_token
    right: dict[str, list[int]] = {}
    total = [0] * model.config.num_layers
    first = [0] * model.config.num_layers
    neurons = [[0, 0] for _ in range(model.config.num_layers)]
    texts = books(args.corpus)
    for ids in texts:
        for start in range(0, args.tokens // len(texts), WINDOW):
            seen: list[Routed] = []
            with watched(model, seen), torch.inference_mode():
                drain(engine, ids[start : start + WINDOW], 1)
                assert all(len(each.ids) == WINDOW for each in seen)
                for i, each in enumerate(seen):
                    layer, guesses = each.layer, {}
                    guesses["control"] = predictor.predict_ids(each.state, layer)
                    if i:
                        mlp = model.layers[layer].mlp
                        assert isinstance(mlp, MoeMlp)
                        guesses["P1"] = predictor.predict_ids(seen[i - 1].state, layer)
                        guesses["P0"] = mlp.choose(seen[i - 1].normed)[1]
                        _count_neurons(model, seen[i - 1].state, each, neurons[layer])
                    before = torch.cat([torch.full_like(each.ids[:1], -1), each.ids[:-1]])
                    guesses["previous token"] = before
                    for name, predict_ids in guesses.items():
                        counts = right.setdefault(name, [0] * model.config.num_layers)
                        counts[layer] += num_common(predict_ids, each.ids)
                    total[layer] += each.ids.numel()
                    first[layer] += top_k
    engine.close()
    rows = []
    for layer in range(model.config.num_layers):
        row: dict[str, Any] = {"layer": layer, "tokens": total[layer] // top_k}
        for name in ("P1", "P0", "previous token", "control"):
            of = total[layer] - (first[layer] if name == "previous token" else 0)
            known = name in ("previous token", "control") or layer > 0
            row[name] = right[name][layer] / of if known else None
        kept, foreseen = neurons[layer]
        row["neurons"] = foreseen / kept if kept else None
        rows.append(row)
    return rows


def _count_neurons(model: Decoder, before: Tensor, now: Routed, counts: list[int]) -> None:
    """Add the neurons that the tokens of one layer keep, and those of them that `before`, the state
    of the layer before, would have kept."""
    routed = model.routed
    norm = model.layers[now.layer].mlp_norm
    assert routed is not None and routed.selector is not None and norm is not None
    foreseen = rms_norm(before, norm, model.config.rms_norm_eps)
    for expert in now.ids.unique().tolist():
        tokens = (now.ids == expert).any(1)
        kept = routed.selector.active(now.layer, expert, now.normed[tokens])
        guessed = routed.selector.active(now.layer, expert, foreseen[tokens])
        counts[0] += int(kept.sum())
        counts[1] += int((kept & guessed).sum())


def lines(found: dict[str, Any]) -> list[str]:
    text = ["Experts of a layer that were foreseen, % (built-in MoE, held-out text)", ""]
    text.append(
        f"{'layer':>5} {'tokens':>7} {'P1':>7} {'P0':>7} {'previous':>9} {'control':>8} "
        f"{'neurons':>8}"
    )
    for row in found["accuracy"]:
        p1, p0, neurons = (
            f"{100 * row[n]:7.1f}" if row[n] is not None else "      -"
            for n in ("P1", "P0", "neurons")
        )
        text.append(
            f"{row['layer']:>5} {row['tokens']:>7} {p1} {p0} "
            f"{100 * row['previous token']:>9.1f} {100 * row['control']:>8.1f} {neurons:>8}"
        )
    return text


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=32_768, help="of held-out text")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    finish(__file__, args, {"accuracy": accuracy(args)}, lines)


if __name__ == "__main__":
    main()
