"""The list `models` of a configuration: which settings each model has for itself, and their merge.

Works on plain mappings. config.py makes a ServeConfig of each result.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.deployments.options import ANY_NAME, ServedModelOptions
from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError
from penstock.workers.settings import settings_of

MODELS = "models"
# Of one model alone: no two have them in common.
OWN = ("model", "served_model_name", "revision", "model_digest", "predictor_file")
# Beside the engine's settings and those of ServedModelOptions.
_OF_CLUSTER = (
    *("num_workers", "cpus_per_worker", "scale_down_after_s", "scale_to_zero_after_s"),
    *("target_wait_s", "surge_percent"),
    *("admission", "max_queued", "longest_wait_s", "wait_timeout_s", "lost_wait_s"),
    *("gate_answer_ms", "predictor_file"),
)
PER_MODEL = frozenset(
    (
        *(setting.name for setting in settings_of(EngineConfig)),
        *(setting.name for setting in settings_of(ServedModelOptions)),
        *_OF_CLUSTER,
    )
)


@dataclass(frozen=True, slots=True)
class Entry:
    """What must differ between the models of a list."""

    name: str  # of the model in answers
    other_names: tuple[str, ...]
    key: str  # the name of its deployment and its gate
    predictor_file: str | None  # None: it has none, or one by its name
    cores: frozenset[int] | None


def place(index: int) -> str:
    """How errors name an entry."""
    return f"{MODELS}[{index}]"


@contextmanager
def within(where: str) -> Iterator[None]:
    """Have a ConfigError say in which entry it is: `models[1].num_workers must be ...`."""
    try:
        yield
    except ConfigError as error:
        name = re.match(r"[a-z_]*", str(error))
        joint = "." if name is not None and name[0] in PER_MODEL else ": "
        raise ConfigError(f"{where}{joint}{error}") from None


def key_of(name: str) -> str:
    """A model's name as a part of names of actors, files and metrics."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)


def split(
    values: Mapping[str, Any], known: Collection[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings above the list, and all settings of each model: its own, else those above.

    `values`: flat settings, with a list of mappings under `models`. `known`: names of all settings.
    Raises ConfigError.
    """
    entries = values[MODELS]
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ConfigError("models must be a list of models, each with its settings, as model: NAME")
    top = {name: value for name, value in values.items() if name != MODELS}
    for name in OWN:
        if name in top:
            raise ConfigError(
                f"{name}: each entry of models has its own; write it there, and leave it out here"
            )
    shared = frozenset(known) - PER_MODEL
    return top, [_merged(place(i), each, top, shared) for i, each in enumerate(entries)]


def _merged(
    where: str, entry: Any, top: Mapping[str, Any], shared: Collection[str]
) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or not all(isinstance(name, str) for name in entry):
        raise ConfigError(f"{where} must have settings as 'name: value', as model: NAME")
    own = {name.replace("-", "_"): value for name, value in entry.items()}
    if own.get("model") is None:
        raise ConfigError(f"{where}.model is missing: name a folder, a GGUF file, or a hub id")
    for name in own:
        if name in shared:
            raise ConfigError(
                f"{where}.{name}: all models share this setting; write it above the list"
            )
    return {**top, **own}


def check_together(entries: Sequence[Entry]) -> None:
    """Raise ConfigError where two models have something that only one can have."""
    for at, entry in enumerate(entries):
        for before, other in enumerate(entries[:at]):
            _check_pair(place(at), entry, place(before), other)


def _check_pair(where: str, entry: Entry, before: str, other: Entry) -> None:
    for name in (entry.name, *entry.other_names):
        if name in (other.name, *other.other_names):
            what = "any name (*)" if name == ANY_NAME else repr(name)
            raise ConfigError(
                f"{where}.served_model_name: {before} is served as {what} already; "
                "give each model names of its own"
            )
    if entry.key == other.key:
        raise ConfigError(
            f"{where}.served_model_name: {entry.name!r} and {other.name!r} of {before} differ in "
            "special characters only; choose another first name"
        )
    if entry.predictor_file is not None and entry.predictor_file == other.predictor_file:
        raise ConfigError(
            f"{where}.predictor_file: {before} has the same file; give each model one of its own"
        )
    if entry.cores and other.cores and entry.cores & other.cores:
        both = ", ".join(map(str, sorted(entry.cores & other.cores)))
        raise ConfigError(
            f"{where}.compute_cores: {before} has cores {both}, too; give each model its own"
        )
