"""The memory that one shared copy of the experts saves, as Linux counts shared pages.

Two processes that serve a random model from one expert file, against two with a file each;
each has used every expert once. PSS: a page that n processes share counts 1/n in each.

    python -m benchmarks.experts.memory --out OUT
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.experts.common import finish, parser_of, temporary_expert_file
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.experts.writer import manifest_path
from penstock.workers.models.loader import load_model

# About a gigabyte of experts in bf16.
RANDOM_MODEL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "num_experts": 40,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip


def memory() -> dict[str, Any]:
    """PSS of two processes that have loaded every expert once, in MiB."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
        folder = Path(temporary, "model")
        config = transformers.AutoConfig.for_model("qwen3_moe", **RANDOM_MODEL)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        with temporary_expert_file(str(folder), "auto") as manifest:
            one = _children(folder, str(manifest_path(Path(manifest.path))))
        own = _children(folder, "")
    return {"experts_mib": manifest.num_bytes / 2**20, "one_copy": one, "own_copies": own}


def _children(folder: Path, manifest: str) -> list[dict[str, float]]:
    """Two processes at once: each says when it is ready, and reads its memory when both are."""
    command = [sys.executable, "-m", "benchmarks.experts.memory", "--child", str(folder), manifest]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    found = []
    for child in both:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in both:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("measure\n")
        child.stdin.flush()
        found.append(json.loads(child.stdout.readline()))
    for child in both:
        assert child.stdin is not None
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


def lines(found: dict[str, Any]) -> list[str]:
    figures = found["memory"]
    text = [
        f"Two processes with {figures['experts_mib']:.0f} MiB of experts, MiB",
        "",
        f"{'':24} {'PSS':>7} {'PSS':>7} {'sum':>7} {'of it shared memory':>20}",
    ]
    for name, key in (("one copy for both", "one_copy"), ("a copy each", "own_copies")):
        a, b = figures[key]
        shared = a["Pss_Shmem"] + b["Pss_Shmem"]
        total = a["Pss"] + b["Pss"]
        text.append(f"{name:24} {a['Pss']:7.0f} {b['Pss']:7.0f} {total:7.0f} {shared:20.0f}")
    return text


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    torch.set_num_threads(args.threads)
    transformers.logging.disable_progress_bar()
    finish(__file__, args, {"memory": memory()}, lines)


if __name__ == "__main__":
    main()
