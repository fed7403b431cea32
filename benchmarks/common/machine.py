"""The machine that a benchmark ran on, as its results name it."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """The CPU's model name, or the architecture where the system does not tell it."""
    info = Path("/proc/cpuinfo")  # psutil has no model names
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
