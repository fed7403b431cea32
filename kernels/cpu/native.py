"""Builds the CPU operators once a machine, loads it, and says what may run on it.

Knows a compiler and a cache folder; nothing of what the functions compute.
`python -m penstock.kernels.cpu.native` builds ahead and prints where the library is.

Every function takes one argument: a `struct.Struct` of 8-byte fields, packed to bytes. That costs
0.4 microseconds a call where twenty ctypes arguments cost 3.3.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "csrc"
SOURCES = ("operators.cpp", "operators_linear.cpp")  # about as long to compile
# Not -ffast-math: it would let the compiler assume that no value is infinite, reorder sums
# differently from row to row, and (linked by g++ < 13) flush denormals in the whole process.
FLAGS = [
    "-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno",
    "-fno-trapping-math", "-fvisibility=hidden", "-fPIC", "-fopenmp",
]  # fmt: skip
COMPILERS = ("g++", "c++", "clang++")
DTYPES = {torch.float32: 0, torch.bfloat16: 1}

FUNCTIONS = (
    "pack", "linear", "pack_int8", "linear_int8", "pack_codes", "linear_codes", "write_kv",
    "rope_write_kv", "decode", "prefill", "rms_norm", "quantize", "rope", "rope_to", "silu_mul",
    "combine", "unpack_neurons", "sample",
)  # fmt: skip


_thread = threading.local()


class BuildError(RuntimeError):
    """The library could not be compiled or loaded here. The message says what the compiler said."""


@functools.cache
def loaded() -> ctypes.CDLL | None:
    """The compiled operators, or None (after one warning) where they cannot be had."""
    try:
        library = ctypes.CDLL(str(build()))
        for name in (*FUNCTIONS, "run"):
            function = getattr(library, f"ps_{name}")
            function.argtypes, function.restype = [ctypes.c_char_p], None
        return library
    except (RuntimeError, OSError, AttributeError) as error:
        log.warning(
            "the native CPU operators are not available, so plain PyTorch runs instead, several "
            "times slower; install g++ to change that (%s)",
            error,
        )
        return None


def library() -> Any | None:
    """What operators call: `loaded()`, or what this thread has put in its place."""
    return getattr(_thread, "instead", None) or loaded()


@contextmanager
def instead(other: Any) -> Iterator[None]:
    """`library()` is `other` in this thread for a while (replay.py listens in)."""
    _thread.instead = other
    try:
        yield
    finally:
        del _thread.instead


def usable(tensor: torch.Tensor) -> Any | None:
    """The library, if it can work on `tensor`: on the CPU, in a dtype that it knows."""
    return library() if tensor.is_cpu and tensor.dtype in DTYPES else None


def rows_are_dense(x: torch.Tensor) -> bool:
    """Whether each row of `x` [T, H, D] lies in one piece; the stride over T is free."""
    _, num_heads, head_dim = x.shape
    _, head_stride, stride = x.stride()
    return stride == 1 and (head_stride == head_dim or num_heads == 1)


def find_compiler() -> str | None:
    """Path of the first C++ compiler on PATH that we know how to call."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def build(cache: Path | None = None) -> Path:
    """Compile into `cache` (default: ~/.cache/penstock) unless that is done; the library's path.

    Safe to call from several processes at once: one compiles, the others wait for it.
    Raises BuildError without a compiler, and OSError where the folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler found; looked for {', '.join(COMPILERS)}")
    folder = cache or _cache_folder()
    target = folder / f"cpu_ops-{_digest(compiler)}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    # torch brings its own OpenMP runtime. Ours must be the same one, or there are two thread pools;
    # the loader takes the one that is loaded already when the names agree.
    bundled = sorted(Path(torch.__file__).parent.joinpath("lib").glob("libgomp*.so*"))
    openmp = [str(bundled[0])] if bundled else []
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made, parts = Path(scratch, target.name), [Path(scratch, f"{name}.o") for name in SOURCES]
        _run_all(
            [compiler, *FLAGS, "-c", str(FOLDER / name), "-o", str(part)]
            for name, part in zip(SOURCES, parts, strict=True)
        )
        _run_all([[compiler, *FLAGS, "-shared", *map(str, parts), *openmp, "-o", str(made)]])
        os.replace(made, target)


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run them beside each other. Raises BuildError with what the first failed one said."""
    running = [
        (command, subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        for command in commands
    ]
    said = [process.communicate()[1] for _, process in running]
    for (command, process), errors in zip(running, said, strict=True):
        if process.returncode:
            raise BuildError(f"{' '.join(command)}\n{errors.strip()}")


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "penstock"


def _digest(compiler: str) -> str:
    """Names what the result depends on: source, compiler, flags, torch's runtime, and this CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    sources = [path.read_bytes() for path in sorted(FOLDER.iterdir())]
    parts = (sources, compiler, version.stdout, FLAGS, torch.__version__, _cpu())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.machine() + platform.processor()
    first = info.read_text().split("\n\n", 1)[0]
    keep = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.startswith(keep))


if __name__ == "__main__":
    print(build())
