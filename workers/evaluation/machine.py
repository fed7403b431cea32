"""The machine that figures were measured on, as results name it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch


def cpu_name() -> str:
    """The CPU's model name, or the architecture where the system does not tell it."""
    info = Path("/proc/cpuinfo")  # psutil has no model names
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine_facts(device: str) -> dict[str, Any]:
    """CPU, cores that this process may use, memory, system, torch, and the GPU of `device` cuda."""
    facts = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    return facts
