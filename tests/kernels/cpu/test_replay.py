"""Recorded calls made again: the bits of the calls themselves, and what cannot be recorded."""

from __future__ import annotations

import threading

import pytest
import torch

from penstock.kernels import quant
from penstock.kernels.cpu import native
from penstock.kernels.cpu.replay import record
from penstock.kernels.matmul import linear, pack_linear
from penstock.kernels.rowwise import act_mul, rms_norm, rms_norm_int8

pytestmark = pytest.mark.usefixtures("native_path")
ROWS, DIM = 3, 70


def a_pass(memory):
    """Norm, quantised linear, SiLU * mul: from `memory.x` to `memory.y`, and nothing else."""
    rows = quant.Int8Rows.inside(memory["normed"], quant.INT8_GROUP, memory["scales"])
    x = rms_norm_int8(memory["x"], memory["weight"], 1e-6, out=rows)
    wide = linear(x, memory["linear"], out=memory["wide"])
    act_mul(wide, out=memory["y"])


@pytest.fixture
def memory():
    return {
        "x": torch.randn(ROWS, DIM),
        "weight": torch.randn(DIM),
        "normed": torch.empty(ROWS, DIM),
        "scales": torch.empty(ROWS, 2),
        "linear": pack_linear(quant.quantize_weight(torch.randn(2 * DIM, DIM), "int8")),
        "wide": torch.empty(ROWS, 2 * DIM),
        "y": torch.empty(ROWS, DIM),
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_a_program_does_what_the_calls_did(memory, threads):
    torch.set_num_threads(threads)
    with record() as recording:
        a_pass(memory)
    assert recording is not None
    program = recording.program()
    assert recording.computed == [] and program is not None and program.num_calls == 3
    for _ in range(3):
        memory["x"].normal_()
        for name in ("normed", "scales", "wide", "y"):
            memory[name].fill_(float("nan"))
        program.run()
        made = memory["y"].clone()
        memory["y"].fill_(float("nan"))
        a_pass(memory)
        assert torch.equal(made, memory["y"])


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x * 2,
        lambda x: x.clamp_(-1, 1),
        lambda x: x.new_empty(3),
        lambda x: x.T.contiguous(),
        lambda x: torch.zeros(2),
        lambda x: x.topk(2),
        lambda x: x.float().double(),
    ],
)
def test_what_pytorch_computes_is_noticed(memory, other):
    with record() as recording:
        a_pass(memory)
        other(memory["x"])
    assert recording is not None and recording.computed and recording.program() is None


def test_views_are_not_computing(memory):
    x = memory["x"]
    with record() as recording, torch.inference_mode():
        x.view(-1, 7)[:2].split_with_sizes([3, 4], dim=1)
        x.view(torch.int32), x.contiguous(), x.unflatten(1, (7, 10)), x.T
    assert recording is not None and recording.computed == []


def test_an_operator_that_allocates_its_result_is_noticed(memory):
    with record() as recording:
        rms_norm(memory["x"], memory["weight"], 1e-6)
    assert recording is not None and recording.program() is None


def test_other_threads_are_not_recorded_and_an_error_ends_it(memory):
    library = native.bound.library
    with record() as recording:
        other = threading.Thread(target=lambda: a_pass(memory))
        other.start()
        other.join()
        assert native.bound.library is recording
    assert recording.program().num_calls == 0
    with pytest.raises(ZeroDivisionError), record():
        1 / 0  # noqa: B018
    assert native.bound.library is library


def test_there_is_nothing_to_record_without_a_library(monkeypatch):
    monkeypatch.setattr(native.bound, "library", None)
    with record() as recording:
        assert recording is None
