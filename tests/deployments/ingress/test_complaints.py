"""What the loop of an ingress complains of; row 23 of the fault table has real descriptors."""

from __future__ import annotations

import asyncio
import errno
import logging
import os

import pytest

from penstock.deployments.ingress.complaints import Complaints


def test_descriptors_that_ran_out_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(Complaints())
    with caplog.at_level(logging.ERROR):
        for _ in range(2000):  # as asyncio does for each place in the listener's queue
            error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            loop.call_exception_handler({"message": "out of resources", "exception": error})
    loop.close()
    (said,) = caplog.records
    assert "raise the limit of open files" in said.getMessage() and said.exc_info is None


def test_other_faults_are_said_as_always(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(Complaints())
    with caplog.at_level(logging.ERROR):
        for number in range(2):
            error = ValueError(f"fault {number}")
            loop.call_exception_handler({"message": f"told {number}", "exception": error})
    loop.close()
    assert [each.getMessage().splitlines()[0] for each in caplog.records] == ["told 0", "told 1"]
