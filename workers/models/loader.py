"""Loads a model: finds its checkpoint by name, and packs the tensors into a Decoder."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch

from penstock.kernels.cpu import huge_pages
from penstock.kernels.quant import INT8_GROUP
from penstock.workers.errors import ConfigError
from penstock.workers.experts.build import ExpertSettings, build_experts
from penstock.workers.families.table import FAMILIES
from penstock.workers.gguf.header import find_gguf
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.build import build_decoder
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.shards.decoder import ShardDecoder
from penstock.workers.models.shards.rank import Rank
from penstock.workers.models.shards.reading import own_part
from penstock.workers.packed.cache import PackedCache, stated
from penstock.workers.packed.parts import PackedParts
from penstock.workers.progress import LOADING, Report, counted, showing, told
from penstock.workers.quantization import (
    INT4,
    QUANTIZED_FORMATS,
    Int4Options,
    WeightPlan,
    weight_plan,
)
from penstock.workers.weights.checkpoint import (
    SCORE_HEAD,
    StoredTensor,
    is_headless,
    open_checkpoint,
)
from penstock.workers.weights.gguf import open_gguf
from penstock.workers.weights.hub import resolve_model
from penstock.workers.weights.sources import (
    DTYPES,
    CheckpointWeights,
    RandomWeights,
)

log = logging.getLogger("penstock.loader")


def load_model(
    path_or_id: str | Path,
    *,
    weights: str = "auto",
    quantize_o: bool = True,
    quantize_lm_head: bool = False,
    int8_group: int | None = INT8_GROUP,
    int4: Int4Options = INT4,
    int4_wide_layers: bool = False,
    dtype: str = "auto",
    device: str = "cpu",
    progress: bool | Report = True,
    experts: ExpertSettings | None = None,
    rank: Rank | None = None,
    beside: ShardDecoder | None = None,
    max_model_len: int | None = None,
    cache: PackedCache | None = None,
) -> Decoder:
    """Load a checkpoint into a Decoder, tensor by tensor: peak memory is one model and one layer.

    `weights`: "auto" (as the checkpoint), "fp32", "bf16", or int8, int4, nf4 or fp8: linear layers
    are quantised while they load, o_proj with `quantize_o` and the head with `quantize_lm_head`. A
    checkpoint that is already quantised is served as stored, but for a plain head with
    `quantize_lm_head`; or dequantised with "fp32" and "bf16".
    `int8_group`: inputs of int8 weights whose activations share a scale; None: a whole row.
    `int4_wide_layers`: some layers' q, k, v and down are int8 where `weights` is int4.
    `dtype`: of activations and of weights that are not quantised: "auto" is the checkpoint's (fp16
    becomes bf16 or fp32 on a CPU), or `weights` if that is a float format. `progress`: who is told
    of it; True: a bar if stderr is a terminal; False: nobody. With `experts`, routed experts stay
    in host memory and are served from an expert cache, which `Decoder.close` ends. `rank`: load
    only what this rank of a group computes. `beside`: a decoder of this rank and of the same
    shapes, whose connections to the other ranks are used: the calls of both are one sequence there.
    `max_model_len`: the longest context that is served, which decides between the rotary embeddings
    of LongRoPE; None: the model's positions. `cache`: has the packed weights if an earlier load
    kept them, and is given them if not. Raises ConfigError for an unusable config and
    LoadError, naming file and tensor, for weights that do not match it.
    """
    folder, config, tensors = open_model(
        str(path_or_id), weights if dtype == "auto" else dtype, device
    )
    plan = dataclasses.replace(
        weight_plan(config.stored_scheme, weights, quantize_o, quantize_lm_head),
        int8_group=int8_group,
        int4=int4,
        wide_layers=int4_wide_layers,
    )
    entry = None
    if cache is not None:
        num_bytes = sum(each.num_bytes for each in tensors.values())
        entry = cache.entry(folder, num_bytes, _packing(config, plan, rank, experts is not None))
    config = config.for_length(max_model_len)
    routed, in_expert_file = None, set[str]()
    if experts is not None:
        routed, in_expert_file = build_experts(
            experts, folder, config, tensors, torch.device(device), weights, int8_group, int4
        )
    may_lack_head, in_part = is_headless(tensors), frozenset[str]()
    if rank is not None:
        tensors = rank.stage_of(config).own_part(tensors)
        tensors, in_part = own_part(tensors, rank.shard_of(config))
    elsewhere = in_expert_file | _of_more_layers(config, tensors) | {SCORE_HEAD}
    total = sum(each.num_bytes for name, each in tensors.items() if name not in elsewhere)
    with showing(told(progress)) as report:
        kept = {} if entry is None else entry.read(report, LOADING)
        source = CheckpointWeights(
            folder,
            tensors,
            config.dtype,
            device,
            _uncounted if kept else counted(report, LOADING, total),
            scheme=config.stored_scheme,
            dequantize=config.stored_scheme is not None and config.stored_scheme.is_opened(weights),
        )
        parts = PackedParts(kept)
        decoder = build_decoder(
            config, source, plan, routed, may_lack_head=may_lack_head, rank=rank, in_part=in_part,
            beside=beside, parts=parts,
        )  # fmt: skip
        if not kept:
            source.warn_of_unused(elsewhere)
            if entry is not None:
                entry.keep(parts.built, report)
    huge_pages.return_freed()
    log.info("%s: %s; activations are %s", folder.name, decoder.weights, config.dtype)
    return decoder


def _uncounted(_: int) -> None:
    """Of what is read from the checkpoint beside packed weights, which are all that counts."""


def _packing(config: ModelConfig, plan: WeightPlan, rank: Rank | None, has_cache: bool) -> str:
    """All but the model's files that decides what is packed. `has_cache`: of experts."""
    own = None
    if rank is not None:
        own = (rank.number, rank.num_ranks, rank.num_stages, rank.whole_experts)
    return " ".join(map(stated, (config, plan, own, has_cache)))


def _of_more_layers(config: ModelConfig, tensors: dict[str, StoredTensor]) -> set[str]:
    """Names of tensors of layers after the last one, which predict further tokens."""
    if not FAMILIES[config.architecture].more_layers:
        return set()

    def number(name: str) -> int:
        layer = name.removeprefix("model.layers.").split(".", 1)[0]
        return int(layer) if name.startswith("model.layers.") and layer.isdigit() else -1

    return {name for name in tensors if number(name) >= config.num_layers}


def open_model(
    name: str, weights: str, device: str
) -> tuple[Path, ModelConfig, dict[str, StoredTensor]]:
    """Folder, config and tensors of a model; `config.dtype` is `weights` if that is a float format.

    Reads no tensor. Raises as `load_model` does.
    """
    folder = resolve_model(name)
    config = ModelConfig.from_pretrained(folder)
    gguf = find_gguf(folder)
    tensors = open_checkpoint(folder) if gguf is None else open_gguf(gguf)
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype=_stored_dtype(tensors))
    return folder, _with_dtype(config, weights, torch.device(device)), tensors


def build_random(
    config: ModelConfig,
    weights: str = "auto",
    seed: int = 0,
    device: str = "cpu",
    *,
    quantize_o: bool = True,
    quantize_lm_head: bool = False,
    int8_group: int | None = INT8_GROUP,
    int4: Int4Options = INT4,
) -> Decoder:
    """A decoder with random weights (normal, standard deviation 0.02), for benchmarks."""
    config = dataclasses.replace(config, dtype="fp32") if config.dtype == "auto" else config
    config = dataclasses.replace(config, stored_scheme=None)
    plan = weight_plan(None, weights, quantize_o, quantize_lm_head)
    plan = dataclasses.replace(plan, int8_group=int8_group, int4=int4)
    config = _with_dtype(config, weights, torch.device(device))
    return build_decoder(config, RandomWeights(config, seed, device), plan)


def _with_dtype(config: ModelConfig, dtype: str, device: torch.device) -> ModelConfig:
    """With `dtype` for activations; the checkpoint's if `dtype` is not a float format."""
    if dtype not in DTYPES and dtype not in ("auto", *QUANTIZED_FORMATS):
        known = ", ".join((*DTYPES, *QUANTIZED_FORMATS))
        raise ConfigError(f"weights {dtype!r} is unknown; known are auto, {known}")
    dtype = dtype if dtype in DTYPES else config.dtype
    if dtype == "fp16" and device.type == "cpu":
        # CPUs multiply fp16 slowly or not at all.
        dtype = "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"
        log.info("fp16 weights become %s on this CPU; ask for fp32 to keep every bit", dtype)
    return dataclasses.replace(config, dtype=dtype)


def _stored_dtype(tensors: dict[str, StoredTensor]) -> str:
    """The dtype of most bytes of the checkpoint, for configs that do not name one."""
    names = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
    num_bytes = dict.fromkeys(names, 0)
    for stored in tensors.values():
        if stored.dtype in num_bytes:
            num_bytes[stored.dtype] += stored.num_bytes
    return names[max(num_bytes, key=lambda dtype: num_bytes[dtype])]
