"""Servers in the process of a test wait for their store and for costly texts for long enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deployments.ingress.patience import be_patient


@pytest.fixture(scope="module", autouse=True)
def patient_servers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        yield
