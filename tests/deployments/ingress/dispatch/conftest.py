"""Two workers for the tests of dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.deployments.ingress.dispatch.test_pool import Node


@pytest.fixture
def nodes(model: Any) -> Iterator[list[Node]]:
    made = [Node(model) for _ in range(2)]
    for node in made:
        node.thread.start()
    yield made
    for node in made:
        node.stop()
