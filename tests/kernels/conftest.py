"""One thread, one seed, and the choice of CPU path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from penstock.kernels.cpu import native


@pytest.fixture(autouse=True)
def _one_thread_one_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def native_path() -> None:
    """The compiled operators. A machine without any compiler skips these tests, with a message."""
    if native.find_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    assert native.bound.library is not None, "a compiler is here, so the library must build"


@pytest.fixture
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain PyTorch, as on a machine without a compiler."""
    monkeypatch.setattr(native.bound, "library", None)


@pytest.fixture(params=["native", "torch"])
def cpu_path(request: pytest.FixtureRequest) -> str:
    """Runs the test once on each CPU path."""
    request.getfixturevalue(f"{request.param}_path")
    return str(request.param)
