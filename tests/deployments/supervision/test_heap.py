"""The settings of the C library's heaps take effect: read from the C library itself."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from penstock.deployments.supervision.heap import one_heap

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_info"), reason="a C library other than glibc"
)

# Prints how many heaps glibc has once eight threads have allocated.
HEAPS = """
import ctypes, tempfile, threading
barrier = threading.Barrier(8)
def work():
    kept = [bytearray(2000) for _ in range(100)]
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as file:
    out = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    assert libc.malloc_info(0, out) == 0 and libc.fclose(out) == 0
    print(file.read().count(b"<heap nr="))
"""
# Prints by how many bytes the heap grows at least, and what it keeps once 8 MiB of it are free.
STEPS = """
import ctypes
from penstock.deployments.supervision.heap import grow_in_large_steps
if {apply}: assert grow_in_large_steps()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
def end(): return libc.sbrk(ctypes.c_ssize_t(0))
ends, pieces = [end()], []
while len(ends) < 3:
    pieces.append(libc.malloc(ctypes.c_size_t(50_000)))
    if end() != ends[-1]: ends.append(end())
pieces += [libc.malloc(ctypes.c_size_t(50_000)) for _ in range(8 * 2**20 // 50_000)]
full = end()
for piece in reversed(pieces): libc.free(ctypes.c_void_p(piece))
print(ends[2] - ends[1], full - end())
"""


def printed(script: str, variables: dict[str, str]) -> list[int]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_threads_share_one_heap():
    (default,) = printed(HEAPS, {})
    assert default > 1
    assert printed(HEAPS, one_heap()) == [1]


def test_the_heap_grows_and_shrinks_in_large_steps():
    step, returned = printed(STEPS.format(apply=False), one_heap())
    assert step < 1 << 20 and returned > 4 << 20
    step, returned = printed(STEPS.format(apply=True), one_heap())
    assert step >= 1 << 20 and returned == 0
