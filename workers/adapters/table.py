"""The adapters that one worker holds, by name: loaded, given to requests, and dropped."""

from __future__ import annotations

import itertools
import logging
import threading
from pathlib import Path
from typing import Protocol

import torch

from penstock.workers.adapters.packed import Adapter, AdapterPart, adapter_bytes, pack_adapter
from penstock.workers.adapters.peft import read_adapter
from penstock.workers.errors import LoadError
from penstock.workers.model_config import ModelConfig

log = logging.getLogger("penstock.loader")


class OtherRanks(Protocol):
    """The other ranks of a group, which hold their part of each adapter."""

    def load(self, adapter: Adapter, folder: Path) -> Adapter:
        """Have them load it; `adapter`, with what it takes there. Raises LoadError: one of them
        cannot, and none keeps it."""

    def drop_unused(self) -> None:
        """Have them drop those of which nothing is left here."""


class AdapterTable:
    """At most `most` adapters of ranks up to `max_rank`. From any thread.

    A sequence holds its adapter: one that is dropped, or replaced, computes until its last sequence
    ends, and its memory is free then.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        most: int,
        max_rank: int,
        part: AdapterPart | None = None,
        others: OtherRanks | None = None,
    ):
        """`config`: the whole model's. `part`: what this process has of it; None: all. `others`:
        of its group."""
        self._config, self._device, self._part, self._others = config, device, part, others
        self._most, self._max_rank = most, max_rank
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._adapters: dict[str, Adapter] = {}

    @property
    def reserved_bytes(self) -> int:
        """The most bytes that all adapters take on this process's device."""
        return self._most * adapter_bytes(self._config, self._max_rank, self._part)

    @property
    def num_bytes(self) -> int:
        """Bytes that those take there that are loaded."""
        return sum(each.num_bytes for each in self._adapters.values())

    @property
    def total_bytes(self) -> int:
        """The same on all ranks of a group together."""
        return sum(self.rank_bytes)

    @property
    def rank_bytes(self) -> list[int]:
        """The same on each rank; of a process alone, one number."""
        loaded = list(self._adapters.values())  # another thread may be loading one
        each = [(adapter.num_bytes, *adapter.other_bytes) for adapter in loaded]
        return [sum(of_rank) for of_rank in zip(*each, strict=True)]

    @property
    def names(self) -> list[str]:
        return sorted(self._adapters)

    def find(self, name: str) -> Adapter | None:
        return self._adapters.get(name)

    def load(self, name: str, folder: str) -> Adapter:
        """Read the adapter in `folder`, and serve it as `name`, in place of one of that name.

        Raises LoadError: it is no adapter for this model, there is no room for it, or another rank
        of the group cannot load it. Nothing has changed then.
        """
        path = Path(folder).expanduser().absolute()
        file = read_adapter(path)
        if file.rank > self._max_rank:
            raise LoadError(
                f"{folder} has rank {file.rank}, and max_lora_rank is {self._max_rank}: raise it"
            )
        with self._lock:
            if name not in self._adapters and len(self._adapters) >= self._most:
                raise LoadError(
                    f"max_loras: {self._most} adapters are loaded ({', '.join(self.names)}), and "
                    "no more may be: unload one, or raise max_loras"
                )
            adapter = pack_adapter(
                name, file, self._config, self._device, self._part, next(self._numbers)
            )
            if self._others is not None:
                adapter = self._others.load(adapter, path)
            self._adapters = {**self._adapters, name: adapter}
            self._drop_unused()
        log.info("adapter %s: rank %d, %d bytes, %s", name, file.rank, adapter.num_bytes, folder)
        return adapter

    def unload(self, name: str) -> bool:
        """Drop it; requests that have it end with it. False: there is none of that name."""
        with self._lock:
            is_there = name in self._adapters
            self._adapters = {each: of for each, of in self._adapters.items() if each != name}
            self._drop_unused()
        return is_there

    def _drop_unused(self) -> None:
        if self._others is not None:
            self._others.drop_unused()
