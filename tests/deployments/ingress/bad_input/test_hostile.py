"""The hostile corpus against every front end of one server, with good traffic beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.deployments.ingress.bad_input.hostile import CASES, Fronts, GoodTraffic, check
from tests.deployments.serving import EngineBackend, Serving


@pytest.fixture(scope="module")
def fronts(backend: EngineBackend) -> Iterator[Fronts]:
    """All front ends; requests served in parallel must be unchanged in the end."""
    with (
        Serving(backend) as serving,
        GoodTraffic(serving.base_url, serving.grpc_target),
        Fronts(serving.base_url, serving.grpc_target) as opened,
    ):
        yield opened


@pytest.fixture(scope="module")
def served(fronts: Fronts) -> dict[str, Any]:
    return {name: front.ask().answer for name, front in fronts.by_name.items()}


@pytest.mark.parametrize(("front", "name"), CASES, ids=map(" - ".join, CASES))
def test_refused_by_name_and_harms_no_other_request(
    fronts: Fronts, served: dict[str, Any], backend: EngineBackend, front: str, name: str
) -> None:
    check(fronts.by_name[front], name, served[front])
    assert backend.ready(), "the engine's thread has ended"
