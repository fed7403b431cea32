"""Experts from shared memory: how well they are foreseen, and what one copy of them saves.

Two parts, each a table of OUT.txt, all figures in OUT.json:

accuracy   Held-out text through the built-in MoE model: how many of the experts of each layer were
           foreseen from the layer before (P1: through the next layer's norm and router; P0: its
           router on this layer's normed state). Beside it the experts of the token before, and
           the control: a layer's own router on its own state. Of the experts that
           a token has, the neurons: how many of those that it keeps (product score, keep 0.2)
           the state of the layer before would have kept.
memory     Two processes that serve from one arena against two that each have one of their own, of a
           random model: resident memory as Linux counts shared pages (PSS).

What a cache gives in time is expert_speed.py's, what inexact modes cost expert_quality.py's.

    python benchmarks/expert_store.py --out benchmarks/results/2026-11-21-experts
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import builtin_data as data
import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer

from penstock.kernels.rowwise import rms_norm
from penstock.workers.config import EngineConfig
from penstock.workers.engine import Engine
from penstock.workers.experts.arena import Manifest
from penstock.workers.experts.checkpoint_experts import CheckpointExperts
from penstock.workers.experts.opening import ExpertSettings
from penstock.workers.experts.predictor import num_common
from penstock.workers.experts.writer import write_arena
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.folder import resolve_model
from penstock.workers.models.loader import load_model, open_model
from penstock.workers.models.moe import MoeMlp
from penstock.workers.request import Request, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
MODEL = "builtin-moe"
WINDOW = 1024  # tokens of one held-out text
KEEP = 0.2  # neurons of an expert
# About a gigabyte of experts in bf16.
RANDOM_MODEL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "num_experts": 40,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip


# -- accuracy


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

    def noting_call(self: MoeMlp, x: Tensor, workspace: Any) -> Tensor:
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
    folder = resolve_model(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
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
    for book in data.HELDOUT_BOOKS:
        ids = data.heldout_tokens(args.corpus, book, tokenizer)[0]
        for start in range(0, args.tokens // len(data.HELDOUT_BOOKS), WINDOW):
            seen: list[Routed] = []
            with watched(model, seen), torch.inference_mode():
                drain(engine, ids[start : start + WINDOW], 1)
                assert all(len(each.ids) == WINDOW for each in seen)
                for i, each in enumerate(seen):
                    layer, guesses = each.layer, {}
                    guesses["control"] = predictor.guess(each.state, layer)
                    if i:
                        mlp = model.layers[layer].mlp
                        assert isinstance(mlp, MoeMlp)
                        guesses["P1"] = predictor.guess(seen[i - 1].state, layer)
                        guesses["P0"] = mlp.choose(seen[i - 1].normed)[1]
                        _count_neurons(model, seen[i - 1].state, each, neurons[layer])
                    before = torch.cat([torch.full_like(each.ids[:1], -1), each.ids[:-1]])
                    guesses["previous token"] = before
                    for name, guess in guesses.items():
                        counts = right.setdefault(name, [0] * model.config.num_layers)
                        counts[layer] += num_common(guess, each.ids)
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
    assert routed is not None and routed.choice is not None
    norm = model.layers[now.layer].post_attention_norm
    foreseen = rms_norm(before, norm, model.config.rms_norm_eps)
    for expert in now.ids.unique().tolist():
        tokens = (now.ids == expert).any(1)
        kept = routed.choice.active(now.layer, expert, now.normed[tokens])
        guessed = routed.choice.active(now.layer, expert, foreseen[tokens])
        counts[0] += int(kept.sum())
        counts[1] += int((kept & guessed).sum())


def drain(engine: Engine, ids: Sequence[int], num_new: int) -> None:
    params = SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True)
    engine.add(Request("one", tuple(ids), params))
    while engine.has_work():
        engine.step()


# -- memory


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """PSS of two processes that have loaded every expert once, in MiB."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
        folder = Path(temporary, "model")
        config = transformers.AutoConfig.for_model("qwen3_moe", **RANDOM_MODEL)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        experts = CheckpointExperts(*open_model(str(folder), "auto", "cpu"))
        path = Path("/dev/shm", f"penstock-bench-{os.getpid()}.arena")
        manifest_file = path.with_name(path.name + ".json")
        try:
            manifest = write_arena(experts, path, torch.bfloat16)
            one = _children(folder, str(manifest_file))
            path.unlink()
            own = _children(folder, "")
        finally:
            path.unlink(missing_ok=True)
            manifest_file.unlink(missing_ok=True)
    return {"experts_mib": manifest.num_bytes / 2**20, "one_copy": one, "own_copies": own}


def _children(folder: Path, manifest: str) -> list[dict[str, float]]:
    """Two processes at once: each says when it is ready, and reads its memory when both are."""
    command = [sys.executable, __file__, "--child", str(folder), manifest]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    found = []
    for child in both:
        assert child.stdout.readline() == "ready\n"
    for child in both:
        child.stdin.write("measure\n")
        child.stdin.flush()
        found.append(json.loads(child.stdout.readline()))
    for child in both:
        child.stdin.close()
        child.wait()
    return found


def child(folder: str, manifest: str) -> None:
    """A worker that has used each expert once; its cache holds a twentieth of them."""
    torch.set_num_threads(1)
    known = Manifest.from_json(Path(manifest).read_text()) if manifest else None
    settings = ExpertSettings(num_slots=16, manifest=known)
    model = load_model(folder, progress=False, experts=settings)
    assert model.routed is not None
    cache = model.routed.cache
    for layer in cache.manifest.layers:
        for _ in cache.visit(layer, range(cache.manifest.num_experts)):
            pass
    print("ready", flush=True)
    sys.stdin.readline()
    sizes = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        sizes[name.rstrip(":")] = int(size) / 1024
    print(json.dumps({name: sizes[name] for name in ("Rss", "Pss", "Pss_Shmem")}), flush=True)
    sys.stdin.readline()


# -- what comes out


def report(found: dict[str, Any]) -> str:
    lines = [f"{found['machine']}", ""]
    if "accuracy" in found:
        lines += ["Experts of a layer that were foreseen, % (built-in MoE, held-out text)", ""]
        lines.append(
            f"{'layer':>5} {'tokens':>7} {'P1':>7} {'P0':>7} {'previous':>9} {'control':>8} "
            f"{'neurons':>8}"
        )
        for row in found["accuracy"]:
            p1, p0, neurons = (
                f"{100 * row[n]:7.1f}" if row[n] is not None else "      -"
                for n in ("P1", "P0", "neurons")
            )
            lines.append(
                f"{row['layer']:>5} {row['tokens']:>7} {p1} {p0} "
                f"{100 * row['previous token']:>9.1f} {100 * row['control']:>8.1f} {neurons:>8}"
            )
        lines.append("")
    if "memory" in found:
        lines += _memory_lines(found["memory"])
    return "\n".join(lines)


def _memory_lines(figures: dict[str, Any]) -> list[str]:
    lines = [
        f"Two processes with {figures['experts_mib']:.0f} MiB of experts, MiB",
        "",
        f"{'':24} {'PSS':>7} {'PSS':>7} {'sum':>7} {'of it shared memory':>20}",
    ]
    for name, key in (("one copy for both", "one_copy"), ("a copy each", "own_copies")):
        a, b = figures[key]
        shared = a["Pss_Shmem"] + b["Pss_Shmem"]
        total = a["Pss"] + b["Pss"]
        lines.append(f"{name:24} {a['Pss']:7.0f} {b['Pss']:7.0f} {total:7.0f} {shared:20.0f}")
    return [*lines, ""]


def machine() -> str:
    names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    name = names[0].partition(":")[2].strip() if names else platform.processor()
    threads = torch.get_num_threads()
    return f"{name}, {os.cpu_count()} cores, {threads} thread(s), torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    corpus = ROOT.parent / "shared" / "data" / "classics"
    parser.add_argument("--parts", nargs="+", default=["accuracy", "memory"])
    parser.add_argument("--corpus", type=Path, default=corpus, help="with heldout-BOOK.txt.xz")
    parser.add_argument("--tokens", type=int, default=32_768, help="of held-out text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="path without a suffix")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    torch.set_num_threads(args.threads)
    transformers.logging.disable_progress_bar()
    found: dict[str, Any] = {"machine": machine(), "command": " ".join(sys.argv)}
    if "accuracy" in args.parts:
        found["accuracy"] = accuracy(args)
    if "memory" in args.parts:
        found["memory"] = memory(args)
    text = report(found)
    print(text)
    if args.out is not None:
        args.out.with_name(args.out.name + ".json").write_text(json.dumps(found, indent=1) + "\n")
        args.out.with_name(args.out.name + ".txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
