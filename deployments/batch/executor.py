"""Runs the batches of a data folder: one process of the cluster at a time, for all API keys.

Every ingress has an executor; the one that holds the lease of the folder runs the batches, and
another takes over when its process ends or hangs. All state is in files, so the next executor
resumes each batch: the results are in the part file of its run, the rest in `state.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from penstock.deployments.batch import results
from penstock.deployments.batch.batch_store import (
    BatchSpec,
    BatchState,
    BatchStatus,
    BatchStore,
    StoredBatch,
)
from penstock.deployments.batch.file_lock import LockError
from penstock.deployments.batch.file_store import MAX_FILE_BYTES, FileStore, new_file_id
from penstock.deployments.batch.lease import Lease, LeaseLost, hold
from penstock.deployments.batch.lines import InputError, check_input
from penstock.deployments.batch.run import BatchRun, RunFigures
from penstock.deployments.batch.runner import Progress, RunSettings
from penstock.deployments.batch.state import StateError
from penstock.deployments.batch.target import Target, TargetError

log = logging.getLogger("penstock.batch")

MAX_LINES = 50_000
MAX_RUNNING = 4  # batches at a time, of different API keys where possible
MAX_IN_FLIGHT = 32  # requests of one batch
POLL_S = 1.0
SWEEP_S = 600.0
RETRY_S = 30.0  # after a failure of the disk

MakeTarget = Callable[[str], Target]  # of a principal
_ENDS = {results.EXPIRED: BatchStatus.EXPIRED, results.CANCELLED: BatchStatus.CANCELLED}


class Board(Protocol):
    """Where ingresses with other data folders see the batches of this one."""

    def note(self, spec: BatchSpec, state: BatchState) -> None:
        """The newest state of a batch. Neither waits nor fails."""
        ...

    async def is_cancelled(self, batch_id: str) -> bool:
        """Whether a client has cancelled it there; False while that is not known."""
        ...


class Executor:
    """Belongs to one event loop; reads and writes the disk on other threads."""

    def __init__(
        self,
        folder: Path,
        target: MakeTarget,
        models: Sequence[str],
        board: Board | None = None,
    ):
        """`target`: makes the target for a principal's requests. `models`: those served.
        `board`: for other ingresses; None: there are none, or they share the folder."""
        self._folder = folder
        self._files, self._batches = FileStore(folder), BatchStore(folder)
        self._target = target
        self._models = list(models)
        self._board = board
        self._running: dict[str, _Running] = {}  # by batch id
        self._not_before_s: dict[str, float] = {}  # of batches that wait after a failure

    async def run(self) -> None:
        """Run batches whenever this process holds the lease, until cancelled."""
        lease, lock = self._folder / "executor.lease", self._folder / "executor.lock"
        while True:
            try:
                await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
                async with hold(lease, lock, waits=True) as held:
                    await self._work(held)
            except LeaseLost as error:
                log.warning(
                    "this ingress runs no batches while another process holds the lease: %s", error
                )
            except (OSError, LockError) as error:
                log.warning("batches wait %.0f s: %s", RETRY_S, error)
                await asyncio.sleep(RETRY_S)

    async def _work(self, lease: Lease) -> None:
        next_sweep_s, is_told = time.monotonic(), self._board is None
        try:
            while True:
                try:
                    if not is_told:
                        await self._tell_all()
                        is_told = True
                    if time.monotonic() >= next_sweep_s:
                        await asyncio.to_thread(self._sweep)
                        next_sweep_s = time.monotonic() + SWEEP_S
                    await self._start_some(lease)
                except (OSError, ValueError, TypeError):
                    log.exception("batches wait %.0f s: their files cannot be read", RETRY_S)
                    await asyncio.sleep(RETRY_S)
                await asyncio.sleep(POLL_S)
        finally:
            tasks = [each.task for each in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running.clear()

    async def _tell_all(self) -> None:
        """Note all batches: those before this executor may have ended before they did."""
        assert self._board is not None
        for batch in await asyncio.to_thread(self._batches.all):
            self._board.note(batch.spec, await asyncio.to_thread(batch.state))

    def _sweep(self) -> None:
        self._files.sweep()
        self._batches.sweep()

    async def _start_some(self, lease: Lease) -> None:
        """Start batches while there is room: the oldest of the API key with the fewest running."""
        self._running = {k: each for k, each in self._running.items() if not each.task.done()}
        if len(self._running) >= MAX_RUNNING:
            return
        waiting = await asyncio.to_thread(self._batches.unfinished)
        now_s = time.monotonic()
        self._not_before_s = {k: at_s for k, at_s in self._not_before_s.items() if at_s > now_s}
        waiting = [
            each
            for each in waiting
            if each.spec.id not in self._running and each.spec.id not in self._not_before_s
        ]
        while waiting and len(self._running) < MAX_RUNNING:
            counts = Counter(each.principal for each in self._running.values())
            batch = min(waiting, key=lambda each: counts[each.spec.principal])
            waiting.remove(batch)
            task = asyncio.create_task(self._run(batch, lease))
            self._running[batch.spec.id] = _Running(batch.spec.principal, task)

    async def _run(self, batch: StoredBatch, lease: Lease) -> None:
        """Run or resume one batch to its end; after a failure, RETRY_S later."""
        name = batch.spec.id
        try:
            runner = _BatchRunner(
                batch, lease, self._files, self._target, self._models, self._board
            )
            await runner.run()
        except LeaseLost:
            log.warning("%s: another process holds the lease and resumes it", name)
        except (OSError, LockError, TargetError) as error:
            # The disk is full or cannot be reached: the batch keeps its results and waits.
            log.warning("%s waits %.0f s: %s", name, RETRY_S, error)
            self._not_before_s[name] = time.monotonic() + RETRY_S
        except Exception:
            log.exception("%s failed unexpectedly", name)
            self._not_before_s[name] = time.monotonic() + RETRY_S


@dataclass(frozen=True, slots=True)
class _Running:
    principal: str
    task: asyncio.Task[None]


class _BatchRunner:
    """The steps of one batch. Each begins from the state on disk, so each may be repeated."""

    def __init__(
        self,
        batch: StoredBatch,
        lease: Lease,
        files: FileStore,
        target: MakeTarget,
        models: Sequence[str],
        board: Board | None,
    ):
        self._batch, self._board = batch, board
        self._lease = lease
        self._files = files.of(batch.spec.principal)
        self._target = target(batch.spec.principal)
        self._models = models
        self._state = batch.recorded()

    async def run(self) -> None:
        if self._state.status is BatchStatus.VALIDATING:
            await self._validate()
        if self._state.status is BatchStatus.IN_PROGRESS:
            await self._execute()
        if self._state.status is BatchStatus.FINALIZING:
            await asyncio.to_thread(self._publish)
            await self._tell()

    async def _write(self, state: BatchState) -> None:
        def write() -> None:
            with self._lease.commit():
                self._batch.write(state)

        await asyncio.to_thread(write)
        self._state = state
        await self._tell()

    async def _tell(self) -> None:
        """Note for other ingresses how far it is."""
        if self._board is not None:
            self._board.note(self._batch.spec, await asyncio.to_thread(self._batch.state))

    async def _is_cancelled(self) -> bool:
        """Whether a client has cancelled the batch, here or at an ingress with another folder."""
        if await asyncio.to_thread(self._batch.cancelled_at) is not None:
            return True
        if self._board is None or not await self._board.is_cancelled(self._batch.spec.id):
            return False
        await asyncio.to_thread(self._batch.cancel)
        return True

    async def _validate(self) -> None:
        """Check the input: then the batch is FAILED or IN_PROGRESS."""
        spec = self._batch.spec

        def check() -> int:
            with open(self._batch.files.input, "rb") as file:
                summary = check_input(
                    file,
                    endpoint=spec.endpoint,
                    models=self._models,
                    max_lines=MAX_LINES,
                    max_bytes=MAX_FILE_BYTES,
                )
            return summary.num_lines

        try:
            num_lines = await asyncio.to_thread(check)
        except InputError as error:
            problems = [asdict(each) for each in error.problems]
            await self._write(self._state.to(BatchStatus.FAILED, errors=problems))
            log.info("%s has failed: %d lines cannot be run", spec.id, error.num_problems)
            return
        state = self._state.to(
            BatchStatus.IN_PROGRESS,
            num_lines=num_lines,
            model=self._models[0] if self._models else None,
        )
        await self._write(state)
        log.info("%s is in progress: %d requests", spec.id, num_lines)

    async def _execute(self) -> None:
        """Run the unfinished lines, until all are done, the batch expires or is cancelled."""
        batch, spec = self._batch, self._batch.spec
        with contextlib.ExitStack() as opened:
            try:
                run = await asyncio.to_thread(
                    BatchRun,
                    batch.files,
                    model=self._models[0] if self._models else "",
                    models=self._models,
                )
                opened.enter_context(run)
                await asyncio.to_thread(run.begin, self._lease)
            except (StateError, InputError) as error:
                problem = {"line": None, "param": None, "code": "cannot_resume"}
                problems = [{**problem, "message": str(error)}]
                await self._write(self._state.to(BatchStatus.FAILED, errors=problems))
                log.warning("%s has failed: %s", spec.id, error)
                return
            if run.finished is None:
                settings = RunSettings(
                    run_seed=run.run_seed,
                    max_in_flight=MAX_IN_FLIGHT,
                    deadline_s=time.monotonic() + spec.expires_at - time.time(),
                )
                progress, cancelled, is_over = run.progress(), asyncio.Event(), asyncio.Event()
                watching = asyncio.create_task(self._watch(progress, cancelled, is_over))
                try:
                    await run.run(self._target, settings, progress, cancelled)
                finally:
                    # Not cancelled: its last write would go on in its thread, and could replace
                    # the final state, which is written next.
                    is_over.set()
                    await asyncio.gather(watching, return_exceptions=True)
            assert run.finished is not None, "BatchRun.run records the end"
            await self._finalize(run.finished)

    async def _watch(
        self, progress: Progress, cancelled: asyncio.Event, is_over: asyncio.Event
    ) -> None:
        """Record the progress each second, and notice a cancel by a client, until `is_over`.

        A disk that fails for a while delays both, and ends neither.
        """
        is_failing = False
        while not is_over.is_set():
            state = replace(
                self._state,
                num_completed=progress.num_completed,
                num_failed=progress.num_failed,
                tokens=asdict(progress.tokens),
                cause=progress.cause,
            )
            try:
                if state != self._state:
                    await self._write(state)
                if not cancelled.is_set() and await self._is_cancelled():
                    cancelled.set()
                    await self._tell()
                is_failing = False
            except LeaseLost:
                raise  # `hold` ends the run
            except (OSError, LockError) as error:
                if not is_failing:
                    name = self._batch.spec.id
                    log.warning("%s: its progress cannot be recorded: %s", name, error)
                is_failing = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), POLL_S)

    async def _finalize(self, finished: RunFigures) -> None:
        """Record the final status of a batch whose lines are done, and the ids of its files."""
        times = dict(self._state.times)
        if finished.ended == results.CANCELLED and (at := self._batch.cancelled_at()) is not None:
            times[BatchStatus.CANCELLING.value] = at
        state = replace(
            self._state,
            times=times,
            num_completed=finished.num_output,
            num_failed=finished.num_errors,
            tokens=asdict(finished.tokens),
            cause="",
            output_file_id=new_file_id() if finished.num_output else None,
            error_file_id=new_file_id() if finished.num_errors else None,
            ends_as=_ENDS.get(finished.ended or "", BatchStatus.COMPLETED).value,
        )
        await self._write(state.to(BatchStatus.FINALIZING))

    def _publish(self) -> None:
        """Make the results files of the owner, then record the end. May be repeated."""
        spec, state, files = self._batch.spec, self._state, self._batch.files
        status = BatchStatus(state.ends_as)
        with self._lease.commit():
            for file_id, path, kind in (
                (state.output_file_id, files.output, "output"),
                (state.error_file_id, files.errors, "error"),
            ):
                if file_id is not None:
                    name = f"{spec.id}_{kind}.jsonl"
                    self._files.adopt(file_id, path, name, spec.output_ttl_s)
            self._batch.write(state.to(status))
        log.info(
            "%s is %s: %d requests answered, %d failed",
            *(spec.id, status.value, state.num_completed, state.num_failed),
        )
