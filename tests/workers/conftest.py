"""For all tests of workers: one thread; and for those of experts: thresholds, made once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def thresholds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The file of a checkpoint's neuron thresholds, by its name."""
    from penstock.workers.calibrate import calibrate
    from tests.workers.checkpoints import make_checkpoint

    root = tmp_path_factory.mktemp("thresholds")

    @functools.cache
    def made(name: str) -> str:
        path = root / f"{name}.json"
        folder = str(make_checkpoint(name))
        calibrate(folder, None, 640, weights="fp32", folder=str(root)).save(path)
        return str(path)

    return made
