"""Reads the settings in a YAML file, for `--config`, and writes them so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock.workers.errors import ConfigError

_LINE_BREAKS = "\x85\u2028\u2029"


class _Yaml(yaml.SafeLoader):
    """YAML in which 1:8 is a text. YAML 1.1 reads it as a number of base 60: 68.

    A name that comes twice is an error, of which YAML would take the last value in silence.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = key.value.replace("-", "_"), key.start_mark.line + 1
            if name in known:
                raise ConfigError(f"{name} is given twice, in lines {known[name]} and {line}")
            known[name] = line
        return super().construct_mapping(node, deep)


_Yaml.yaml_implicit_resolvers = {
    first: [("tag:yaml.org,2002:str", re.compile(r"[0-9]+:[0-9]+$")), *resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Writes a text with unusual line breaks in double quotes, where they are escaped. In others
    it folds such a text, and what is read again has a space instead."""

    def text(self, value: str) -> yaml.ScalarNode:
        style = '"' if any(each in value for each in _LINE_BREAKS) else None
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _Dumper.text)


def read_config(path: str) -> dict[str, Any]:
    """The settings in a YAML file. Raises ConfigError unless it maps names to values."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _Yaml)  # noqa: S506 (safe)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must contain settings as 'name: value', one a line")
    return {key.replace("-", "_"): value for key, value in values.items()}


def as_yaml(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """Settings as the text of a YAML file that `read_config` reads, below their groups' titles.

    `groups`: by title, the values by name: None, bool, number, text, or a list of texts.
    """
    parts = []
    for title, values in groups.items():
        lines = yaml.dump(
            dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6
        )
        parts.append(f"# {title}\n{lines}")
    return "\n".join(parts)
