"""Compiles the CPU operators once per machine, loads the library, and decides where it can be used.

`python -m penstock.kernels.cpu.native` builds ahead of the first use and prints the library's path.
Every function of the library takes one pointer to a packed argument struct (`arguments.py`).
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

from penstock.kernels.cpu import arguments

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "csrc"
SOURCES = ("operators_attention.cpp", "operators_linear.cpp", "operators.cpp")  # in parallel
# Not -ffast-math: it would let the compiler assume that no value is infinite, reorder sums
# differently from row to row, and (linked by g++ < 13) flush denormals in the whole process.
FLAGS = [
    "-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno",
    "-fno-trapping-math", "-fvisibility=hidden", "-fPIC", "-fopenmp",
]  # fmt: skip
COMPILERS = ("g++", "c++", "clang++")
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class BuildError(RuntimeError):
    """The library could not be compiled here. The message holds the compiler's output."""


@functools.cache
def loaded() -> ctypes.CDLL | None:
    """The compiled operators, or None (after one warning) if they cannot be built or loaded here.

    Raises arguments.LayoutError if an argument struct of the library is not the one that we pack.
    """
    try:
        library = ctypes.CDLL(str(build()))
        arguments.declare(library)
        return library
    except (RuntimeError, OSError, AttributeError) as error:
        log.warning(
            "the native CPU operators could not be built, so plain PyTorch runs instead, several "
            "times slower; installing g++ helps (%s)",
            error,
        )
        return None


class _Bound(threading.local):
    """The library of each thread, bound at its first use: an operator reads an attribute, and
    makes no call to find its function."""

    @functools.cached_property
    def library(self) -> Any:
        """What operators call: `loaded()`, or a stand-in (see `instead`); None without either."""
        return loaded()


bound = _Bound()


@contextmanager
def instead(other: Any) -> Iterator[None]:
    """Within the block, `bound.library` is `other` in this thread (replay.py records calls so)."""
    before = bound.library
    bound.library = other
    try:
        yield
    finally:
        bound.library = before


def usable(tensor: torch.Tensor) -> Any | None:
    """The library if `tensor` is on the CPU in a dtype that it supports, else None."""
    return bound.library if tensor.is_cpu and tensor.dtype in DTYPES else None


def find_compiler() -> str | None:
    """Path of the first of COMPILERS on PATH, or None."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def is_built(cache: Path | None = None) -> bool:
    """Whether `loaded` returns at once: `build(cache)` has nothing to compile, or no compiler."""
    if loaded.cache_info().currsize:
        return True
    compiler = find_compiler()
    return compiler is None or _target(cache, compiler).exists()


def build(cache: Path | None = None) -> Path:
    """Compile into `cache` (default: ~/.cache/penstock) if needed, and return the library's path.

    Several processes may call it at once: one compiles, the others wait for it.
    Raises BuildError without a compiler, and OSError where the folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler found; looked for {', '.join(COMPILERS)}")
    target = _target(cache, compiler)
    if target.exists():
        return target
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, target)
    return target


def _target(cache: Path | None, compiler: str) -> Path:
    return (cache or cache_folder()) / f"cpu_ops-{_digest(compiler)}.so"


def _compile(compiler: str, target: Path) -> None:
    # torch ships its own OpenMP runtime. Ours must be the same one, or there are two thread pools.
    # If the names agree, the loader uses the one that is loaded already.
    bundled = sorted(Path(torch.__file__).parent.joinpath("lib").glob("libgomp*.so*"))
    openmp = [str(bundled[0])] if bundled else []
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made, parts = Path(scratch, target.name), [Path(scratch, f"{name}.o") for name in SOURCES]
        _run_all(
            [compiler, *FLAGS, f"-I{FOLDER}", "-c", str(FOLDER / name), "-o", str(part)]
            for name, part in zip(SOURCES, parts, strict=True)
        )
        _run_all([[compiler, *FLAGS, "-shared", *map(str, parts), *openmp, "-o", str(made)]])
        os.replace(made, target)


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run all in parallel. Raises BuildError with the error output of the first that failed."""
    running = [
        (command, subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        for command in commands
    ]
    outputs = [process.communicate()[1] for _, process in running]
    for (command, process), errors in zip(running, outputs, strict=True):
        if process.returncode:
            raise BuildError(f"{' '.join(command)}\n{errors.strip()}")


def loaded_name() -> str:
    """Of the library's file: it depends on all that the library depends on."""
    library = loaded()
    assert library is not None
    return Path(library._name).name


def cache_folder() -> Path:
    """Where this machine keeps what Penstock has made for it."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "penstock"


def _digest(compiler: str) -> str:
    """A hash of all that the result depends on: sources, compiler, flags, torch, and this CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    files = sorted(path for path in FOLDER.rglob("*") if path.is_file())
    sources = [(path.relative_to(FOLDER).as_posix(), path.read_bytes()) for path in files]
    parts = (sources, compiler, version.stdout, FLAGS, torch.__version__, cpu_facts())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def cpu_facts() -> str:
    """What of this CPU decides which code runs, and which layouts it reads."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.machine() + platform.processor()
    first = info.read_text().split("\n\n", 1)[0]
    keep = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.startswith(keep))


if __name__ == "__main__":
    print(build())
