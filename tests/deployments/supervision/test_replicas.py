"""What a replica logs: our lines come to Serve's logger as they are, with name and traceback."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from ray.serve._private.constants import SERVE_LOGGER_NAME

from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.replicas import configure_logging


class Kept(logging.Handler):
    """As Serve's file: formats and keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def serve_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """Serve's logger as it is in a replica; afterwards, all as before."""
    ours, serve, kept = logging.getLogger("penstock"), logging.getLogger(SERVE_LOGGER_NAME), Kept()
    monkeypatch.setattr(serve, "handlers", [kept])
    monkeypatch.setattr(serve, "disabled", False)
    monkeypatch.setattr(ours, "handlers", list(ours.handlers))
    monkeypatch.setattr(ours, "propagate", ours.propagate)
    level = ours.level
    yield kept
    ours.setLevel(level)


def test_lines_come_once_with_the_name_of_who_wrote_them(serve_file: Kept) -> None:
    configure_logging(ServeConfig(log_level="info"))
    configure_logging(ServeConfig(log_level="info"))
    logging.getLogger("penstock.requests").info("%s", '{"id": "100 %"}')
    logging.getLogger("penstock.gate").debug("not enabled")
    assert serve_file.lines == ['penstock.requests: {"id": "100 %"}']


def test_a_traceback_comes_along(serve_file: Kept) -> None:
    configure_logging(ServeConfig(log_level="info"))
    try:
        raise ValueError("broken ledger")
    except ValueError:
        logging.getLogger("penstock.gate").exception("the gate is at fault")
    (text,) = serve_file.lines
    assert text.startswith("penstock.gate: the gate is at fault\nTraceback")
    assert text.endswith("ValueError: broken ledger")
