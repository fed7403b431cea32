"""A background copier: copies lists of (source, destination) tensors, one list after another.

For loads from host memory that run while the engine steps. On CUDA the copies use their own stream.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.workers.errors import ConfigError

MEASURED_TRANSFERS = 64
PAIRS_PER_WAIT = 32  # on CUDA: copies under way before the thread waits for them

Pair = tuple[Tensor, Tensor]


class Throttle:
    """Simulates a slow host link: how long to wait until further bytes would have been sent."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic):
        if not (bytes_per_s > 0 and math.isfinite(bytes_per_s)):
            raise ConfigError(f"bytes_per_s must be positive and finite; got {bytes_per_s}")
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at_s = -math.inf

    def delay_s(self, num_bytes: int) -> float:
        """Seconds until `num_bytes` more are sent, after those before them; idle time is not
        credited."""
        now_s = self._clock()
        self._free_at_s = max(now_s, self._free_at_s) + num_bytes / self._bytes_per_s
        return self._free_at_s - now_s


class Transfer:
    """One list of copies. Once it is done, the thread no longer touches its tensors."""

    def __init__(self, pairs: Sequence[Pair]):
        self.num_pairs = len(pairs)
        self.num_done = 0  # leading pairs whose copies are complete
        self.error: BaseException | None = None
        self._pairs: Sequence[Pair] = pairs
        self._ready: torch.cuda.Event | None = None
        self._cancelled = threading.Event()
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        """Ended: complete, cancelled, or with `error`."""
        return self._done.is_set()

    @property
    def is_complete(self) -> bool:
        """Ended, and everything was copied."""
        return self.is_done and self.num_done == self.num_pairs

    def cancel(self) -> None:
        """Stop after the copies in progress. The caller must still wait until it is done."""
        self._cancelled.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done or `timeout_s` has passed; returns whether it is done."""
        return self._done.wait(timeout_s)

    def _end(self) -> None:
        self._pairs = ()  # drop the references to the owner's tensors
        self._done.set()


class CopyThread:
    """Copies the submitted lists in order. Must be closed; also a context manager.

    `bytes_per_s` slows copies down to this rate, for benchmarks and tests. `device`: of the
    destinations.
    """

    def __init__(self, *, device: torch.device | None = None, bytes_per_s: float | None = None):
        self._throttle = Throttle(bytes_per_s) if bytes_per_s is not None else None
        is_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._open: set[Transfer] = set()
        self._is_closed = False
        self._recent: deque[tuple[int, float]] = deque(maxlen=MEASURED_TRANSFERS)
        self._num_bytes = 0
        self._thread = threading.Thread(target=self._work, name="penstock-copy", daemon=True)
        self._thread.start()

    def submit(self, pairs: Sequence[Pair]) -> Transfer:
        """Copy each source into its destination. Neither may change until the transfer is done.

        On CUDA, the copies begin after the work that the current stream has queued by now.
        """
        transfer = Transfer(list(pairs))
        if self._stream is not None:
            transfer._ready = torch.cuda.Event()
            transfer._ready.record(torch.cuda.current_stream(self._stream.device))
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the copy thread is closed")
            self._open.add(transfer)
            self._queue.put(transfer)  # under the lock: never after the None that ends the thread
        return transfer

    @property
    def num_bytes(self) -> int:
        """Copied so far."""
        return self._num_bytes

    def bytes_per_s(self) -> float | None:
        """Measured over the last transfers; None before the first."""
        with self._lock:
            num_bytes = sum(count for count, _ in self._recent)
            seconds = sum(each for _, each in self._recent)
        return num_bytes / seconds if seconds > 0 else None

    def close(self) -> None:
        """Cancel all transfers and join the thread; then every transfer is done."""
        with self._lock:
            self._is_closed = True
            for transfer in self._open:
                transfer.cancel()
            self._queue.put(None)
        self._thread.join()

    def __enter__(self) -> CopyThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while (transfer := self._queue.get()) is not None:
            began_s, before = time.perf_counter(), self._num_bytes
            try:
                with torch.inference_mode():
                    self._copy_all(transfer)
            except BaseException as error:  # reported through the transfer; other transfers go on
                transfer.error = error
            with self._lock:
                self._open.discard(transfer)
                if self._num_bytes > before:
                    taken_s = time.perf_counter() - began_s
                    self._recent.append((self._num_bytes - before, taken_s))
            transfer._end()

    def _copy_all(self, transfer: Transfer) -> None:
        pairs, stream = transfer._pairs, self._stream
        if stream is None:
            for pair in pairs:
                if not self._may_go(transfer, pair):
                    return
                pair[1].copy_(pair[0])
                self._count(transfer, [pair])
            return
        assert transfer._ready is not None
        stream.wait_event(transfer._ready)
        for start in range(0, len(pairs), PAIRS_PER_WAIT):
            group = []
            try:
                with torch.cuda.stream(stream):
                    for pair in pairs[start : start + PAIRS_PER_WAIT]:
                        if not self._may_go(transfer, pair):
                            break
                        pair[1].copy_(pair[0], non_blocking=True)
                        group.append(pair)
            finally:
                stream.synchronize()  # after a failure too: no copy may still be running
            self._count(transfer, group)
            if transfer._cancelled.is_set():
                return

    def _may_go(self, transfer: Transfer, pair: Pair) -> bool:
        """Wait for the throttle; returns False as soon as the transfer is cancelled."""
        if self._throttle is None:
            return not transfer._cancelled.is_set()
        return not transfer._cancelled.wait(self._throttle.delay_s(pair[0].nbytes))

    def _count(self, transfer: Transfer, pairs: Sequence[Pair]) -> None:
        transfer.num_done += len(pairs)
        self._num_bytes += sum(source.nbytes for source, _ in pairs)
