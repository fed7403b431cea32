"""Records calls of the native library and repeats them in one call: a CUDA graph for the CPU.

A decoder's pass over a few rows makes some two hundred calls of 10 microseconds each, and Python
needs five times as long to issue them. A recorded call has fixed arguments: the same memory, shapes
and strides. The contents of that memory may change between runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.cpu import native
from penstock.kernels.cpu.arguments import OPERATORS, RUN


class Program:
    """Recorded calls and their arguments. The caller keeps the memory that these refer to."""

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
        self._packed = RUN.pack(ctypes.addressof(self._table), len(calls))
        self.num_calls = len(calls)

    def run(self) -> None:
        """Make all calls in their recorded order."""
        self._library.pk_run(self._packed)


class Recording:
    """Stands in for the library inside `record()`: notes its calls, and PyTorch's operators."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._calls: list[tuple[str, bytes]] = []
        self.computed: list[str] = []  # PyTorch operators, which a program could not repeat

    def program(self) -> Program | None:
        """The recorded calls; None if PyTorch computed or allocated anything between them."""
        return None if self.computed else Program(self._library, self._calls)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name.removeprefix("pk_") not in OPERATORS:
            return function

        def call(packed: bytes) -> None:
            self._calls.append((name, packed))
            function(packed)

        return call


class _OperatorLog(TorchDispatchMode):
    """Notes every operator except those that return a view of their first argument."""

    def __init__(self, computed: list[str]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._computed = computed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. Else PyTorch would import its compiler at the first operator:
        seconds in the midst of a worker's first answer, and 100 MiB."""
        return False

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
    """Record this thread's calls inside the block, which run as usual; None without a library.

    The memory in the arguments must outlive the program, and PyTorch may only make views of it
    inside the block: `Recording.computed` names every other operator.
    """
    library = native.bound.library
    if library is None:
        yield None
        return
    recording = Recording(library)
    with native.instead(recording), _OperatorLog(recording.computed):
        yield recording
