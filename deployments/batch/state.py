"""The state of a batch run: its identity, and whether it is finished.

The state file is append-only: a line that identifies the run, and at the end a line with the
figures of the finished run. Only the owner of the run's lease writes it (lease.py).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FORMAT = 1


class StateError(RuntimeError):
    """The run cannot be begun or resumed. The message is for the user, with the remedy."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What determines the results of a run. A run is resumed only with the same identity."""

    input_sha256: str
    model: str  # the model, and those of its settings that change answers
    run_seed: int  # lines without a seed get theirs from it and their number

    def difference(self, other: Identity) -> str | None:
        """The first field, in words, in which the other run differs."""
        words = {"input_sha256": "input", "model": "model", "run_seed": "seed"}
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if mine != theirs:
                return f"another {words[each.name]} ({mine}; now {theirs})"
        return None


class RunState:
    """An open state file."""

    def __init__(self, path: Path):
        """Open or create it. Raises OSError, or StateError if it is no state file."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self.identity, self.finished = self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def begin(self, identity: Identity) -> None:
        """Record the identity of the run, before its first result."""
        self._append({"format": FORMAT, **asdict(identity)})
        self.identity = identity

    def finish(self, **figures: Any) -> None:
        """Record that all results are in their files."""
        self.finished = figures
        self._append({"finished": figures})

    def discard(self) -> None:
        """Remove the record of the run, for another run to begin."""
        os.ftruncate(self._fd, 0)
        os.fsync(self._fd)
        self.identity = self.finished = None

    def close(self) -> None:
        os.close(self._fd)

    def _read(self) -> tuple[Identity | None, dict[str, Any] | None]:
        """Identity and figures in the file; a torn last line, which had no effect, is cut."""
        content = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.ftruncate(self._fd, len(whole))
        lines = whole.splitlines()
        if not lines:
            return None, None
        try:
            first = json.loads(lines[0])
            if first.pop("format") != FORMAT:
                raise StateError(f"{self.path} is of another version of Penstock; remove it")
            finished = json.loads(lines[1])["finished"] if len(lines) > 1 else None
            return Identity(**first), finished
        except (ValueError, TypeError, KeyError, AttributeError):
            raise StateError(
                f"{self.path} is not the state of a batch; remove it, or choose another output"
            ) from None

    def _append(self, values: dict[str, Any]) -> None:
        os.pwrite(self._fd, json.dumps(values).encode() + b"\n", os.fstat(self._fd).st_size)
        os.fsync(self._fd)
