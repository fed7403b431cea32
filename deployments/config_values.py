"""What a configuration says, as settings by name: for a file, and for Serve's arguments.

`config_from` (config.py) reads all of it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.deployments.config import ServeConfig, settings, settings_by_group
from penstock.deployments.model_entries import MODELS, PER_MODEL
from penstock.workers.settings import Setting, settings_of


def settings_that_differ(config: ServeConfig) -> dict[str, Any]:
    """The settings of `config` that are not at their defaults, by name; `config_from` reads it."""
    if config.models:
        shared = _differing(config, (each for each in settings() if each.name not in PER_MODEL))
        return {**shared, MODELS: [_own(each) for each in config.models]}
    return _differing(config, settings())


def values_by_group(config: ServeConfig) -> dict[str, dict[str, Any]]:
    """All settings of `config` by name, under the titles of their groups; of several models, what
    they share, and then the list of them."""
    groups = {
        title: {
            setting.name: _value(config, setting)
            for setting in group
            if not (config.models and setting.name in PER_MODEL)
        }
        for title, group in settings_by_group().items()
    }
    if config.models:
        groups[MODELS] = {MODELS: [_own(each) for each in config.models]}
    return {title: values for title, values in groups.items() if values}


def _differing(config: ServeConfig, among: Iterable[Setting]) -> dict[str, Any]:
    return {
        setting.name: value
        for setting in among
        if (value := _value(config, setting)) != setting.default
    }


def _own(config: ServeConfig) -> dict[str, Any]:
    """What a model among several has for itself; its name is always said."""
    own = _differing(config, (each for each in settings() if each.name in PER_MODEL))
    return {"model": config.engine.model, **own}


def _value(config: ServeConfig, setting: Setting) -> Any:
    return getattr(config if setting in settings_of(ServeConfig) else config.engine, setting.name)
