"""The expert store: one actor a node that holds the experts of a MoE model, once, in shared memory.

It writes the arena, says where it is, and gathers what workers tell of it. No worker asks it while
it computes: each maps the file and copies for itself, so that a store which dies takes nothing
along. `ExpertStore` is a plain class, `StoreActor` what Ray runs of it; expert_link.py reaches it.
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

from penstock.deployments.experts.spec import Hot, StoreSpec, app_folder
from penstock.workers.errors import LoadError
from penstock.workers.experts.checkpoint import CheckpointExperts
from penstock.workers.experts.expert_file import Arena, Bytes, Manifest, Places
from penstock.workers.experts.packed import PackedExperts
from penstock.workers.experts.writer import read_manifest, remove_arena, write_arena
from penstock.workers.models.loader import open_model
from penstock.workers.quantization import check_neurons, weight_plan
from penstock.workers.stats import ExpertStats
from penstock.workers.weights.sources import DTYPES

log = logging.getLogger("penstock.experts")

RELOAD_PAUSE_S = 10.0  # between two reloads that nobody asked for
IDLE_S = 600.0  # heard of no worker for so long, a store frees its memory and ends


@dataclass(frozen=True, slots=True)
class StoreView:
    """A store as it told about itself."""

    epoch: int
    num_bytes: int
    num_loads: int  # times that the checkpoint was read; a restart that finds its file reads none
    num_workers: int
    num_packed_bytes: int
    num_corrupted: int  # loads that workers told of because bytes did not match
    pid: int


class ExpertStore:
    """The store itself. Calls may come from several threads; `clock` gives monotonic seconds."""

    def __init__(self, spec: StoreSpec, clock: Callable[[], float] = time.monotonic):
        self._spec = spec
        self._clock = clock
        self._folder = app_folder(spec.folder, spec.app_name)
        self._arena: Arena | None = None  # replaced as a whole
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # guards what follows
        self._heard: dict[int, float] = {}  # when, by worker
        self._hot: dict[int, Sequence[Hot]] = {}
        self._corrupted: dict[int, int] = {}
        self._num_loads = self._num_packed_bytes = 0
        self._last_reload_s = -RELOAD_PAUSE_S

    def manifest(self) -> Manifest:
        """Where the experts are. The first call loads them, or finds what an earlier life left.

        Raises LoadError or ConfigError, as loading does.
        """
        if self._arena is None:
            with self._loading:
                if self._arena is None:
                    self._arena = self._found() or self._load(epoch=1)
        return self._arena.manifest

    def reload(self) -> Manifest:
        """Write the arena anew from the checkpoint, under the next epoch.

        Workers change over at their next beat; those that hold the old file keep it until then.
        """
        old = self.manifest()
        with self._loading:
            assert self._arena is not None
            if self._arena.manifest.epoch == old.epoch:  # nobody else was faster
                self._arena = self._load(epoch=old.epoch + 1)
                remove_arena(Path(old.path))
            return self._arena.manifest

    def beat(self, worker: int, stats: ExpertStats, hot: Sequence[Hot]) -> int:
        """Hear how a worker's cache does; the epoch that it should use.

        Where it met bytes that do not match their digest, the arena is written anew.
        """
        manifest = self.manifest()
        with self._lock:
            self._heard[worker] = self._clock()
            self._hot[worker] = hot
            grew = stats.num_corrupted > self._corrupted.get(worker, 0)
            self._corrupted[worker] = stats.num_corrupted
            is_due = self._clock() - self._last_reload_s >= RELOAD_PAUSE_S
            if grew and is_due and stats.epoch == manifest.epoch:
                self._last_reload_s = self._clock()
                log.error("experts of epoch %d are damaged; reading them again", manifest.epoch)
                threading.Thread(target=self._reload_quietly, daemon=True).start()
        return manifest.epoch

    def hints(self) -> list[tuple[int, int]]:
        """The experts that workers needed most, the hottest first: to warm a new worker's cache."""
        total: dict[tuple[int, int], int] = {}
        with self._lock:
            for layer, expert, count in (each for hot in self._hot.values() for each in hot):
                total[layer, expert] = total.get((layer, expert), 0) + count
        return sorted(total, key=lambda key: -total[key])

    def pack(self, wanted: Sequence[tuple[int, int, Places]]) -> Bytes:
        """Rows, one behind the other, as bytes: of each (layer, expert, rows). For nodes
        that cannot map the arena: one call for many experts. Raises CorruptedExpert."""
        parts = [rows.reshape(-1) for rows in self._arena_now().gather(wanted)]
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
                num_workers=sum(t > self._clock() - 10.0 for t in self._heard.values()),
                num_packed_bytes=self._num_packed_bytes,
                num_corrupted=sum(self._corrupted.values()),
                pid=os.getpid(),
            )

    def idle_s(self) -> float:
        """Since a worker was heard of last; 0 before the first one."""
        with self._lock:
            return self._clock() - max(self._heard.values(), default=self._clock())

    def remove(self) -> None:
        """Have the file gone; its memory is free when the last worker has let go of it."""
        with self._loading:
            if self._arena is not None:
                remove_arena(Path(self._arena.manifest.path))

    def _arena_now(self) -> Arena:
        self.manifest()
        assert self._arena is not None
        return self._arena

    def _experts(self) -> tuple[CheckpointExperts, Any]:
        spec = self._spec
        folder, config, tensors = open_model(spec.model, spec.weights, spec.device)
        weight_plan(config.stored_scheme, spec.weights)
        if spec.has_twins:
            check_neurons(config.stored_scheme, spec.weights, "moe_mode quantized")
        experts = CheckpointExperts(folder, config, tensors, spec.weights, spec.device)
        return experts, DTYPES[config.dtype]

    def _found(self) -> Arena | None:
        """What an earlier life of this store wrote, of the same files; others are removed."""
        experts, compute = self._experts()
        identity, found = experts.identity(compute, self._spec.has_twins), None
        for path in sorted(self._folder.glob(f"{self._spec.digest}-*.arena"), key=_epoch_of):
            try:
                manifest = read_manifest(path)
                if manifest.checkpoint != identity:
                    raise LoadError(f"{path} is of other files")
                if experts.is_packed:
                    PackedExperts(experts, compute).check(manifest)
                arena = Arena(manifest)
            except LoadError as error:
                log.info("an older arena is of no use: %s", error)
                remove_arena(path)
                continue
            if found is not None:
                remove_arena(Path(found.manifest.path))
            found = arena
        return found

    def _load(self, epoch: int) -> Arena:
        experts, compute = self._experts()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.geteuid():
            raise LoadError(
                f"{self._folder} belongs to somebody else; name another folder with "
                "expert_store_dir"
            )
        path = self._folder / f"{self._spec.digest}-{epoch}.arena"
        began_s = time.monotonic()
        manifest = write_arena(experts, path, compute, epoch=epoch, has_twins=self._spec.has_twins)
        self._num_loads += 1
        log.info(
            "%d experts, %.2f GiB, in shared memory after %.1f s: %s",
            manifest.num_all,
            manifest.num_bytes / 2**30,
            time.monotonic() - began_s,
            path,
        )
        return Arena(manifest)

    def _reload_quietly(self) -> None:
        try:
            self.reload()
        except (LoadError, OSError) as error:
            log.error("the experts could not be read again: %s", error)


class StoreActor(ExpertStore):
    """A store that ends, and frees its memory, when no worker has been heard of for long."""

    def __init__(self, spec: StoreSpec):
        logging.basicConfig(level=logging.INFO)
        super().__init__(spec)
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def node(self) -> str:
        """Where its file lies."""
        return ray.get_runtime_context().get_node_id()

    def _end_when_idle(self) -> None:
        while self.idle_s() < IDLE_S:
            time.sleep(IDLE_S / 20)
        self.remove()
        me = ray.get_runtime_context().current_actor
        ray.kill(me, no_restart=True)


def _epoch_of(path: Path) -> int:
    text = path.stem.rpartition("-")[2]
    return int(text) if text.isdigit() else 0
