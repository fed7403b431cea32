"""The names and folders of adapters that `lora_modules` gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from penstock.workers.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
NAME_RULE = "1 to 128 of the characters A-Z, a-z, 0-9, '.', '_', ':', '/' and '-'"


def is_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return _NAME.fullmatch(name) is not None


def parse_modules(texts: Iterable[str]) -> dict[str, str]:
    """Folders by adapter name. `texts`: NAME=FOLDER, or JSON with `name` and `path`.

    Raises ConfigError.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, folder = _from_json(text) if text.lstrip().startswith("{") else _pair(text)
        if not is_name(name) or not folder:
            raise ConfigError(
                f"lora_modules must be NAME=FOLDER, with a name of {NAME_RULE}; got {text!r}"
            )
        if name in found:
            raise ConfigError(f"lora_modules: {name!r} is there twice; give each adapter its name")
        found[name] = folder
    return found


def _pair(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    return name.strip(), folder.strip()


def _from_json(text: str) -> tuple[str, str]:
    """vLLM's other form: {"name": ..., "path": ..., "base_model_name": ...}."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"lora_modules: {text[:100]!r} is not JSON: {error}") from None
    unknown = sorted(set(value) - {"name", "path", "base_model_name"})
    if unknown:
        raise ConfigError(f"lora_modules: {unknown[0]} is unknown; known are name and path")
    return str(value.get("name", "")), str(value.get("path", ""))
