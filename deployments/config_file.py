"""Reads the settings in a YAML file, for `--config`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from penstock.workers.errors import ConfigError


class _Yaml(yaml.SafeLoader):
    """YAML in which 1:8 is a text. YAML 1.1 reads it as a number of base 60: 68."""


_Yaml.yaml_implicit_resolvers = {
    first: [("tag:yaml.org,2002:str", re.compile(r"[0-9]+:[0-9]+$")), *resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_config(path: str) -> dict[str, Any]:
    """The settings in a YAML file. Raises ConfigError unless it maps names to values."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _Yaml)  # noqa: S506 (safe)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must contain settings as 'name: value', one a line")
    return {key.replace("-", "_"): value for key, value in values.items()}
