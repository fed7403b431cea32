"""The predictor's snapshot file: read when the gate starts, written while it runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.deployments.prediction.snapshot import SnapshotError, restore, snapshot

log = logging.getLogger("penstock.gate")


def load(file: str | None) -> LengthPredictor:
    """The saved predictor; a new one if there is no file or it cannot be used."""
    if file is None or not Path(file).exists():
        return LengthPredictor()
    try:
        return restore(Path(file).read_bytes())
    except (OSError, SnapshotError) as error:
        log.warning("cannot use %s, starting with an untrained predictor: %s", file, error)
        return LengthPredictor()


def save(file: str, predictor: LengthPredictor) -> None:
    """Atomic: the file is replaced as a whole. Raises OSError."""
    made = Path(f"{file}.{os.getpid()}")
    made.write_bytes(snapshot(predictor))
    made.replace(file)
