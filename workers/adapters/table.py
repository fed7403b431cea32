"""The adapters that one worker holds, by name: loaded, given to requests, and dropped."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import torch

from penstock.workers.adapters.packed import Adapter, adapter_bytes, pack_adapter
from penstock.workers.adapters.peft import read_adapter
from penstock.workers.errors import LoadError
from penstock.workers.model_config import ModelConfig

log = logging.getLogger("penstock.loader")


class AdapterTable:
    """At most `most` adapters of ranks up to `max_rank`. From any thread.

    A sequence holds its adapter: one that is dropped, or replaced, computes until its last sequence
    ends, and its memory is free then.
    """

    def __init__(self, config: ModelConfig, device: torch.device, most: int, max_rank: int):
        self._config, self._device = config, device
        self._most, self._max_rank = most, max_rank
        self._lock = threading.Lock()
        self._adapters: dict[str, Adapter] = {}

    @property
    def reserved_bytes(self) -> int:
        """The most bytes that all adapters take on the device."""
        return self._most * adapter_bytes(self._config, self._max_rank)

    @property
    def num_bytes(self) -> int:
        """Bytes that those take that are loaded."""
        return sum(each.num_bytes for each in self._adapters.values())

    @property
    def names(self) -> list[str]:
        return sorted(self._adapters)

    def find(self, name: str) -> Adapter | None:
        return self._adapters.get(name)

    def load(self, name: str, folder: str) -> Adapter:
        """Read the adapter in `folder`, and serve it as `name`, in place of one of that name.

        Raises LoadError: it is no adapter for this model, or there is no room for it.
        """
        file = read_adapter(Path(folder).expanduser())
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
            adapter = pack_adapter(name, file, self._config, self._device)
            self._adapters = {**self._adapters, name: adapter}
        log.info("adapter %s: rank %d, %d bytes, %s", name, file.rank, adapter.num_bytes, folder)
        return adapter

    def unload(self, name: str) -> bool:
        """Drop it; requests that have it end with it. False: there is none of that name."""
        with self._lock:
            left = dict(self._adapters)
            found = left.pop(name, None)
            self._adapters = left
        return found is not None
