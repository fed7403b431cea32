"""Integer products in tiles of the matrix unit have the bits of those in vectors: on a CPU without
the unit, by its instructions emulated (emulated_amx.h)."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.kernels import quant
from penstock.kernels.cpu import native
from penstock.kernels.matmul import linear, pack_linear

pytestmark = pytest.mark.usefixtures("native_path")
HEADER = Path(__file__).with_name("emulated_amx.h")
ROWS = (8, 16, 17, 32, 33, 129)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the code for the matrix unit uses vectors of AVX-512")
    compiler, to = native.find_compiler(), tmp_path_factory.mktemp("amx") / "linears.so"
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = [flag for flag in native.FLAGS if flag != "-O3"] + ["-O1", "-shared"]
    units = ["-D__AMX_INT8__", "-D__AMX_BF16__", "-include", str(HEADER)]
    source = native.FOLDER / "operators_linear.cpp"
    command = [compiler, *flags, *units, f"-I{native.FOLDER}", str(source), "-o", str(to)]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(to))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [None, 32, 64, 128])
def test_int8(emulated, dtype, group):
    assert emulated.pk_matrix_unit() == 1
    for num_outputs, num_inputs in ((1, 1), (31, 33), (70, 65), (33, 129), (70, 576)):
        weight = quant.quantize_weight(torch.randn(num_outputs, num_inputs), "int8")
        packed = pack_linear(replace(weight, group=group), torch.randn(num_outputs))
        for num_rows in ROWS:
            x = torch.randn(num_rows, num_inputs).to(dtype)
            expected = linear(x, packed)
            with native.instead(emulated):
                assert torch.equal(linear(x, packed), expected), (num_outputs, num_inputs, num_rows)


@pytest.mark.parametrize("zeros", ["none", "integers", "real", "steps"])
@pytest.mark.parametrize("group", [24, 32, 128, 304])
def test_int4(emulated, group, zeros):
    """Groups of 24 and 304 as files have them take bf16 rows, which become int16: two bytes, and
    two sums."""
    for num_outputs, num_inputs in ((31, 33), (70, 517)):
        weight = torch.randn(num_outputs, num_inputs)
        made = quant.quantize_weight(weight, "int4", group, symmetric=zeros != "steps")
        if zeros == "integers":
            made = replace(made, zeros=torch.randint(0, 17, made.scales.shape, dtype=torch.uint8))
        elif zeros == "real":
            made = replace(made, zeros=torch.randn(made.scales.shape) * 9)
        packed = pack_linear(made)
        for num_rows in ROWS:
            x = torch.randn(num_rows, num_inputs).bfloat16()
            expected = linear(x, packed)
            with native.instead(emulated):
                assert torch.equal(linear(x, packed), expected), (num_outputs, num_inputs, num_rows)
