"""The expert store: one actor a node that holds the experts of a MoE model, once, in shared memory.

It writes the expert file, publishes its manifest, and collects the workers' statistics. No worker
calls it while it computes: each maps the file and copies from it, so workers keep serving when the
store dies. `ExpertStore` is a plain class, `StoreActor` its Ray actor; client.py calls it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from penstock.deployments.experts.spec import HotExpert, StoreSpec, app_folder
from penstock.workers.errors import LoadError
from penstock.workers.experts.checkpoint import CheckpointExperts
from penstock.workers.experts.expert_file import Bytes, ExpertFile, Manifest, RowIndices
from penstock.workers.experts.packed import PackedExperts
from penstock.workers.experts.writer import read_manifest, remove_expert_file, write_expert_file
from penstock.workers.models.loader import open_model
from penstock.workers.quantization import check_neurons, weight_plan
from penstock.workers.stats import ExpertStats
from penstock.workers.weights.hub import resolve_model
from penstock.workers.weights.sources import DTYPES

log = logging.getLogger("penstock.experts")

RELOAD_PAUSE_S = 10.0  # between two automatic reloads
START_S = 600.0  # longest from a worker's request for the manifest to its first heartbeat


@dataclass(frozen=True, slots=True)
class StoreView:
    """The figures that a store reports about itself."""

    epoch: int
    num_bytes: int
    num_loads: int  # times that the checkpoint was read; a restart that finds its file reads none
    num_workers: int
    num_packed_bytes: int
    num_corrupted: int  # loads with damaged bytes that workers reported
    pid: int


class ExpertStore:
    """The store itself. Calls may come from several threads; `clock` gives monotonic seconds."""

    def __init__(self, spec: StoreSpec, clock: Callable[[], float] = time.monotonic):
        self._spec = spec
        self._clock = clock
        self._folder = app_folder(spec.folder, spec.app_name)
        self._file: ExpertFile | None = None  # replaced as a whole
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # guards what follows
        self._last_heartbeat_s: dict[int, float] = {}  # when, by worker
        self._hot: dict[int, Sequence[HotExpert]] = {}
        self._corrupted: dict[int, int] = {}
        self._starting: list[float] = []  # when workers got the manifest that sent no heartbeat yet
        self._created_s = clock()
        self._num_loads = self._num_packed_bytes = 0
        self._last_reload_s = -RELOAD_PAUSE_S

    def manifest_for_start(self) -> Manifest:
        """`manifest`, for a worker that starts: the store waits for its first heartbeat."""
        manifest = self.manifest()
        with self._lock:
            self._starting.append(self._clock())
        return manifest

    def manifest(self) -> Manifest:
        """The manifest of the expert file. The first call writes the file, or reuses the one that
        an earlier incarnation of this store wrote.

        Raises LoadError or ConfigError, as loading does.
        """
        if self._file is None:
            with self._loading:
                if self._file is None:
                    self._file = self._found() or self._load(epoch=1)
        return self._file.manifest

    def reload(self) -> Manifest:
        """Write the expert file again from the checkpoint, under the next epoch.

        Workers switch to it at their next heartbeat, and keep the old file mapped until then.
        """
        old = self.manifest()
        with self._loading:
            assert self._file is not None
            if self._file.manifest.epoch == old.epoch:  # no other thread has reloaded it meanwhile
                self._file = self._load(epoch=old.epoch + 1)
                remove_expert_file(Path(old.path))
            return self._file.manifest

    def heartbeat(self, worker: int, stats: ExpertStats, hot: Sequence[HotExpert]) -> int:
        """Receive a worker's cache statistics; returns the epoch that it should use.

        If the worker found damaged bytes, the expert file is written again.
        """
        manifest = self.manifest()
        with self._lock:
            if worker not in self._last_heartbeat_s and self._starting:
                del self._starting[0]
            self._last_heartbeat_s[worker] = self._clock()
            self._hot[worker] = hot
            grew = stats.num_corrupted > self._corrupted.get(worker, 0)
            self._corrupted[worker] = stats.num_corrupted
            is_due = self._clock() - self._last_reload_s >= RELOAD_PAUSE_S
            if grew and is_due and stats.epoch == manifest.epoch:
                self._last_reload_s = self._clock()
                log.error("experts of epoch %d are damaged; reloading them", manifest.epoch)
                threading.Thread(target=self._reload_quietly, daemon=True).start()
        return manifest.epoch

    def hints(self) -> list[tuple[int, int]]:
        """The experts that workers used most, the hottest first: to warm a new worker's cache."""
        total: dict[tuple[int, int], int] = {}
        with self._lock:
            for layer, expert, count in (each for hot in self._hot.values() for each in hot):
                total[layer, expert] = total.get((layer, expert), 0) + count
        return sorted(total, key=lambda key: -total[key])

    def pack(self, requests: Sequence[tuple[int, int, RowIndices]]) -> Bytes:
        """The rows of each (layer, expert, rows), concatenated as bytes. For nodes that cannot map
        the expert file: one call for many experts. Raises CorruptedExpert."""
        parts = [rows.reshape(-1) for rows in self._open_file().gather(requests)]
        packed = np.concatenate([np.empty(0, dtype=np.uint8), *parts])
        with self._lock:
            self._num_packed_bytes += packed.nbytes
        return packed

    def view(self) -> StoreView:
        manifest = self.manifest()
        with self._lock:
            return StoreView(
                epoch=manifest.epoch,
                num_bytes=manifest.num_bytes,
                num_loads=self._num_loads,
                num_workers=sum(t > self._clock() - 10.0 for t in self._last_heartbeat_s.values()),
                num_packed_bytes=self._num_packed_bytes,
                num_corrupted=sum(self._corrupted.values()),
                pid=os.getpid(),
            )

    def idle_s(self) -> float:
        """Seconds since the last heartbeat of any worker, or the start; 0 while one starts."""
        now_s = self._clock()
        with self._lock:
            self._starting = [each for each in self._starting if now_s - each < START_S]
            if self._starting or self._loading.locked():
                return 0.0
            return now_s - max(self._last_heartbeat_s.values(), default=self._created_s)

    def remove(self) -> None:
        """Unlink the file; its memory is freed when the last worker unmaps it."""
        with self._loading:
            if self._file is not None:
                remove_expert_file(Path(self._file.manifest.path))

    def _open_file(self) -> ExpertFile:
        self.manifest()
        assert self._file is not None
        return self._file

    def _experts(self) -> tuple[CheckpointExperts, Any]:
        spec = self._spec
        model = resolve_model(spec.model, spec.revision, spec.download_dir)
        folder, config, tensors = open_model(str(model), spec.weights, spec.device)
        weight_plan(config.stored_scheme, spec.weights)
        if spec.copies:
            is_same, who = spec.copies == spec.weights, f"an expert store with {spec.copies} copies"
            check_neurons(config.stored_scheme, spec.weights, who, has_copies=is_same)
        experts = CheckpointExperts(folder, config, tensors, spec.weights, spec.device, spec.int4)
        return experts, DTYPES[config.dtype]

    def _found(self) -> ExpertFile | None:
        """The file that an earlier incarnation of this store wrote from the same checkpoint; other
        files are removed."""
        experts, compute = self._experts()
        identity, found = experts.identity(compute, self._spec.copies), None
        for path in sorted(self._folder.glob(f"{self._spec.digest}-*.experts"), key=_epoch_of):
            try:
                manifest = read_manifest(path)
                if manifest.checkpoint != identity:
                    raise LoadError(f"{path} was made from other files")
                if experts.is_packed:
                    PackedExperts(experts, compute).check(manifest)
                expert_file = ExpertFile(manifest)
            except LoadError as error:
                log.info("removing an older expert file: %s", error)
                remove_expert_file(path)
                continue
            if found is not None:
                remove_expert_file(Path(found.manifest.path))
            found = expert_file
        return found

    def _load(self, epoch: int) -> ExpertFile:
        experts, compute = self._experts()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.geteuid():
            raise LoadError(
                f"{self._folder} belongs to another user; name another folder with expert_store_dir"
            )
        path = self._folder / f"{self._spec.digest}-{epoch}.experts"
        began_s = time.monotonic()
        spec = self._spec
        manifest = write_expert_file(
            experts, path, compute, epoch=epoch, copies=spec.copies, shares=spec.shares
        )
        self._num_loads += 1
        log.info(
            "wrote %d experts, %.2f GiB, to shared memory in %.1f s: %s",
            manifest.num_all,
            manifest.num_bytes / 2**30,
            time.monotonic() - began_s,
            path,
        )
        return ExpertFile(manifest)

    def _reload_quietly(self) -> None:
        try:
            self.reload()
        except (LoadError, OSError) as error:
            log.error("the experts could not be reloaded: %s", error)


class StoreActor(ExpertStore):
    """A store that ends, and frees its memory, after `spec.idle_s` without a heartbeat.

    While it runs, Ray does not count its node as idle, and an autoscaler keeps the node. The next
    worker that starts there makes a new store.
    """

    def __init__(self, spec: StoreSpec):
        logging.basicConfig(level=logging.INFO)
        super().__init__(spec)
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def node(self) -> str:
        """The node on which the file lies."""
        return ray.get_runtime_context().get_node_id()

    def _end_when_idle(self) -> None:
        num_idle = 0
        while num_idle < 2:  # in two looks: a process that was suspended reads its messages first
            time.sleep(self._spec.idle_s / 20)
            num_idle = num_idle + 1 if self.idle_s() >= self._spec.idle_s else 0
        log.info("no worker has sent a heartbeat for %g s: this store ends", self._spec.idle_s)
        self.remove()
        me = ray.get_runtime_context().current_actor
        ray.kill(me, no_restart=True)  # else Ray would restart it


def _epoch_of(path: Path) -> int:
    text = path.stem.rpartition("-")[2]
    return int(text) if text.isdigit() else 0
