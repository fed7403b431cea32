"""The expert copier: a thread that copies rows of experts from host memory into slots.

Rows are copied in chunks: gathered into a staging buffer, copied once, and written to the slot.
Demand loads go before prefetches, and begin at the next chunk. On a GPU the staging buffer is
pinned, and copies have a stream of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from penstock.workers.errors import StoreUnavailable
from penstock.workers.experts.expert_file import (
    Bytes,
    CorruptedExpert,
    Manifest,
    RowIndices,
    RowSource,
)
from penstock.workers.experts.layouts import ExpertLayout
from penstock.workers.experts.slots import SlotLoad
from penstock.workers.experts.transfer_meter import TransferCounts
from penstock.workers.memory.copier import Throttle

log = logging.getLogger("penstock.experts")

CHUNK_BYTES = 512 * 1024  # the most that a demand load waits for
CHECK_S = 5.0  # interval between checks that the thread is alive, while waiting for it


@dataclass(slots=True)
class ExpertCopier:
    """Queues of loads, and the thread that works them off. `changed` is the cache's lock: callers
    hold it."""

    source: RowSource
    facts: Manifest  # of the rows
    layout: ExpertLayout
    changed: threading.Condition
    bytes_per_s: float | None = None  # slows copies down to this rate, for benchmarks and tests
    chunk_bytes: int = CHUNK_BYTES
    on_idle: Callable[[], None] = lambda: None  # called when no load is queued, with the lock held
    counts: TransferCounts = field(default_factory=TransferCounts)
    _demands: deque[SlotLoad] = field(default_factory=deque)
    _prefetches: deque[SlotLoad] = field(default_factory=deque)
    _thread: threading.Thread | None = None

    def submit(self, load: SlotLoad) -> None:
        """Queue a load; `changed` is notified whenever a load has ended."""
        assert load.slot.load is None
        load.slot.load, load.slot.error = load, None
        (self._demands if load.is_demand else self._prefetches).append(load)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="penstock-experts", daemon=True)
            self._thread.start()
        self.changed.notify_all()

    def promote(self, load: SlotLoad, missing: RowIndices) -> None:
        """Make `load` a demand load of the rows `missing` alone, after the chunk in progress.

        `missing`: at least one row that is not present.
        """
        load.is_cancelled = False
        begun = load.row_indices[: load.num_done + load.num_active]
        load.row_indices = np.concatenate([begun, missing[~np.isin(missing, begun)]])
        if not load.is_demand:
            self._prefetches.remove(load)
            load.is_demand = True
            self._demands.append(load)

    def cancel(self, load: SlotLoad) -> None:
        """Stop `load` after the chunk in progress; at once if there is none."""
        load.is_cancelled = True
        if not load.num_active:
            self._end(load)

    @property
    def prefetches(self) -> list[SlotLoad]:
        return list(self._prefetches)

    @property
    def is_busy(self) -> bool:
        return bool(self._demands or self._prefetches)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until something has changed. Raises RuntimeError if the thread has died."""
        if not self.changed.wait(CHECK_S) and not self.is_alive:
            raise RuntimeError("the thread that loads experts has died")

    def close(self) -> threading.Thread | None:
        """Cancel all loads and stop the thread, which the caller joins without the lock.

        The next `submit` starts another thread.
        """
        for load in [*self._demands, *self._prefetches]:
            self.cancel(load)
        self.changed.notify_all()
        thread, self._thread = self._thread, None
        return thread

    def _end(self, load: SlotLoad) -> None:
        (self._demands if load.is_demand else self._prefetches).remove(load)
        load.slot.load = None
        load.slot.ended()
        self.changed.notify_all()

    def _work(self) -> None:
        buffers = StagingBuffers(self)
        me = threading.current_thread()
        while True:
            with self.changed:
                while not self.is_busy or self._thread is not me:
                    if self._thread is not me:
                        return
                    self.on_idle()
                    if not self.is_busy:
                        self.changed.wait()
                source = self.source
                parts = self._next_parts(buffers, source.is_remote)
            if source.is_remote:
                self._fetch(buffers, source, parts)
                continue
            load, part = parts[0]
            self._do(load, part, lambda: buffers.copy(source.rows(*load.key), part, load))  # noqa: B023

    def _next_parts(
        self, buffers: StagingBuffers, is_remote: bool
    ) -> list[tuple[SlotLoad, RowIndices]]:
        """The next chunks: one of the first load; for a remote source, one of each queued load."""
        loads = list(self._demands or self._prefetches)
        parts = []
        for load in loads if is_remote else loads[:1]:
            part = load.row_indices[load.num_done : load.num_done + buffers.rows_at_once(load)]
            load.num_active = len(part)
            parts.append((load, part))
        return parts

    def _fetch(
        self, buffers: StagingBuffers, source: RowSource, parts: list[tuple[SlotLoad, RowIndices]]
    ) -> None:
        """Fetch all parts with one call, then unpack each."""
        began_s = time.perf_counter()
        found: list[Bytes] | Exception
        try:
            found = source.gather([(*load.key, np.sort(part)) for load, part in parts])
        except Exception as met:
            found = met
        seconds = (time.perf_counter() - began_s) / len(parts)
        for i, (load, part) in enumerate(parts):

            def unpack(i: int = i, load: SlotLoad = load, part: RowIndices = part) -> None:
                if isinstance(found, Exception):
                    raise found
                buffers.unpack(found[i], np.sort(part), load)

            self._do(load, part, unpack, seconds)

    def _do(
        self, load: SlotLoad, part: RowIndices, copy: Callable[[], None], before_s: float = 0.0
    ) -> None:
        """Run `copy` and record the result; `before_s` were spent on it already."""
        began_s, error = time.perf_counter(), None
        try:
            copy()
        except Exception as met:  # raised where the expert is waited for; other loads go on
            if not isinstance(met, StoreUnavailable):  # its client has logged that once
                log.error("layer %d, expert %d cannot be loaded: %s", *load.key, met)
            error = met
        with self.changed:
            self._account(load, part, before_s + time.perf_counter() - began_s, error)

    def _account(
        self, load: SlotLoad, part: RowIndices, seconds: float, error: Exception | None
    ) -> None:
        load.num_active = 0
        load.slot.error = error
        self.counts.busy_s += seconds
        self.counts.demand_busy_s += seconds * load.is_demand
        if error is None:
            load.num_done += len(part)
            load.slot.arrived(part)
            num_bytes = len(part) * self.facts.row_bytes_of(load.key[1])
            if load.is_demand:
                self.counts.demand_bytes += num_bytes
            else:
                self.counts.prefetch_bytes += num_bytes
        elif isinstance(error, CorruptedExpert) and (error.layer, error.expert) == load.key:
            self.counts.num_corrupted += 1
        if error is not None or load.is_cancelled or load.num_done == len(load.row_indices):
            self._end(load)


class StagingBuffers:
    """The host and device staging buffers of one copier thread."""

    def __init__(self, copier: ExpertCopier):
        self._copier = copier
        most = max(map(copier.facts.row_bytes_of, (0, copier.facts.num_known - 1)))
        shape = (max(most, copier.chunk_bytes),)
        device = copier.layout.device
        is_cuda = device.type == "cuda"
        self._throttle = None if copier.bytes_per_s is None else Throttle(copier.bytes_per_s)
        self._device_bytes = torch.empty(shape, dtype=torch.uint8, device=device)
        self._host_bytes = (
            torch.empty(shape, dtype=torch.uint8, pin_memory=True)
            if is_cuda
            else (
                self._device_bytes  # on a CPU, gathering the rows is the copy
            )
        )
        self._stream = torch.cuda.Stream(device) if is_cuda else None

    def rows_at_once(self, load: SlotLoad) -> int:
        """Rows of a chunk."""
        return max(1, self._copier.chunk_bytes // self._copier.facts.row_bytes_of(load.key[1]))

    def copy(self, rows: Bytes, part: RowIndices, load: SlotLoad) -> None:
        """Copy the rows `part` of `rows` into their slot; done when it returns."""
        part = np.sort(part)  # memory is read in ascending order, whatever the priorities
        gathered, until_s = self._staging(len(part), rows.shape[1])
        first = int(part[0])
        if int(part[-1]) - first + 1 == len(part):  # neighbours
            np.copyto(gathered.numpy(), rows[first : first + len(part)])
        else:
            np.take(rows, part, axis=0, out=gathered.numpy(), mode="clip")
        self._send(gathered, part, load, until_s)

    def unpack(self, rows: Bytes, part: RowIndices, load: SlotLoad) -> None:
        """As `copy`, where `rows` holds only the rows `part`, in ascending order."""
        gathered, until_s = self._staging(*rows.shape)
        np.copyto(gathered.numpy(), rows)
        self._send(gathered, part, load, until_s)

    def _staging(self, num_rows: int, row_bytes: int) -> tuple[Tensor, float]:
        """Staging memory for rows, and the time at which a simulated link would have sent them."""
        num_bytes = num_rows * row_bytes
        wait_s = 0.0 if self._throttle is None else self._throttle.delay_s(num_bytes)
        return self._host_bytes[:num_bytes].view(num_rows, row_bytes), time.monotonic() + wait_s

    @torch.inference_mode()
    def _send(self, gathered: Tensor, part: RowIndices, load: SlotLoad, until_s: float) -> None:
        slot, num_bytes = load.slot, gathered.numel()
        if self._stream is None:
            self._write(gathered, part, load)
        else:
            with torch.cuda.stream(self._stream):
                if slot.last_use is not None:
                    self._stream.wait_event(slot.last_use)
                arrived = self._device_bytes[:num_bytes].view(len(part), -1)
                arrived.copy_(gathered, non_blocking=True)
                self._write(arrived, part, load)
            self._stream.synchronize()
        if (left_s := until_s - time.monotonic()) > 0:
            time.sleep(left_s)

    def _write(self, arrived: Tensor, part: RowIndices, load: SlotLoad) -> None:
        is_copy = self._copier.facts.is_copy(load.key[1])
        load.slot.write(self._copier.layout, arrived, part, is_copy)
