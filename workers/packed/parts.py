"""The parts of a decoder that are packed once: taken from a file that holds them, or built."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from penstock.kernels.types import FLOAT_FORMATS, PackedLinear
from penstock.workers.errors import InvariantError

Part = PackedLinear | Tensor


class PackedParts:
    """Parts by name: `kept` ones are handed out, the others are built, and are in `built`."""

    def __init__(self, kept: Mapping[str, Part]):
        self._kept = kept
        self.built: dict[str, Part] = {}

    def linear(self, name: str, build: Callable[[], PackedLinear]) -> PackedLinear:
        """`name`: one of its own for each linear of the model."""
        found = self._part(name, build)
        assert isinstance(found, PackedLinear)
        return found

    def tensor(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """The same for a plain tensor, such as the embedding."""
        found = self._part(name, read)
        assert isinstance(found, Tensor)
        return found

    def _part(self, name: str, build: Callable[[], Part]) -> Part:
        if name in self._kept:
            return self._kept[name]
        if name in self.built:
            raise InvariantError(f"two parts of the model have the name {name!r}")
        self.built[name] = build()
        return self.built[name]


def are_quantized(parts: Mapping[str, Part]) -> bool:
    """Whether they took work to make: plain weights are read as fast from the checkpoint."""
    linears = (each for each in parts.values() if isinstance(each, PackedLinear))
    return any(each.format not in FLOAT_FORMATS.values() for each in linears)
