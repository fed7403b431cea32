"""Batches that clients have created, as files: settings, progress and cancellations.

Layout: `OWNER/batches/ID/` with `spec.json` (written once, by the ingress that created the batch),
`state.json` (written by the executor alone), `cancel` (an empty file: a client has cancelled the
batch), `ended` (an empty file: the status is final), `input` (a link to the input file's content)
and the files of its run (run.py). Every ingress can answer for every batch, and an executor resumes
batches that another executor began.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock.deployments.batch.file_store import (
    PRIVATE,
    link_or_copy,
    ordered_hex,
    owner_folder,
    read_json,
    write_json,
)
from penstock.deployments.batch.run import BatchFiles

MAX_UNFINISHED = 100  # batches of one tenant
KEPT_S = 30 * 86400  # after which a batch that has ended is removed
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


class TooManyBatches(Exception):
    """One API key has as many unfinished batches as it may have."""


class BatchStatus(StrEnum):
    """As in OpenAI's API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (
            BatchStatus.FAILED,
            BatchStatus.COMPLETED,
            BatchStatus.EXPIRED,
            BatchStatus.CANCELLED,
        )


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The settings of one batch. Times are whole seconds of Unix time."""

    id: str
    principal: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_ttl_s: int = KEPT_S


@dataclass(frozen=True, slots=True)
class BatchState:
    """The progress of one batch, by its executor. `times`: when each status began."""

    status: BatchStatus = BatchStatus.VALIDATING
    times: dict[str, int] = field(default_factory=dict)
    model: str | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    tokens: dict[str, int] = field(default_factory=dict)  # the fields of TokenCounts
    cause: str = ""  # why requests are sent again at the moment, an error code
    ends_as: str = BatchStatus.COMPLETED.value  # from finalizing on

    def to(self, status: BatchStatus, **changes: Any) -> BatchState:
        """The state with another status, which begins now."""
        times = {**self.times, status.value: int(time.time())}
        return replace(self, status=status, times=times, **changes)

    @property
    def may_be_cancelled(self) -> bool:
        """Whether a cancel still changes how it ends."""
        return self.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)

    def cancelling(self, at: int) -> BatchState:
        """The state as clients see it who cancelled the batch at that Unix time."""
        times = {**self.times, BatchStatus.CANCELLING.value: at}
        return replace(self, status=BatchStatus.CANCELLING, times=times)


class BatchStore:
    """The batches of all owners below one folder. Every call may block on the disk."""

    def __init__(self, folder: Path):
        self._folder = folder

    def of(self, principal: str) -> OwnerBatches:
        """The batches of one tenant."""
        return OwnerBatches(owner_folder(self._folder, principal) / "batches")

    def all(self) -> list[StoredBatch]:
        """All batches of all owners."""
        owners = (OwnerBatches(path) for path in self._folder.glob("*/batches"))
        return [each for owner in owners for each in owner.list()]

    def unfinished(self) -> list[StoredBatch]:
        """All batches of all owners that have not ended, the oldest first."""
        owners = (OwnerBatches(path) for path in self._folder.glob("*/batches"))
        found = [each for owner in owners for each in owner.unfinished()]
        return sorted(found, key=lambda each: (each.spec.created_at, each.spec.id))

    def sweep(self) -> None:
        """Remove batches that ended KEPT_S ago, and old folders without a spec.json."""
        oldest_s = time.time() - KEPT_S
        for folder in self._folder.glob("*/batches/batch_*"):
            batch = StoredBatch.at(folder)
            ended = batch is None or batch.state().status.is_final
            if ended and folder.stat().st_mtime < oldest_s:
                shutil.rmtree(folder, ignore_errors=True)


class OwnerBatches:
    """The batches of one owner."""

    def __init__(self, folder: Path):
        self._folder = folder

    def create(self, spec: BatchSpec, content: Path) -> StoredBatch:
        """A new batch over the file at `content`. Raises TooManyBatches, or FileNotFoundError."""
        if sum(1 for _ in self.unfinished()) >= MAX_UNFINISHED:
            raise TooManyBatches(
                f"{MAX_UNFINISHED} batches are unfinished already; wait until one has ended, or "
                "cancel one"
            )
        folder = self._folder / spec.id
        folder.mkdir(mode=PRIVATE, parents=True)
        try:
            link_or_copy(content, folder / "input")
            write_json(folder / "spec.json", asdict(spec))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return StoredBatch(folder, spec)

    def get(self, batch_id: str) -> StoredBatch | None:
        return StoredBatch.at(self._folder / batch_id) if BATCH_ID.fullmatch(batch_id) else None

    def list(self) -> list[StoredBatch]:
        """The oldest first."""
        found = (StoredBatch.at(path) for path in self._folder.glob("batch_*"))
        known = [each for each in found if each is not None]
        return sorted(known, key=lambda each: (each.spec.created_at, each.spec.id))

    def unfinished(self) -> Iterator[StoredBatch]:
        for path in list(self._folder.glob("batch_*")):
            if (path / "ended").exists():
                continue  # so are most: spares reading two files of each
            batch = StoredBatch.at(path)
            if batch is not None and not batch.state().status.is_final:
                yield batch


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """The folder of one batch, and its settings."""

    folder: Path
    spec: BatchSpec

    @staticmethod
    def at(folder: Path) -> StoredBatch | None:
        """The batch in a folder; None: there is none."""
        values = read_json(folder / "spec.json")
        return None if values is None else StoredBatch(folder, BatchSpec(**values))

    @property
    def files(self) -> BatchFiles:
        """The files of its run."""
        folder = self.folder
        return BatchFiles(folder / "input", folder / "output.jsonl", folder / "errors.jsonl")

    def recorded(self) -> BatchState:
        """The state as the executor last wrote it."""
        values = read_json(self.folder / "state.json")
        if values is None:
            return BatchState()
        return BatchState(**{**values, "status": BatchStatus(values["status"])})

    def state(self) -> BatchState:
        """The recorded state; CANCELLING where a client has cancelled a batch that runs."""
        state = self.recorded()
        if state.may_be_cancelled and (at := self.cancelled_at()) is not None:
            return state.cancelling(at)
        return state

    def write(self, state: BatchState) -> None:
        """Replace the recorded state. Only the executor calls this."""
        write_json(self.folder / "state.json", asdict(state))
        if state.status.is_final:
            (self.folder / "ended").touch()

    def cancelled_at(self) -> int | None:
        """When a client first cancelled the batch, in Unix seconds; None: no client has."""
        try:
            return int((self.folder / "cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def cancel(self) -> None:
        """Have the executor end the batch. May be repeated."""
        path = self.folder / "cancel"
        if not path.exists():
            path.touch()


def new_batch_id() -> str:
    return f"batch_{ordered_hex()}"
