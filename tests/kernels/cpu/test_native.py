"""The build: once a machine, together with torch's threads, on lesser CPUs too, and never fatal."""

from __future__ import annotations

import ctypes
import itertools
import logging
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from penstock.kernels import attention, matmul, quant, rowwise
from penstock.kernels.cpu import native
from penstock.kernels.reference.rowwise import act_mul_reference, rms_norm_reference
from tests.kernels.kernel_cases import assert_close, dense_attention, paged
from tests.kernels.rolled_cases import Roll, dense_rolled_attention, rolled_paged

BUILD = "import sys; from pathlib import Path; from penstock.kernels.cpu import native; "


def test_processes_that_start_together_build_once(native_path, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, "-O0"])  # a quick build, still of seconds
    program = BUILD + 'native.FLAGS.append("-O0"); print(native.build(Path(sys.argv[1])))'
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "new")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    paths = {process.communicate(timeout=400)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(paths) == 1
    library = Path(paths.pop())
    assert sorted(p.name for p in library.parent.iterdir()) == ["build.lock", library.name]
    before = library.stat().st_mtime_ns
    native.loaded.cache_clear()  # of this process's own library, which is loaded once more
    assert native.is_built(library.parent) and not native.is_built(tmp_path / "other")
    assert native.loaded() is not None and native.is_built(tmp_path / "other")
    assert native.build(library.parent) == library
    assert library.stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["operators.cpp", "attention/decode.h", "matmul/amx.h"])
def test_a_changed_source_is_another_library(native_path, name, tmp_path, monkeypatch):
    compiler = native.find_compiler()
    assert compiler is not None
    before = native._digest(compiler)
    folder = shutil.copytree(native.FOLDER, tmp_path / "csrc")
    monkeypatch.setattr(native, "FOLDER", folder)
    assert native._digest(compiler) == before
    (folder / name).write_text((folder / name).read_text() + "\n")
    assert native._digest(compiler) != before


def test_a_wheel_holds_all_sources():
    """In folders, too: without one header there is no library on the user's machine."""
    root = native.FOLDER.resolve().parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["penstock.kernels.cpu"]
    packed = {path for pattern in patterns for path in native.FOLDER.parent.glob(pattern)}
    sources = {path for path in native.FOLDER.rglob("*") if path.is_file()}
    assert sources <= packed
    assert {path.name for path in sources} >= {*native.SOURCES, "decode.h", "amx.h"}


def test_one_openmp_runtime(native_path):
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in maps if "gomp" in line or "iomp" in line}
    assert len(runtimes) == 1


def test_a_lesser_cpu(native_path, tmp_path, monkeypatch):
    """Without AVX-512 the vectors are narrower and bf16 has no dot product of its own."""
    lesser_flags = {"-march=native": "-march=x86-64-v3", "-O3": "-O1"}  # a third less to wait
    flags = [lesser_flags.get(flag, flag) for flag in native.FLAGS]
    monkeypatch.setattr(native, "FLAGS", flags)
    built = native.build(tmp_path)
    monkeypatch.setattr(native, "build", lambda: built)
    lesser = native.loaded.__wrapped__()
    assert isinstance(lesser, ctypes.CDLL)
    monkeypatch.setattr(native.bound, "library", lesser)
    for dtype in native.DTYPES:
        weight = (torch.randn(70, 51) / 7).to(dtype)
        weight[0], weight[1] = 1, -1  # all codes at their ends, with one sign
        packed = matmul.pack_linear(weight)
        x = torch.randn(9, 51).to(dtype)
        x[0], x[1] = 1, -1
        assert_close(matmul.linear(x, packed), (x.double() @ weight.double().T).to(dtype))
        formats = [(format, 16) for format in quant.WEIGHT_FORMATS]
        for format, group in [*formats, ("int4", 8), ("int4", 32)]:
            quantized = quant.quantize_weight(weight, format, group)
            packed = matmul.pack_linear(quantized)
            assert_close(matmul.linear(x, packed), quant.linear_reference(x, quantized))
        rows = rowwise.act_mul_int8(x[:, :50])
        assert torch.equal(rows.codes, rowwise.quantize_int8(rowwise.act_mul(x[:, :50])).codes)
        case = paged([1, 17, 300], head_dim=20, dtype=dtype)
        q = torch.randn(3, 14, 20).to(dtype)
        y = attention.decode_attention(
            q,
            case.kv,
            case.decode(),
            scale=0.2,
        )
        assert_close(y, dense_attention(q, case, [1, 1, 1], 0.2, None))
        y = attention.prefill_attention(
            q,
            case.kv,
            case.prefill([1, 1, 1]),
            scale=0.2,
            window=40,
        )
        assert_close(y, dense_attention(q, case, [1, 1, 1], 0.2, 40))
        rolled = rolled_paged(
            [300, 20], [50, 3], [Roll(4, 100, 16), None],
            num_heads=14, head_dim=20, dtype=dtype, num_scratch=1,
        )  # fmt: skip
        q = torch.randn(53, 14, 20).to(dtype)
        y = attention.prefill_attention(
            q,
            rolled.kv,
            rolled.prefill([50, 3]),
            scale=0.2,
            rolling=rolled.rolling,
        )
        assert_close(y, dense_rolled_attention(q, rolled, 0.2))
        assert_close(rowwise.act_mul(x[:, :50]), act_mul_reference(x[:, :50]))
        ones = torch.ones(51, dtype=dtype)
        assert_close(rowwise.rms_norm(x, ones, 1e-5), rms_norm_reference(x, ones, 1e-5))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names kinds of x86-64")
@pytest.mark.parametrize("kind", ["x86-64", "x86-64-v3", "skylake-avx512", "sapphirerapids"])
def test_the_sources_are_valid_for_other_cpus(native_path, kind):
    compiler = native.find_compiler()
    assert compiler is not None
    flags = [flag for flag in native.FLAGS if not flag.startswith("-march")]
    flags += [f"-march={kind}", f"-I{native.FOLDER}", "-fsyntax-only", "-w"]
    for source in native.SOURCES:
        subprocess.run([compiler, *flags, str(native.FOLDER / source)], check=True)


def test_the_matrix_unit_gives_the_bits_of_the_vectors(native_path, tmp_path, monkeypatch):
    """Integer sums are exact, so that it may serve many rows and leave few to the vectors; bf16 it
    serves at any number of rows."""
    if "amx_int8" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no matrix unit (AMX)")
    unit = native.bound.library
    assert unit.pk_matrix_unit() == 1
    without = ["-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"]
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, *without])
    built = native.build(tmp_path)
    monkeypatch.setattr(native, "build", lambda: built)
    vectors = native.loaded.__wrapped__()
    assert vectors is not None and vectors.pk_matrix_unit() == 0
    formats: tuple[quant.WeightFormat, ...] = ("int8", "int4")
    for dtype, format, inputs in itertools.product(native.DTYPES, formats, (51, 400, 8300)):
        weight, x = torch.randn(70, inputs) / 7, torch.randn(300, inputs).to(dtype)
        x[7], x[9, 3] = 0, 1e4
        packed = matmul.pack_linear(quant.quantize_weight(weight, format), torch.randn(70))
        for num_rows in (1, 3, 4, 8, 17, 129, 300):
            found = []
            for library in (unit, vectors):
                monkeypatch.setattr(native.bound, "library", library)
                found.append(matmul.linear(x[:num_rows], packed))
            assert torch.equal(*found), (dtype, format, inputs, num_rows)


def test_a_failed_build_is_one_warning(monkeypatch, tmp_path, caplog):
    compiler = shutil.which("false")
    monkeypatch.setattr(native, "find_compiler", lambda: compiler)
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    with caplog.at_level(logging.WARNING):
        assert native.loaded.__wrapped__() is None
    assert len(caplog.records) == 1
    assert "plain PyTorch runs instead" in caplog.text


def test_no_compiler_is_one_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    with caplog.at_level(logging.WARNING):
        assert native.loaded.__wrapped__() is None
    assert len(caplog.records) == 1
    assert "no C++ compiler found" in caplog.text
