"""Settings as fields of frozen dataclasses: help text, bounds, choices, and how a text is parsed.

A field made by `option` is a setting. A group of settings is a dataclass with a `GROUP` title; a
configuration inherits from its groups, so its settings are flat: `EngineConfig(kv="int8")`. Flags,
YAML, `--help`, error messages and the reference pages are all made from `settings_of`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.workers.errors import ConfigError

_NUMBER = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)([kKmMgG]i?)?")
_SIZE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*(?:([kmgt])(?:i?(b)|i)?)?", re.IGNORECASE)
_UNITS = {"_mb": "m", "_gb": "g"}  # of settings with such a name, in powers of 1024
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
Plain = bool | int | float | str
_FACTORS = {"": 1, "k": 1000, "ki": 1024, "m": 1000**2, "mi": 1024**2, "g": 1000**3, "gi": 1024**3}


def option(
    default: Any,
    help: str,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    is_range: bool = False,
    is_list: bool = False,
    is_json: bool = False,
) -> Any:
    """A dataclass field that is a setting.

    `min` and `max` are allowed values, `above` is not. Choices are the field's `Literal` type.
    `is_range`: a whole number, or a text MIN:MAX of two, of which the first may be 0.
    `is_list`: a text, or a tuple of several. `is_json`: a text that is a JSON object of plain
    values, which YAML may write as its own.
    """
    bounds: dict[str, Any] = {"min": min, "max": max, "above": above}
    bounds |= {"is_range": is_range, "is_list": is_list, "is_json": is_json}
    return field(default=default, metadata={"help": help, **bounds})


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: the field that holds it, the values that it takes, and its help text."""

    name: str
    group: str  # title in `--help`
    kind: type  # int, float, bool or str
    optional: bool  # whether it may be None
    default: Any
    help: str
    choices: tuple[str, ...]  # empty: any value of the kind
    min: float | None
    max: float | None
    above: float | None
    is_range: bool = False  # MIN:MAX is a value, too
    is_list: bool = False  # so are several texts
    is_json: bool = False  # an object is a value, too

    @property
    def bounds(self) -> str:
        """The allowed range in words: "at least 1"; empty where every value is allowed."""
        if self.max is not None and self.above is not None:
            return f"in ({self.above:g}, {self.max:g}]"
        if self.max is not None:
            return f"in {self.min:g} ... {self.max:g}"
        if self.above is not None:
            return "positive" if self.above == 0 else f"above {self.above:g}"
        return "" if self.min is None else f"at least {self.min:g}"

    def check(self, value: Any) -> None:
        """Raise ConfigError unless `value` is one of the choices and within the bounds."""
        if value is None and self.optional:
            return
        if self.is_range and isinstance(value, str):
            self._check_range(value)
            return
        if self.is_json:
            try:
                plain_object(value)
            except ValueError as error:
                raise ConfigError(f"{self.name} {error}") from None
        if self.choices and value not in self.choices:
            known = ", ".join(self.choices)
            raise ConfigError(f"{self.name} must be one of {known}; got {value!r}")
        if (
            (self.min is not None and value < self.min)
            or (self.max is not None and value > self.max)
            or (self.above is not None and value <= self.above)
        ):
            verb = "lie" if self.max is not None else "be"
            raise ConfigError(f"{self.name} must {verb} {self.bounds}; got {value}")

    def parse(self, value: Any) -> Any:
        """`value`, read from YAML or given to a flag, as the field's type. Raises ConfigError."""
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            if self.optional:
                return None
            kind = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
            what = f"one of {', '.join(self.choices)}" if self.choices else kind[self.kind]
            what += f", {self.bounds}" if self.bounds else ""
            raise ConfigError(f"{self.name} needs a value, and cannot be none: {what}")
        if self.is_list and isinstance(value, list | tuple):
            texts = tuple(dataclasses.replace(self, is_list=False).parse(each) for each in value)
            if not all(texts):
                raise ConfigError(f"{self.name} must be one text or more; got {value!r}")
            return texts[0] if len(texts) == 1 else texts
        if self.kind is bool:
            if isinstance(value, bool):
                return value
            raise ConfigError(f"{self.name} must be true or false; got {value!r}")
        if self.is_json and isinstance(value, Mapping):
            return self._json(value)
        if self.kind is str:
            if isinstance(value, bool) and {"on", "off"} <= {*self.choices}:
                return "on" if value else "off"  # YAML reads these words as true and false
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                return str(value)
            raise ConfigError(f"{self.name} must be text; got {value!r}")
        if self.is_range and isinstance(value, str) and ":" in value:
            low, _, high = value.partition(":")
            return f"{self._number(low)}:{self._number(high)}"
        return self._number(value)

    def _json(self, value: Mapping[str, Any]) -> str:
        try:
            return json.dumps(dict(value), ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name} must be what JSON can hold: {error}") from None

    def _check_range(self, value: str) -> None:
        """Raise ConfigError unless `value` is MIN:MAX, with 0 <= MIN <= MAX and MAX in bounds."""
        try:
            low, high = (int(part) for part in value.split(":"))
        except ValueError:
            raise ConfigError(f"{self.name} must be N or MIN:MAX, as 1:8; got {value!r}") from None
        if low < 0 or low > high:
            raise ConfigError(f"{self.name}: MIN must lie in 0 ... MAX; got {value!r}")
        dataclasses.replace(self, is_range=False).check(high)

    def _number(self, value: Any) -> int | float:
        number = None
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
        elif isinstance(value, str) and self._unit is not None:
            number = self._size(value.strip(), self._unit)
        elif isinstance(value, str) and (match := _NUMBER.fullmatch(value.strip())):
            number = float(match[1]) * _FACTORS[(match[2] or "").lower()]
        if number is not None and self.kind is float:
            return number
        if number is not None and abs(number - round(number)) < 1e-6:
            return round(number)
        raise ConfigError(f"{self.name} must be {self._number_in_words()}; got {value!r}")

    @property
    def _unit(self) -> str | None:
        """For a setting in MiB or GiB, m or g."""
        return _UNITS.get(self.name[-3:])

    @staticmethod
    def _size(text: str, unit: str) -> float | None:
        """4, 4GB, 4GiB, 4G or 4096MB in `unit`, which is m or g; None: another form."""
        match = _SIZE.fullmatch(text)
        if match is None:
            return None
        given = (match[2] or unit).lower()
        if match[3] is None and given != unit:  # 5M of GiB may be meant as 5 million
            return None
        return float(match[1]) * 1024.0 ** (_POWERS[given] - _POWERS[unit])

    def _number_in_words(self) -> str:
        if self.is_range:
            return "a whole number, or MIN:MAX, as 1:8"
        if self._unit is not None:
            return f"a number of {self._unit.upper()}iB, as 4, or a size, as 4GB"
        return "a whole number, as 4096, 25.6k or 2M" if self.kind is int else "a number"


def plain_object(text: str) -> dict[str, Plain | None]:
    """The JSON object of plain values in `text`. Raises ValueError with what it must be."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}; got {text[:100]!r}") from None
    if not isinstance(value, dict):
        raise ValueError(f'must be a JSON object, as {{"name": true}}; got {text[:100]!r}')
    for name, each in value.items():
        if not isinstance(each, Plain | None):
            raise ValueError(f"must hold plain values, and {name} is none; got {text[:100]!r}")
    return value


@functools.cache
def settings_of(config: type) -> tuple[Setting, ...]:
    """The settings of a configuration class, group by group in the order of its bases."""
    hints = typing.get_type_hints(config)
    fields = {each.name: each for each in dataclasses.fields(config)}
    return tuple(
        _setting(fields[name], hints[name], vars(group)["GROUP"])
        for group in config.__mro__
        if "GROUP" in vars(group)
        for name in vars(group)["__annotations__"]
        if name in fields
    )


def _setting(each: dataclasses.Field[Any], hint: Any, group: str) -> Setting:
    """The setting of one field. `hint`: its type, as int, float | None or Literal["a", "b"]."""
    choices: tuple[str, ...] = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    kinds: tuple[Any, ...] = (str,) if choices else typing.get_args(hint) or (hint,)
    return Setting(
        name=each.name,
        group=group,
        kind=next(kind for kind in kinds if kind is not types.NoneType),
        optional=types.NoneType in kinds,
        default=each.default,
        choices=choices,
        **each.metadata,
    )


def check_settings(config: Any) -> None:
    """Raise ConfigError for the first setting of `config` outside its bounds or choices."""
    for setting in settings_of(config.__class__):
        setting.check(getattr(config, setting.name))


def unknown_setting(key: str, known: Iterable[str]) -> ConfigError:
    """The error for a setting that does not exist; it names the nearest one that does."""
    names = list(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else "docs/reference/settings.md has them all"
    return ConfigError(f"unknown setting {key!r}; {hint}")
