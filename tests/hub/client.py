"""Points the hub's client at a hub of a test: in this process, or in another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from tests.hub.server import Hub


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """What HF_ENDPOINT and HF_HUB_CACHE would have set when the client was imported."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(cache / "harnesses.json"))


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """For another process."""
    return {
        **os.environ,
        **{"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"},
        "HF_HUB_DOWNLOAD_TIMEOUT": "100",  # a test may hold a file up for longer than the default
    }


def process(hub: Hub, home: Path, code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs `code` with the hub and a cache below `home`."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment(hub, home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
