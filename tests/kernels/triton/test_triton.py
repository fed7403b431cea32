"""Runs the checks of the Triton kernels in processes of their own.

Triton decides at import whether it interprets, and any other test may have imported it before.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
ORDER = HERE / "order_checks.py"
CHECKS = [path for path in sorted(HERE.glob("*checks.py")) if path != ORDER]


# The interpreter multiplies tiles with numpy. For some CPUs (AVX2) its library, OpenBLAS, adds up a
# column in an order that depends on where in the tile it stands, which no GPU does. This kernel,
# for x86-64 of any kind, does not either.
SAME_ORDER = {"OPENBLAS_CORETYPE": "Nehalem"}


def run(command: list[str], interpret: bool) -> str:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment.update(SAME_ORDER, TRITON_INTERPRET="1")
    result = subprocess.run(
        [sys.executable, *command],
        cwd=HERE.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return result.stdout


def test_every_kernel_against_its_reference():
    """Interpreted here; compiled where there is a GPU. All in one process: the start takes 5 s."""
    check(CHECKS, least=120)


def test_a_row_has_the_same_bits_in_any_batch():
    """In a process of its own, since it takes as long as all the others together."""
    check([ORDER], least=15)


def check(files: list[Path], least: int) -> None:
    output = run(
        ["-m", "pytest", "-x", "-p", "no:cacheprovider", *map(str, files)],
        interpret=not torch.cuda.is_available(),
    )
    summary = output.splitlines()[-1]
    passed = re.search(r"\b(\d+) passed", summary)
    assert passed and int(passed[1]) >= least, summary
    assert "skipped" not in summary


def test_every_kernel_compiles_for_a_gpu():
    """To machine code for sm_80 and sm_90; that needs no GPU."""
    lines = run(["-m", "tests.kernels.triton.compiles"], interpret=False).splitlines()
    assert len(lines) == 60
    lines = run(["-m", "tests.kernels.triton.quant_compiles"], interpret=False).splitlines()
    assert len(lines) == 37
