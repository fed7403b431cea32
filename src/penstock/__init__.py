"""Penstock: a Ray-based distributed serving cluster for large language models.

    from penstock import LLM, SamplingParams

The public names for scripts and notebooks. Each is imported at its first use: `import penstock`
itself loads neither torch nor Ray. Everything else is in the sub-packages, which are links to the
folders at the top of the repository.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.deployments.offline.llm import LLM, GenerationError
    from penstock.deployments.offline.sampling_params import SamplingParams

    __version__: str

__all__ = ["LLM", "GenerationError", "SamplingParams", "__version__"]

_MODULES = {
    "LLM": "penstock.deployments.offline.llm",
    "GenerationError": "penstock.deployments.offline.llm",
    "SamplingParams": "penstock.deployments.offline.sampling_params",
}


def __getattr__(name: str) -> Any:
    """PEP 562: called for a name that is not here yet."""
    if name == "__version__":
        value = version("penstock")
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
