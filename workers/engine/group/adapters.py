"""The adapters of a group: the first rank has the others load and drop them, and use them in steps.

What travels is JSON with a folder's path, and plain arrays of numbers; each rank reads the files
itself, and keeps its part. The first rank has read and checked them before it asks the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.workers.adapters.packed import Adapter, pack_adapter
from penstock.workers.adapters.peft import read_adapter
from penstock.workers.adapters.step import StepAdapters
from penstock.workers.engine.group import wire
from penstock.workers.engine.group.peer import Peer
from penstock.workers.errors import LoadError
from penstock.workers.models.decoder import Decoder

log = logging.getLogger("penstock.engine")

Send = Callable[[int, bytes], None]  # a kind and contents


class AdapterRanks:
    """The other ranks, for the AdapterTable of the first one and its steps; as OtherRanks.

    They know an adapter by its number. The last sequence of one that was dropped, or replaced, may
    end long after that: they drop it when no object of the first rank is left.
    """

    def __init__(self, peers: Sequence[Peer], send_all: Send, num_here: int):
        """`peers`: of the other ranks, the first `num_here` of which are on this machine."""
        self._peers, self._send_all, self._num_here = peers, send_all, num_here
        self._unused: deque[int] = deque()  # filled by whichever thread lets go of an adapter

    def load(self, adapter: Adapter, folder: Path) -> Adapter:
        """As OtherRanks. One thread at a time."""
        about = {
            "number": adapter.number,
            "name": adapter.name,
            "folder": str(folder),
            "digest": adapter.digest.hex(),
        }
        self._send_all(wire.LOAD_ADAPTER, json.dumps(about).encode())
        answers = [self._answer(peer) for peer in self._peers]
        reasons = [each for each in answers if isinstance(each, str)]
        if reasons:
            self._drop([adapter.number])
            raise LoadError(reasons[0])
        loaded = replace(
            adapter, other_bytes=tuple(each for each in answers if isinstance(each, int))
        )
        weakref.finalize(loaded, self._unused.append, loaded.number).atexit = False
        return loaded

    def before_step(self, adapters: StepAdapters | None) -> None:
        """Tell the other ranks which rows of the next step have which adapter."""
        self.drop_unused()
        if adapters is not None:
            spans = [(each.number, first, end) for each, first, end in adapters.spans]
            self._send_all(wire.STEP_ADAPTERS, np.array(spans, dtype=np.int64).tobytes())

    def drop_unused(self) -> None:
        """As OtherRanks. Called before each step, and after each change."""
        numbers = []
        with contextlib.suppress(IndexError):  # there are none left; two threads may take some
            while True:
                numbers.append(self._unused.popleft())
        if numbers:
            self._drop(numbers)

    def _drop(self, numbers: Sequence[int]) -> None:
        self._send_all(wire.DROP_ADAPTERS, np.array(numbers, dtype=np.int64).tobytes())

    def _answer(self, peer: Peer) -> int | str:
        """Bytes that the adapter takes on that rank, or why it could not load it."""
        try:
            kind, contents = peer.receive()
        except wire.PeerGone as error:
            raise LoadError(
                f"rank {peer.number} of the group has ended; its log says why"
            ) from error
        if kind == wire.READY:
            return int(contents)
        reason = contents.decode(errors="replace")
        if peer.number <= self._num_here:
            return f"rank {peer.number} of the group: {reason}"
        return (
            f"rank {peer.number} of the group, on another machine: {reason} (an adapter's folder "
            "must be at the same path, with the same files, on each machine of a group)"
        )


class HeldAdapters:
    """The adapters of one of the other ranks, by number."""

    def __init__(self, model: Decoder, answer: Send):
        self._model, self._answer = model, answer
        self._adapters: dict[int, Adapter] = {}
        self._chosen: StepAdapters | None = None

    @property
    def numbers(self) -> list[int]:
        return sorted(self._adapters)

    def take(self, kind: int, contents: bytes) -> None:
        """What the first rank says, with a kind of OF_ADAPTERS."""
        if kind == wire.LOAD_ADAPTER:  # on another thread, so that steps go on meanwhile
            about = json.loads(contents)
            threading.Thread(target=self._load, args=(about,), daemon=True).start()
            return
        numbers = np.frombuffer(contents, np.int64).tolist()
        if kind == wire.STEP_ADAPTERS:
            spans = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
            self._chosen = StepAdapters(
                [(self._adapters[number], first, end) for number, first, end in spans],
                self._model.device,
            )
        else:
            for number in numbers:  # unknown ones are of adapters that this rank could not load
                self._adapters.pop(number, None)

    def of_step(self) -> StepAdapters | None:
        """Those that were chosen since the last step."""
        found, self._chosen = self._chosen, None
        return found

    def _load(self, about: dict[str, Any]) -> None:
        folder = Path(about["folder"])
        try:
            adapter = self._packed(about, folder)
        except LoadError as error:
            kind, answer = wire.FAILED, str(error)
        except Exception:
            log.exception("adapter %s could not be loaded", about["name"])
            kind, answer = wire.FAILED, f"{folder} could not be read; a worker's log says why"
        else:
            self._adapters[adapter.number] = adapter
            kind, answer = wire.READY, str(adapter.num_bytes)
        with contextlib.suppress(wire.PeerGone):  # the process ends
            self._answer(kind, answer.encode())

    def _packed(self, about: dict[str, Any], folder: Path) -> Adapter:
        model = self._model
        if model.device.type == "cuda":
            torch.cuda.set_device(model.device)  # of this thread
        file = read_adapter(folder)
        if file.digest.hex() != about["digest"]:
            raise LoadError(
                f"{folder} holds other files than the first rank has read there: copy the same "
                "adapter to each machine, and load it again"
            )
        return pack_adapter(
            about["name"], file, model.whole_config, model.device, model.adapter_part,
            about["number"],
        )  # fmt: skip
