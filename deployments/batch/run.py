"""A batch from file to file: check the input, run or resume it, and write the results.

Files beside OUTPUT: `OUTPUT.state` (identity of the run), and while the run lasts `OUTPUT.lease`
(the process that runs it) and `OUTPUT.part` (results so far). At the end the results are sorted
into OUTPUT and the error file, each of which gets its name only when it is complete; then the state
records the end, and the part file is removed. A process may be killed at any point of this: the
same call resumes the run. Each owner of the lease has a part file of its own: one that has lost the
lease without knowing it yet writes to a file that no other process reads.
"""

from __future__ import annotations

import asyncio
import glob
import os
import secrets
import shutil
from collections.abc import Collection
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.deployments.batch.lease import Lease, LeaseLost
from penstock.deployments.batch.lines import check_input
from penstock.deployments.batch.part_file import ERROR, OUTPUT, PartFile, TokenCounts, sync_folder
from penstock.deployments.batch.runner import Progress, Runner, RunSettings
from penstock.deployments.batch.state import Identity, RunState, StateError
from penstock.deployments.batch.target import Target


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """The files of a batch."""

    input: Path
    output: Path
    errors: Path

    @property
    def state(self) -> Path:
        """Identity of the run; also the file that processes lock to acquire the lease."""
        return self.output.with_name(f"{self.output.name}.state")

    @property
    def lease(self) -> Path:
        return self.output.with_name(f"{self.output.name}.lease")

    @property
    def part(self) -> Path:
        return self.output.with_name(f"{self.output.name}.part")


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures of a finished run. `ended`: None, or results.EXPIRED or results.CANCELLED."""

    ended: str | None
    num_output: int
    num_errors: int
    tokens: TokenCounts


class BatchRun:
    """A checked input, and from `begin` on its run on disk. A context manager that closes both."""

    def __init__(self, files: BatchFiles, *, model: str, models: Collection[str] | None = None):
        """Check the input; writes nothing. `model`: part of the run's identity.

        `models`: as for check_input. Raises InputError or OSError.
        """
        self.files = files
        self.run_seed = 0
        self._model = model
        self._state: RunState | None = None
        self._part: PartFile | None = None
        with ExitStack() as opened:
            self._file = opened.enter_context(open(files.input, "rb"))
            self.summary = check_input(self._file, models=models)
            self._opened = opened.pop_all()

    def begin(self, lease: Lease, *, run_seed: int | None = None, restart: bool = False) -> None:
        """Begin a run, or resume the one on disk. `lease`: held until this object is closed.

        `run_seed` None: that of the run on disk, or a random one. `restart`: discard an earlier
        run. Raises StateError, LockError or OSError.
        """
        self._lease = lease
        with lease.commit():
            self._state = self._opened.enter_context(closing(RunState(self.files.state)))
            self.run_seed = self._identify(self._state, run_seed, restart)
        if self._state.finished is None:
            self._part = self._opened.enter_context(closing(self._own_part()))

    def __enter__(self) -> BatchRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._opened.close()

    @property
    def finished(self) -> RunFigures | None:
        """The figures of a finished run, else None."""
        values = None if self._state is None else self._state.finished
        if values is None:
            return None
        return RunFigures(**{**values, "tokens": TokenCounts(**values["tokens"])})

    @property
    def num_done(self) -> int:
        """The number of lines with a result."""
        return 0 if self._part is None else len(self._part)

    def progress(self) -> Progress:
        """Counts at this point, for `run` to renew."""
        progress = Progress(self.summary.num_lines)
        if self._part is not None:
            progress.num_completed = self._part.num_completed
            progress.num_failed = self._part.num_failed
            progress.tokens = self._part.tokens
        return progress

    async def run(
        self,
        target: Target,
        settings: RunSettings,
        progress: Progress,
        cancelled: asyncio.Event | None = None,
    ) -> str | None:
        """Run the unfinished lines and write the results; how the run ended, as in RunFigures.

        Raises TargetError, LockError or OSError; lines that are done by then are kept.
        """
        assert self._part is not None, "the run is not begun, or finished"
        settings = replace(settings, run_seed=self.run_seed)
        runner = Runner(self._file, self._part, target, settings, progress)
        ended = await runner.run(cancelled)
        await asyncio.to_thread(self._finish, ended)
        return ended

    def _identify(self, state: RunState, run_seed: int | None, restart: bool) -> int:
        """Record the identity of the run, or compare it with the recorded one; the run's seed."""
        files = self.files
        before = state.identity
        if restart:
            state.discard()
            files.part.unlink(missing_ok=True)
            before = None
        elif before is None and files.output.exists():
            raise StateError(
                f"{files.output} exists and is not the output of a batch; choose another name, or "
                "have it replaced with --restart"
            )
        if run_seed is None:
            run_seed = secrets.randbits(62) if before is None else before.run_seed
        identity = Identity(self.summary.sha256, self._model, run_seed)
        if before is None:
            files.part.unlink(missing_ok=True)  # of a run whose state was never written
            state.begin(identity)
        elif (difference := before.difference(identity)) is not None:
            raise StateError(
                f"{files.output} belongs to a run with {difference}; choose another output, or "
                "discard that run with --restart"
            )
        if state.finished is not None:
            self._remove_part_files()  # of an owner that was killed before it had removed them
        return run_seed

    def _own_part(self) -> PartFile:
        """A part file of this owner, with the records of earlier owners."""
        part, own = self.files.part, self._unfinished(self.files.part)
        if part.exists():
            shutil.copyfile(part, own)
        copied = PartFile(own)
        try:
            copied.sync()
            with self._lease.commit():
                copied.rename(part)
        except BaseException:
            copied.close()
            raise
        return copied

    def _finish(self, ended: str | None) -> None:
        """Write the result files, record the end, remove the part file; all lines have records."""
        part, state, files = self._part, self._state, self.files
        assert part is not None and state is not None
        output, errors = self._unfinished(files.output), self._unfinished(files.errors)
        num_output = part.write_sorted(OUTPUT, output)  # empty for a batch without a success
        num_errors = part.write_sorted(ERROR, errors)
        figures = RunFigures(ended, num_output, num_errors, part.tokens)
        try:
            with self._lease.commit():
                os.replace(output, files.output)
                if num_errors:
                    os.replace(errors, files.errors)
                else:
                    files.errors.unlink(missing_ok=True)
                for folder in {files.output.parent, files.errors.parent}:
                    sync_folder(folder)
                state.finish(**asdict(figures))
                self._remove_part_files()
        except LeaseLost:
            output.unlink(missing_ok=True)
            errors.unlink(missing_ok=True)
            raise

    def _unfinished(self, path: Path) -> Path:
        """The name of a file until it is complete, different for each owner."""
        return path.with_name(f"{path.name}.{self._lease.owner.token}.tmp")

    def _remove_part_files(self) -> None:
        """Remove the part file and unfinished files, also of earlier owners that were killed."""
        files = self.files
        files.part.unlink(missing_ok=True)
        for path in (files.output, files.errors, files.part):
            for found in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
                found.unlink(missing_ok=True)
        sync_folder(files.part.parent)
