"""Calls of the native library, recorded once and made again in one call: a CUDA graph for the CPU.

Knows calls and their packed arguments; nothing of what they compute. A pass of a decoder over a few
rows is some two hundred calls of the library that take 10 microseconds each, and Python takes five
times as long to bring them about. What is recorded has fixed arguments: the same memory, shapes and
strides. What is in the memory may change from one time to the next.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.cpu import native

_RUN = struct.Struct("2q")


class Program:
    """Recorded calls. Keeps their arguments; the memory that these name must be kept by others."""

    def __init__(self, library: ctypes.CDLL, calls: list[tuple[str, bytes]]):
        self._library = library
        self._arguments = ctypes.create_string_buffer(b"".join(packed for _, packed in calls))
        at, table = ctypes.addressof(self._arguments), []
        for name, packed in calls:
            function = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            assert function is not None and len(packed) % 8 == 0
            table += [function, at]
            at += len(packed)
        self._table = (ctypes.c_int64 * len(table))(*table)
        self._packed = _RUN.pack(ctypes.addressof(self._table), len(calls))
        self.num_calls = len(calls)

    def run(self) -> None:
        """Make all calls, in their order."""
        self._library.ps_run(self._packed)


class Recording:
    """What happens inside `record()`: the library's calls, and what PyTorch computed beside them.

    Stands in for the library meanwhile.
    """

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._calls: list[tuple[str, bytes]] = []
        self.computed: list[str] = []  # operators of PyTorch: a program would leave them out

    def program(self) -> Program | None:
        """The calls; None if PyTorch computed, or allocated, anything beside them."""
        return None if self.computed else Program(self._library, self._calls)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name.removeprefix("ps_") not in native.FUNCTIONS:
            return function

        def call(packed: bytes) -> None:
            self._calls.append((name, packed))
            function(packed)

        return call


class _Watch(TorchDispatchMode):
    """Notes every operator that is more than another view of the memory that it was given."""

    def __init__(self, computed: list[str]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._computed = computed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or not _is_view(result, args):
            self._computed.append(str(func))
        return result


def _is_view(result: Any, args: Any) -> bool:
    views = result if isinstance(result, (list, tuple)) else [result]
    given = args[0] if args else None
    return isinstance(given, torch.Tensor) and all(
        isinstance(view, torch.Tensor)
        and view.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        for view in views
    )


@contextmanager
def record() -> Iterator[Recording | None]:
    """Record what this thread calls inside, which is done all the same; None without a library.

    Memory that is named must outlive the program, and everything that PyTorch does inside must be
    views of such memory: `Recording.computed` says what was not.
    """
    library = native.loaded()
    if library is None:
        yield None
        return
    recording = Recording(library)
    with native.instead(recording), _Watch(recording.computed):
        yield recording
