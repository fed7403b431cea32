"""Random adapters in peft's format, and the checkpoints that result from merging them.

A and B are large enough that greedy ids differ from those of the base model.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
STRENGTH = 1.5  # of an adapter's addition to a weight of standard deviation 0.2, roughly


def write_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 4,
    targets: Sequence[str] = ATTENTION + MLP,
    seed: int = 0,
    ranks: dict[str, int] | None = None,
    **fields: Any,
) -> Path:
    """An adapter of the checkpoint `base` in `folder`. `ranks`: rank_pattern. `fields`: of
    adapter_config.json, instead of what they would be."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        if last not in targets or weight.dim() != 2:
            continue
        own = (ranks or {}).get(last, rank)
        a = torch.randn(own, weight.shape[1], generator=generator) * 0.2
        b = torch.randn(weight.shape[0], own, generator=generator) * 0.2
        key = f"base_model.model.{module}"
        tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a, b
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base),
        "r": rank, "lora_alpha": STRENGTH * rank, "lora_dropout": 0.1, "bias": "none",
        "target_modules": list(targets), "rank_pattern": ranks or {}, "alpha_pattern": {},
        "modules_to_save": None, "use_rslora": False, "use_dora": False, "fan_in_fan_out": False,
        "init_lora_weights": True, "inference_mode": True, "layers_to_transform": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


def merged(folder: Path, base: Path, into: Path) -> Path:
    """The checkpoint `base` with the adapter in `folder` added to its weights, in fp32:
    W + scale * B A."""
    shutil.copytree(base, into)
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = {name: w.float() for name, w in load_file(base / "model.safetensors").items()}
    pairs = load_file(folder / "adapter_model.safetensors")
    for name, a in pairs.items():
        if ".lora_A." not in name:
            continue
        b = pairs[name.replace(".lora_A.", ".lora_B.")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha = config["alpha_pattern"].get(module.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
        weights[f"{module}.weight"] += scale * (b.double() @ a.double()).float()
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    return into
