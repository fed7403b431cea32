"""Our folder is called kernels, as is a package on PyPI that transformers looks for."""

from __future__ import annotations

import importlib.metadata

import pytest
from transformers.utils import is_kernels_available


def test_transformers_does_not_take_our_folder_for_the_package():
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")
    assert not is_kernels_available()
