"""A predictor as bytes and back: one npz archive, no pickle, checked before use."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections import OrderedDict
from typing import Any

import numpy as np

from penstock.deployments.prediction.conformal import LEVELS
from penstock.deployments.prediction.distribution import KNOTS, NUM_BINS, Floats
from penstock.deployments.prediction.hazards import Counts, HazardTree
from penstock.deployments.prediction.mixture import EXPERTS, Trust
from penstock.deployments.prediction.predictor import LengthPredictor

VERSION = 1
_DAMAGE = (ValueError, KeyError, TypeError, IndexError, OSError, EOFError)
_DENSE = ("dense", "dense_squares", "counts", "means", "spreads")


class SnapshotError(ValueError):
    """These bytes are no snapshot of this predictor. Remedy: start without them."""


def snapshot(predictor: LengthPredictor) -> bytes:
    """The predictor's whole state. Some 10 bytes for each hashed word that was ever seen."""
    residual = predictor.residual
    touched = np.flatnonzero(residual.sparse_squares).astype(np.uint32)
    arrays: dict[str, Any] = {
        "sparse_at": touched,
        "sparse": residual.sparse[touched].astype(np.float32),
        "sparse_squares": residual.sparse_squares[touched].astype(np.float32),
        "knots": KNOTS,
        "evidence": np.array([t.evidence for t in _trusts(predictor)]),
        "levels": np.array([t.levels for t in _trusts(predictor)]),
    }
    arrays |= {name: getattr(residual, name) for name in _DENSE}
    for name, tree in _trees(predictor).items():
        counts = [counts.both for counts in tree.groups.values()]
        arrays[f"{name}_counts"] = np.array(counts).reshape(len(counts), 2, NUM_BINS)
    names = {
        "version": VERSION,
        "models": list(predictor.models),
        **{name: list(tree.groups) for name, tree in _trees(predictor).items()},
    }
    arrays["names"] = np.frombuffer(json.dumps(names).encode(), np.uint8)
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def restore(data: bytes) -> LengthPredictor:
    """The predictor of a snapshot. Raises SnapshotError; never returns a partly restored one."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        names = json.loads(arrays["names"].tobytes())
        if names["version"] != VERSION:
            raise SnapshotError(
                f"this snapshot has version {names['version']}, this Penstock reads {VERSION}: "
                "start without it"
            )
        if not np.array_equal(arrays["knots"], KNOTS):
            raise SnapshotError("this snapshot has other length bins: start without it")
        return _filled(arrays, names)
    except SnapshotError:
        raise
    except (*_DAMAGE, zipfile.BadZipFile, zlib.error) as error:
        raise SnapshotError(
            f"these bytes are no snapshot of a length predictor ({error}): start without them"
        ) from error


def _filled(arrays: dict[str, Any], names: dict[str, Any]) -> LengthPredictor:
    predictor = LengthPredictor()
    residual = predictor.residual
    num_words = len(arrays["sparse_at"])
    at = _checked(arrays, "sparse_at", (num_words,)).astype(np.int64)
    residual.sparse[at] = _checked(arrays, "sparse", (num_words,))
    residual.sparse_squares[at] = _checked(arrays, "sparse_squares", (num_words,))
    for name in _DENSE:
        getattr(residual, name)[:] = _checked(arrays, name, getattr(residual, name).shape)
    for name, tree in _trees(predictor).items():
        both = _checked(arrays, f"{name}_counts", (len(names[name]), 2, NUM_BINS))
        tree.groups = OrderedDict(
            (tuple(map(str, key)), Counts(each.copy())) for key, each in zip(names[name], both)
        )
    num = len(names["models"]) + 1
    evidence = _checked(arrays, "evidence", (num, len(EXPERTS)))
    levels = _checked(arrays, "levels", (num, len(LEVELS)))
    trusts = [Trust(each.copy(), row.copy()) for each, row in zip(evidence, levels)]
    predictor.everyone = trusts[0]
    predictor.models = OrderedDict(zip(map(str, names["models"]), trusts[1:]))
    return predictor


def _trees(predictor: LengthPredictor) -> dict[str, HazardTree]:
    return {"ends": predictor.ends, "cancels": predictor.cancels}


def _trusts(predictor: LengthPredictor) -> list[Trust]:
    return [predictor.everyone, *predictor.models.values()]


def _checked(arrays: dict[str, Any], name: str, shape: tuple[int, ...]) -> Floats:
    array = arrays[name]
    if array.shape != shape or not np.isfinite(array).all():
        raise SnapshotError(f"{name} of this snapshot is damaged: start without it")
    return array
