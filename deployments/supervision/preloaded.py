"""The first module that a process of `penstock serve` imports beside Ray: pandas stays out of it.

Where they are installed, Ray imports pyarrow into each of its processes, to send tables between
them, and Ray Serve pandas, for data frames in the HTTP responses of Serve's own proxies: together
some 120 MB and 0.5 s of CPU time in a process that has neither. Every other module imports
them as usual. In replicas Ray imports this module before they have work (`PRELOADED`), in the
driver cluster.py does; importing it is all that takes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

# A package, and the module of Ray that imports it and does without it where it is not installed.
NOT_FOR = {
    "pandas": "ray.serve._private.utils",
    "pyarrow": "ray._private.arrow_serialization",
}
PRELOADED = {"preload_python_modules": [__name__]}  # for `ray.init(_system_config=...)`


class NoTablesForRay:
    """A finder of modules that finds none of NOT_FOR for the module beside it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None: the next finder is asked. Raises ModuleNotFoundError for NOT_FOR."""
        if name in NOT_FOR and _importer() == NOT_FOR[name]:
            raise ModuleNotFoundError(f"{name} is kept out of {NOT_FOR[name]}", name=name)
        return None


def _importer() -> str:
    """The module that runs the import statement under way."""
    frame: FrameType | None = sys._getframe(1)
    own = {__name__, "importlib._bootstrap"}
    while frame is not None and frame.f_globals.get("__name__") in own:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


if not any(isinstance(each, NoTablesForRay) for each in sys.meta_path):
    sys.meta_path.insert(0, NoTablesForRay())
