"""bf16 linears of a CPU without bf16 instructions: fp32's sums of the same numbers, rounded once.
On a CPU that has them, the code for others is compiled."""

from __future__ import annotations

import ctypes
import platform
import subprocess

import pytest
import torch

from penstock.kernels.cpu import native
from penstock.kernels.matmul import linear, pack_linear

pytestmark = pytest.mark.usefixtures("native_path")
SOURCE = """
#include "export.h"
#include "matmul/linear.h"
OPERATOR(pack, PackArgs)
OPERATOR(linear, LinearArgs)
EXPORT int64_t pk_panel() { return PANEL; }
"""
WITHOUT = ("avx512bf16", "amx-bf16", "amx-int8", "amx-tile")


@pytest.fixture(scope="module")
def widening(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler, folder = native.find_compiler(), tmp_path_factory.mktemp("widening")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, to = folder / "linear.cpp", folder / "linear.so"
    source.write_text(SOURCE)
    is_x86 = platform.machine() == "x86_64"
    flags = [*native.FLAGS, "-shared", *(f"-mno-{each}" for each in WITHOUT if is_x86)]
    command = [compiler, *flags, f"-I{native.FOLDER}", str(source), "-o", str(to)]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(to))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(1, 1), (33, 17), (70, 130), (500, 63), (96, 576), (31, 2048)]
)
def test_sums_are_those_of_fp32(widening: ctypes.CDLL, num_outputs, num_inputs, with_bias):
    weight = (torch.randn(num_outputs, num_inputs) / num_inputs**0.5).bfloat16()
    bias = torch.randn(num_outputs).bfloat16() if with_bias else None
    wide = pack_linear(weight.float(), None if bias is None else bias.float())
    with native.instead(widening):
        packed = pack_linear(weight, bias)
    for num_rows in (1, 2, 5, 11, 12, 13, 25, 64, 130):
        x = torch.nn.functional.pad(torch.randn(num_rows, num_inputs), (0, 3), value=float("nan"))
        x = x.bfloat16()[:, :num_inputs]
        with native.instead(widening):
            found = linear(x, packed)
        assert torch.equal(found, linear(x.float(), wide).bfloat16()), num_rows


def test_a_value_that_is_not_finite_stays_in_its_row(widening: ctypes.CDLL):
    with native.instead(widening):
        packed = pack_linear(torch.randn(40, 64).bfloat16())
        x = torch.randn(14, 64).bfloat16()
        clean = linear(x, packed)
        x[5, 3] = float("inf")
        y = linear(x, packed)
    others = [row for row in range(14) if row != 5]
    assert torch.equal(y[others], clean[others]) and not y[5].isfinite().any()
