"""What the first start of an engine on a machine tells while the CPU operators are compiled."""

from __future__ import annotations

import logging

from penstock.kernels.cpu import native
from penstock.workers.config import EngineConfig
from penstock.workers.engine.load import load_engine
from penstock.workers.progress import COMPILING, LOADING, PREPARING


def test_it_says_that_it_compiles_before_it_loads(monkeypatch, caplog):
    """Without the compilation, which takes a minute: tests/kernels/cpu/test_native.py has it."""
    phases: list[str] = []

    def start() -> list[str]:
        phases.clear()
        config = EngineConfig(weights="fp32", device="cpu", num_blocks=16, threads=1)
        load_engine(config, report=lambda progress: phases.append(progress.phase)).close()
        return list(dict.fromkeys(phases))

    with caplog.at_level(logging.INFO, "penstock.engine"):
        assert start() == [LOADING, PREPARING] and COMPILING not in caplog.text
        monkeypatch.setattr(native, "is_built", lambda: False)
        assert start() == [COMPILING, LOADING, PREPARING] and COMPILING in caplog.text
