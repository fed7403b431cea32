"""The model's own sampling parameters, for what a request does not say.

Model authors publish them in generation_config.json. `SamplingDefaults.params` is the one place
where a request's parameters meet them, whichever API the request came by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.model_config import read_json
from penstock.workers.request import PARAMETER_BOUNDS, PARAMETERS, SamplingParams

FILE = "generation_config.json"
NAMES = tuple(name for name, each in PARAMETERS.items() if each.of_model)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values, by names of `SamplingParams`, that differ from the defaults there."""

    values: Mapping[str, float] = field(default_factory=dict)

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a request. `given`: only those that the request states."""
        return SamplingParams(**{**self.values, **given})

    def __str__(self) -> str:
        """As "temperature 0.6, top_p 0.9"; empty: there are none."""
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())


def read_sampling_defaults(folder: str | Path, generation_config: str | None) -> SamplingDefaults:
    """The defaults of the model in `folder`. `generation_config` None,
    and vLLM's name for it, vllm: none, whatever it states.

    Raises ConfigError for a value that no request may have.
    """
    path = Path(folder) / FILE
    if generation_config in (None, "vllm") or not path.is_file():
        return SamplingDefaults()
    stated = read_json(path)
    values = {name: _value(path, name, stated[name]) for name in NAMES if name in stated}
    return SamplingDefaults(
        {
            name: value
            for name, value in values.items()
            if value is not None and value != PARAMETERS[name].default
        }
    )


def _value(path: Path, name: str, stated: Any) -> float | None:
    """A stated value as `SamplingParams` has it; None: null was stated. Raises ConfigError."""
    if stated is None:
        return None
    is_number = isinstance(stated, int | float) and not isinstance(stated, bool)
    is_whole = PARAMETERS[name].kind == "int"
    if is_number and is_whole and stated == -1:
        stated = 0  # both switch top_k off
    if (
        not is_number
        or not PARAMETER_BOUNDS[name].has(stated)
        or (is_whole and stated != int(stated))
    ):
        raise ConfigError(
            f"{path}: {name} must be a {'whole ' if is_whole else ''}number in "
            f"{PARAMETER_BOUNDS[name]}; got {stated!r}. Correct the file, or serve without its "
            "sampling parameters: --generation-config none (generation_config: none)"
        )
    return int(stated) if is_whole else float(stated)
