"""The predictor's snapshot file: read when the gate starts, written while it runs.

The default is a file of the application and the model in the user's state folder. Which one, the
gate's own process decides: in a cluster that exists, the gate runs on another machine.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path

from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.deployments.prediction.snapshot import SnapshotError, restore, snapshot

log = logging.getLogger("penstock.gate")

REMEDY = "set predictor_file to a file that can be written, or to none"
LONGEST_PART = 80  # of a name that was made by people; a file name may have 255 bytes


def automatic(application: str, model: str) -> str | None:
    """The file of that model in the user's state folder, which is made if it is missing.

    None, with a warning: the folder cannot be used.
    """
    folder = None
    try:
        folder = _state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        log.warning(
            "what is learnt about answer lengths is lost with the gate: cannot use %s (%s); %s",
            folder or "the user's state folder",
            getattr(error, "strerror", None) or error,
            REMEDY,
        )
        return None
    return str(folder / _file_name(application, model))


def load(file: str | None) -> LengthPredictor:
    """The saved predictor; a new one if there is no file or it cannot be used."""
    if file is None:
        return LengthPredictor()
    try:
        return restore(Path(file).read_bytes())
    except FileNotFoundError:
        return LengthPredictor()
    except (OSError, SnapshotError) as error:
        log.warning("cannot use %s, starting with an untrained predictor: %s", file, error)
        return LengthPredictor()


def save(file: str, predictor: LengthPredictor) -> None:
    """Atomic: the file is replaced as a whole. It names tenants, so it is its owner's alone.

    Raises OSError.
    """
    made = Path(f"{file}.{os.getpid()}")
    made.unlink(missing_ok=True)  # of a process that was killed meanwhile: its mode would stay
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(snapshot(predictor))
    made.replace(file)


def _state_folder() -> Path:
    """By the XDG base directories: a path that is not absolute does not count."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    home = given if given.is_absolute() else Path.home() / ".local" / "state"
    return home / "penstock"


def _file_name(application: str, model: str) -> str:
    """Legible, and different for names that differ in special characters only."""
    digest = hashlib.blake2b(f"{application}\0{model}".encode(), digest_size=4).hexdigest()
    parts = (re.sub(r"[^A-Za-z0-9._-]", "-", each)[:LONGEST_PART] for each in (application, model))
    return f"{'_'.join(parts)}_{digest}.npz".lstrip(".")
