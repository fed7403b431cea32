"""Shared by all tests: nothing from outside the machine, and one thread unless a test asks."""

from __future__ import annotations

import os
import secrets

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Two spinning OpenMP threads a process make everything slow as soon as anything else runs beside.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray reads these once, when it is first imported. Its ports are open on every interface: a token
# keeps others out. Replicas run at nice 15 unless told otherwise.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
