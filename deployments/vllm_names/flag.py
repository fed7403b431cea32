"""vLLM's flags of `serve`: what each is in Penstock's settings, or why there is none.

table.py has them all. The parser of `serve` and config files use them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.workers.errors import ConfigError

Settings = Mapping[str, str | bool]  # of Penstock, by name; a text is parsed as that of a flag
NO_VALUE = ""  # the key in `VllmFlag.values` of a flag without one


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """One flag, or several with the same answer.

    `setting` takes every value that `values` does not have. Without it, other values are refused
    with `sentence`, which says what to do instead; but `read` may turn one into `becomes`, which
    are names of settings, or return None.
    """

    names: tuple[str, ...]  # with their dashes
    sentence: str = ""
    setting: str | None = None
    values: Mapping[str, Settings] = field(default_factory=dict)  # in lower case
    is_weak: bool = False  # a setting that another flag gives holds
    read: Callable[[str], Settings | None] | None = None
    becomes: tuple[str, ...] = ()

    @property
    def nargs(self) -> int | str | None:
        """The number of values, as argparse writes it."""
        if self.setting is not None or self.read is not None:
            return None
        if not self.values:
            return "*"  # refused in any case, with whatever follows it
        if NO_VALUE not in self.values:
            return None
        return 0 if len(self.values) == 1 else "?"

    @property
    def is_absent(self) -> bool:
        """Whether every use is refused."""
        return self.setting is None and self.read is None and not self.values

    def settings(self, name: str, value: str | None) -> Settings:
        """The settings that say the same. `name`: as given; `value`: None if there is none.

        Raises ConfigError with the sentence.
        """
        key = NO_VALUE if value is None else value
        if (known := self.values.get(key.lower())) is not None:
            return known
        if self.setting is not None and value is not None:
            return {self.setting: value}
        if self.read is not None and value is not None and (read := self.read(value)) is not None:
            return read
        shown = name if value is None else f"{name} {value}"
        raise ConfigError(f"{shown}: {self.sentence}")


def alias(*names: str, setting: str, sentence: str = "") -> VllmFlag:
    """The same setting under another name."""
    return VllmFlag(names, sentence, setting)


def switch(*names: str, sentence: str = "", **settings: str | bool) -> VllmFlag:
    """A flag without a value that is these settings."""
    return VllmFlag(names, sentence, values={NO_VALUE: settings})


def nothing(*names: str, because: str) -> VllmFlag:
    """A flag without a value that asks for what Penstock does in any case."""
    return VllmFlag(names, because, values={NO_VALUE: {}})


def only(*names: str, values: tuple[str, ...], sentence: str) -> VllmFlag:
    """A flag of which these values are what Penstock does in any case."""
    return VllmFlag(names, sentence, values={key: {} for key in values})


def absent(*names: str, sentence: str) -> VllmFlag:
    """Flags that are refused."""
    return VllmFlag(names, sentence)


def add_given(given: dict[str, Any], flag: VllmFlag, name: str, value: str | None) -> None:
    """Add to the settings `given` those of a vLLM flag. Raises ConfigError."""
    for setting, text in flag.settings(name, value).items():
        if not (flag.is_weak and setting in given):
            given[setting] = text


def translated(
    values: Mapping[str, Any], known: frozenset[str], flags: Mapping[str, VllmFlag]
) -> dict[str, Any]:
    """The settings of a file, in which names of vLLM are put into ours.

    `known`: the names of our settings; `flags`: by name. Other names stay as they are. Raises
    ConfigError.
    """
    result = {name: value for name, value in values.items() if name in known}
    for name, value in values.items():
        if name in known:
            continue
        dashed = name.replace("_", "-")
        option = f"--no-{dashed}" if value is False else f"--{dashed}"
        flag = flags.get(option)
        if flag is None and value is False and f"--{dashed}" in flags:
            continue  # a flag that is not given
        if flag is None:
            result[name] = value
            continue
        text = None if isinstance(value, bool) or value is None else str(value)
        if isinstance(value, Mapping):  # a flag of vLLM takes it as JSON
            text = json.dumps(value, default=str)
        if text is None and flag.setting is not None:
            raise ConfigError(f"{name} needs a value")
        if flag.setting in result and not flag.is_weak:
            raise ConfigError(f"{name} is another name of {flag.setting}: write one of them")
        for setting in flag.settings(name, text):
            if setting in values and not flag.is_weak:
                raise ConfigError(f"{name} says what {setting} is, too: write one of them")
        add_given(result, flag, name, text)
    return result
