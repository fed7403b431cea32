"""A wall clock that jumps for one process: a library that is loaded before all others.

Compiled with g++ when it is needed. `preload` must be called before the first process of a run is
forked; `inside.jump` then sets the clock of one. Monotonic clocks do not move, as when an operator
or NTP sets the time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = r"""
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long jumped;

extern "C" {
void penstock_clock_jump(long long seconds) { jumped += seconds; }

int clock_gettime(clockid_t id, struct timespec *at) noexcept {
    int status = syscall(SYS_clock_gettime, id, at);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) at->tv_sec += jumped;
    return status;
}

int gettimeofday(struct timeval *at, void *) noexcept {
    struct timespec now;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return status;
}

time_t time(time_t *at) noexcept {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
}
"""


def preload() -> bool:
    """Have later processes load the library; whether it could be compiled."""
    if shutil.which("g++") is None:
        return False
    folder = Path(tempfile.mkdtemp(prefix="pst-clock-"))
    source, library = folder / "clock.cpp", folder / "clock.so"
    source.write_text(SOURCE)
    command = ["g++", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
    if subprocess.run(command).returncode:
        return False
    os.environ["LD_PRELOAD"] = str(library)
    return True
