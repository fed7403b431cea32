"""Loads what a worker computes with: the model, an engine for it, and the thread that runs it.

Apart from worker.py, whose other importers must not load torch.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from penstock.kernels.cpu import native
from penstock.workers.config import EngineConfig
from penstock.workers.cpu_affinity import allowed_cores, kept_to
from penstock.workers.engine.draft import load_draft
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.group.expert_shares import shares_of_machine
from penstock.workers.engine.group.far import FarRanks
from penstock.workers.engine.group.leader import Leader
from penstock.workers.engine.group.pinning import pinned
from penstock.workers.engine.shortage import named_shortages
from penstock.workers.engine.thread import EngineThread
from penstock.workers.errors import ConfigError
from penstock.workers.experts.build import (
    ExpertSettings,
    check_mode,
    find_calibration,
    settings_in_group,
    settings_of,
)
from penstock.workers.experts.checkpoint import CheckpointExperts
from penstock.workers.experts.expert_file import Manifest, RowSource, copies_for
from penstock.workers.experts.writer import remove_expert_file, write_expert_file
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model, open_model
from penstock.workers.models.score_vector import configured_pooling
from penstock.workers.models.shards.decoder import ShardDecoder
from penstock.workers.models.shards.rank import MEMORY, Rank
from penstock.workers.option_groups.device import Device
from penstock.workers.packed.cache import PackedCache
from penstock.workers.progress import COMPILING, PREPARING, Progress, Report
from penstock.workers.quantization import int4_options
from penstock.workers.request import Delta
from penstock.workers.structured.grammar import GrammarCompiler
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.model_digest import verified_folder
from penstock.workers.weights.sources import DTYPES

log = logging.getLogger("penstock.engine")


def load_engine(
    config: EngineConfig,
    experts: Manifest | None = None,
    remote_experts: RowSource | None = None,
    report: Report | None = None,
    far: FarRanks | None = None,
) -> Engine:
    """The model of `config`, fetched and loaded, and an engine for it.

    `experts`, `remote_experts`, `far`: as for Worker.load. `report`: told of the progress; None: a
    bar if stderr is a terminal. Raises LoadError and ConfigError.
    """
    device = device_of(config.device)
    if config.num_ranks > 1:
        config = _for_group(config, device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    # No request is served yet, so loading uses all cores.
    with kept_to(None if config.cores is None else config.cores | allowed_cores()):
        folder = verified_folder(config, report)
        if device == "cpu":
            compile_operators(report)
        leader, own_file = None, None
        settings = settings_of(config, experts, remote_experts)
        if config.num_ranks > 1:
            calibration = None if settings is None else find_calibration(settings, folder)
            if settings is not None and experts is None:
                own_file = experts = write_experts(settings, config, folder, device)
            transport = transport_of(device, is_far=far is not None)
            leader = Leader(config, folder, device, transport, far, experts, calibration)
            share = leader.rank.expert_share(ModelConfig.from_pretrained(folder))
            settings = settings_in_group(config, experts, share, calibration)
        shared = config.cores
        config = pinned(config, device, 0)
        own_cores = None if config.cores == shared else config.cores
        try:
            with named_shortages(config.model, device), kept_to(own_cores):
                model = load_configured(
                    config,
                    folder,
                    device,
                    progress=True if report is None else report,
                    experts=settings,
                    rank=None if leader is None else leader.rank,
                    cache=PackedCache.of(config, device),
                )
                draft = load_draft(
                    config,
                    folder,
                    device,
                    model,
                    True if report is None else report,
                    None if leader is None else leader.rank,
                )
                if report is not None:
                    report(Progress(PREPARING))
                if leader is not None and isinstance(model, ShardDecoder):
                    leader.lead(model, draft)
                pooling = configured_pooling(folder, config)
                return Engine(config, model, pooling=pooling, draft=draft)
        except BaseException:
            if leader is not None:
                leader.close()
            raise
        finally:
            if own_file is not None:  # all ranks have it mapped
                remove_expert_file(Path(own_file.path))


def compile_operators(report: Report | None = None) -> None:
    """Compile the CPU operators where no process has yet, and say so: else what first uses them
    seems to stand still for a minute."""
    if native.is_built():
        return
    log.info("%s", COMPILING)
    if report is not None:
        report(Progress(COMPILING))
    native.loaded()


def device_of(device: Device) -> Literal["cpu", "cuda"]:
    """The device for the setting `device`. Raises ConfigError where it is cuda without a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device is cuda, and PyTorch sees no GPU here; use cpu or auto, or look at the GPU's "
            "driver and at torch.version.cuda, which is None in builds for CPUs"
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def load_configured(
    config: EngineConfig,
    folder: Path,
    device: str,
    *,
    dtype: str = "auto",
    progress: bool | Report = True,
    experts: ExpertSettings | None = None,
    rank: Rank | None = None,
    cache: PackedCache | None = None,
) -> Decoder:
    """The model in `folder` with the number formats of `config`.

    `device`: cpu or cuda. `dtype`, `progress`, `experts`, `rank`, `cache`, and what it raises: as
    `load_model`.
    """
    return load_model(
        str(folder),
        weights=config.weights,
        quantize_o=config.quantize_o,
        quantize_lm_head=config.quantize_lm_head,
        int8_group=None if config.int8_group == "row" else int(config.int8_group),
        int4=int4_options(config),
        int4_wide_layers=config.int4_wide_layers,
        dtype=dtype,
        device=device,
        progress=progress,
        experts=experts,
        rank=rank,
        max_model_len=config.max_model_len,
        cache=cache,
    )


def write_experts(
    settings: ExpertSettings, config: EngineConfig, folder: Path, device: str
) -> Manifest | None:
    """A file with the experts of the ranks of a group that this machine has; None: they have none.

    Raises LoadError and ConfigError.
    """
    _, model, tensors = open_model(str(folder), config.weights, device)
    check_mode(settings, model, config.weights)
    int4 = int4_options(config)
    experts = CheckpointExperts(folder, model, tensors, config.weights, device, int4)
    shares = shares_of_machine(config, model, 0)
    if not shares:
        return None
    name = f"penstock-experts-{os.getpid()}-{secrets.token_hex(4)}.experts"
    path = Path(config.expert_store_dir) / name
    copies = copies_for(settings.mode, config.weights, settings.copies)
    return write_expert_file(experts, path, DTYPES[model.dtype], copies=copies, shares=shares)


def transport_of(device: str, *, is_far: bool) -> str:
    """What the ranks of a group are connected by (shards/rank.py). `is_far`: over machines."""
    if device == "cuda":
        return "nccl"
    return "gloo" if is_far else MEMORY


def _for_group(config: EngineConfig, device: str) -> EngineConfig:
    """As each rank needs it. Raises ConfigError where a group cannot run."""
    num_ranks, wanted = config.num_ranks, config.group_name
    if device == "cuda":
        num_here = num_ranks // config.nodes_per_worker
        if (num_gpus := torch.cuda.device_count()) < num_here:
            raise ConfigError(
                f"{wanted} needs a GPU for each rank, {num_here} on each machine, and this worker "
                f"has {num_gpus}: lower it"
            )
        log.warning("%s on GPUs has not yet been run on several: check its answers", wanted)
        if config.pipeline_parallel_size > 1:
            return replace(config, async_scheduling="off", cuda_graphs="off")
        return config
    if native.loaded() is None:
        raise ConfigError(
            f"{wanted} needs the native CPU library, which could not be built: install g++, or "
            "leave it out"
        )
    threads = config.threads or torch.get_num_threads()
    return replace(config, threads=max(1, threads * config.nodes_per_worker // num_ranks))


def thread_for(
    engine: Engine,
    deliver: Callable[[list[Delta]], None],
    on_failure: Callable[[], None],
    on_accepted: Callable[[list[str]], None] | None = None,
) -> EngineThread:
    """A thread, not started, that runs `engine`. The callables are those of EngineThread."""
    config, model = engine.config, engine.model.config
    grammars = GrammarCompiler(
        lambda: Tokenizer.load(verified_folder(config)).to_json(),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )
    return EngineThread(
        engine,
        deliver,
        num_threads=config.threads,
        cores=config.cores,
        grammars=grammars,
        on_failure=on_failure,
        on_accepted=on_accepted,
    )
