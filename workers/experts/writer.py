"""Builds an arena straight from safetensors, one expert after another in bounded memory.

Knows the names of experts' tensors in checkpoints; nothing of who will read the file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.expert_twin import quantize_neurons
from penstock.kernels.experts import neuron_rows
from penstock.workers.config import ConfigError
from penstock.workers.experts.arena import (
    TWIN_GROUP,
    Bytes,
    ExpertEntry,
    Manifest,
    block_bytes,
    checkpoint_identity,
    checksums_of,
    digest_of,
)
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.checkpoint import FLOAT_DTYPES, StoredTensor, find_tensor
from penstock.workers.models.folder import LoadError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MANIFEST_SUFFIX = ".json"

Parts = tuple[StoredTensor, StoredTensor, StoredTensor]


@dataclass(frozen=True, slots=True)
class CheckpointExperts:
    """The routed experts of one checkpoint, per expert or fused, in Mixtral's or Qwen's names.

    Raises ConfigError for a model that has none.
    """

    folder: Path
    config: ModelConfig
    tensors: dict[str, StoredTensor]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(
                "expert_cache_gb is for mixture-of-experts models, and this one is dense; leave it "
                "out"
            )

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(i for i, routed in enumerate(self.config.moe_layers) if routed)

    def parts(self, layer: int, expert: int) -> Parts:
        """gate and up [inner, hidden], down [hidden, inner]. Raises LoadError."""
        count, name = self.config.num_experts, self._prefix(layer)
        hidden, inner = self.config.hidden_size, self.config.moe_intermediate_size
        if f"{name}.gate_up_proj" in self.tensors:
            both = _nth(self._find(f"{name}.gate_up_proj", count, 2 * inner, hidden), expert)
            gate, up = (replace(_nth(_halved(both), half), name=both.name) for half in (0, 1))
            return gate, up, _nth(self._find(f"{name}.down_proj", count, hidden, inner), expert)
        mixtral = self.config.model_type == "mixtral"
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        gate, up, down = (
            self._find(f"{name}.{expert}.{part}.weight", *shape)
            for part, shape in zip(names, shapes)
        )
        return gate, up, down

    def names(self) -> set[str]:
        """All tensors that belong to routed experts."""
        prefixes = tuple(f"{self._prefix(layer)}." for layer in self.layers)
        return {name for name in self.tensors if name.startswith(prefixes)} if prefixes else set()

    def dtype(self, compute: torch.dtype) -> torch.dtype:
        """As stored, unless the model computes in less: no more is kept than anybody uses."""
        first = self.parts(self.layers[0], 0)
        stored = [FLOAT_DTYPES.get(part.dtype, torch.float32) for part in first]
        widest = max(stored, key=lambda dtype: dtype.itemsize)
        narrow = widest if widest.itemsize <= compute.itemsize and widest in NAMES else compute
        return narrow if narrow in NAMES else torch.float32

    def identity(self, compute: torch.dtype, has_twins: bool = False) -> str:
        """What an arena of these experts is known by; changes when the files do."""
        files = {stored.file for stored in self.tensors.values()}
        dtype = NAMES[self.dtype(compute)]
        facts = {"dtype": dtype, "twins": has_twins}
        return checkpoint_identity({str(f): f.stat() for f in files}, facts)

    def routers(self) -> str:
        """A digest of the routers' numbers: whatever folder they lie in, they are this model's."""
        hashed = hashlib.blake2b(digest_size=16)
        count, hidden = self.config.num_experts, self.config.hidden_size
        for layer in self.layers:
            name = f"{self._prefix(layer).removesuffix('.experts')}.gate.weight"
            router = self._find(name, count, hidden).read()
            hashed.update(router.view(torch.uint8).numpy().data)
        return hashed.hexdigest()

    def _prefix(self, layer: int) -> str:
        name = f"model.layers.{layer}.block_sparse_moe"
        if f"{name}.gate.weight" not in self.tensors:
            name = f"model.layers.{layer}.mlp"
        return f"{name}.experts"

    def _find(self, name: str, *shape: int) -> StoredTensor:
        return find_tensor(self.tensors, self.folder, name, shape)


def _nth(stored: StoredTensor, index: int) -> StoredTensor:
    """Part `index` of a tensor along its first dimension; no more than that is read."""
    size = stored.num_bytes // stored.shape[0]
    return replace(
        stored, shape=stored.shape[1:], offset=stored.offset + index * size, num_bytes=size
    )


def _halved(stored: StoredTensor) -> StoredTensor:
    return replace(stored, shape=(2, stored.shape[0] // 2, *stored.shape[1:]))


def rows_of(parts: Parts, dtype: torch.dtype) -> Tensor:
    """The neuron rows of one expert, read from the checkpoint: [inner, 3 * hidden]."""
    gate, up, down = (part.read().to(dtype) for part in parts)
    return neuron_rows(gate, up, down)


def write_arena(
    experts: CheckpointExperts,
    path: Path,
    compute: torch.dtype,
    *,
    epoch: int = 1,
    has_twins: bool = False,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> Manifest:
    """Write the arena for models that compute in `compute` to `path`, which appears when it is
    whole; beside it its manifest. Readable by this user alone. With `has_twins`, each expert's int8
    twin lies behind it. `on_bytes` hears of bytes written.

    Raises LoadError for a checkpoint that does not match its config, or where there is no room.
    """
    dtype, config = experts.dtype(compute), experts.config
    blank = Manifest(
        path=str(path),
        epoch=epoch,
        checkpoint=experts.identity(compute, has_twins),
        dtype=NAMES[dtype],
        hidden=config.hidden_size,
        inner=config.moe_intermediate_size,
        num_experts=config.num_experts,
        layers=experts.layers,
        num_bytes=0,
        entries=(),
        has_twins=has_twins,
        routers=experts.routers(),
    )
    layer_bytes = sum(
        block_bytes(blank.inner, blank.row_bytes_of(expert)) for expert in range(blank.num_known)
    )
    blank = replace(blank, num_bytes=len(experts.layers) * layer_bytes)

    def all_rows() -> Iterator[tuple[int, int, Bytes]]:
        for layer in experts.layers:
            for expert in range(config.num_experts):
                rows = rows_of(experts.parts(layer, expert), dtype)
                yield layer, expert, rows.view(torch.uint8).numpy()
                if has_twins:
                    twins = quantize_neurons(rows, TWIN_GROUP)
                    yield layer, config.num_experts + expert, twins.numpy()

    return write_rows(blank, all_rows(), on_bytes)


def write_rows(
    blank: Manifest,
    all_rows: Iterator[tuple[int, int, Bytes]],
    on_bytes: Callable[[int], object] = lambda _: None,
) -> Manifest:
    """Write `all_rows`, (layer, expert, rows), as the arena that `blank` describes; its manifest,
    with entries."""
    path, entries = Path(blank.path), []
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _reserve(descriptor, blank.num_bytes, path.parent)
        offset = 0
        for layer, expert, rows in all_rows:
            _write(descriptor, rows.tobytes(), offset)
            _write(descriptor, checksums_of(rows).tobytes(), offset + rows.nbytes)
            entries.append(ExpertEntry(layer, expert, offset, rows.nbytes, digest_of(rows)))
            offset += block_bytes(blank.inner, rows.shape[1])
            on_bytes(rows.nbytes)
        manifest = replace(blank, entries=tuple(entries))
        manifest.check()
        os.rename(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    _write_text(manifest_path(path), manifest.to_json())
    return manifest


def read_manifest(path: Path) -> Manifest:
    """The manifest beside the arena `path`. Raises LoadError if there is none, or it is no good."""
    try:
        text = manifest_path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{manifest_path(path)} cannot be read: {error}") from error
    return replace(Manifest.from_json(text), path=str(path))


def remove_arena(path: Path) -> None:
    """Whoever has it mapped keeps it; its memory is free when the last of them has gone."""
    path.unlink(missing_ok=True)
    manifest_path(path).unlink(missing_ok=True)


def manifest_path(path: Path) -> Path:
    return path.with_name(path.name + MANIFEST_SUFFIX)


def _reserve(descriptor: int, num_bytes: int, folder: Path) -> None:
    """Have the whole file now: on /dev/shm, running out of room later would kill the reader."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise LoadError(f"{folder}: the expert store cannot be written: {error}") from error
        facts = os.statvfs(folder)
        free = facts.f_bavail * facts.f_frsize
        raise LoadError(
            f"{folder} has room for {free / 2**30:.1f} GiB, the experts of this model take "
            f"{num_bytes / 2**30:.1f} GiB; name another folder with expert_store_dir, or enlarge "
            "this one (mount -o remount,size=... /dev/shm)"
        ) from error


def _write(descriptor: int, content: bytes, offset: int) -> None:
    left = memoryview(content)
    while left:  # one call writes at most about 2 GiB
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.rename(partial, path)
