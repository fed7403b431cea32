"""One of the other ranks of a group: loads its part, then computes what the first rank says.

`python -m penstock.workers.engine.group.follower PARENT SOCKET_FD`, by leader.py, or HOST:PORT in
place of the socket, by another machine of the group. It ends with its parent, also where it waits
in shared memory, and with the first rank's connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from penstock.workers.config import EngineConfig
from penstock.workers.cpu_affinity import keep_to
from penstock.workers.engine.draft import load_draft
from penstock.workers.engine.group import wire
from penstock.workers.engine.group.commands import Commands
from penstock.workers.engine.group.far import dial
from penstock.workers.engine.group.pinning import pinned
from penstock.workers.engine.load import load_configured
from penstock.workers.engine.shortage import named_shortages
from penstock.workers.experts.build import settings_in_group
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.experts.neurons.thresholds import Calibration
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.decoder import ShardDecoder
from penstock.workers.models.shards.memory import ExchangeSizes
from penstock.workers.models.shards.rank import Rank
from penstock.workers.packed.cache import PackedCache
from penstock.workers.weights.model_digest import verified_folder

log = logging.getLogger("penstock.engine")

PR_SET_PDEATHSIG = 1  # of prctl(2)


def follow(peer: socket.socket) -> None:
    """Until the first rank ends the connection. Raises PeerGone then."""
    kind, contents = wire.receive(peer)
    if kind != wire.SETTINGS:
        raise wire.PeerGone(f"a message of kind {kind} before the settings")
    settings = json.loads(contents)
    device = settings["device"]
    config = pinned(EngineConfig(**settings["config"]), device, settings["place"])
    if config.cores is not None:  # before this thread starts others
        keep_to(config.cores)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if device == "cuda":
        torch.cuda.set_device(settings["place"])
    try:
        commands = _loaded(config, device, settings, peer)
    except Exception as error:
        wire.send(peer, wire.FAILED, str(error).encode())
        raise
    commands.run()


def _loaded(
    config: EngineConfig, device: str, settings: dict[str, Any], peer: socket.socket
) -> Commands:
    """This rank's part of the model and of its draft model. Raises LoadError and ConfigError."""
    rank = Rank(**{**settings["rank"], "sizes": ExchangeSizes(**settings["rank"]["sizes"])})
    folder = Path(settings["folder"]) if settings["folder"] else verified_folder(config)
    with named_shortages(config.model, device):
        text = settings["experts"]
        manifest = None if text is None else Manifest.from_json(text)
        share = rank.expert_share(ModelConfig.from_pretrained(folder))
        text = settings["calibration"]
        calibration = None if text is None else Calibration.from_values(json.loads(text))
        experts = settings_in_group(config, manifest, share, calibration)
        model = load_configured(
            config, folder, device, progress=False, experts=experts, rank=rank,
            cache=PackedCache.of(config, device),
        )  # fmt: skip
        draft = load_draft(config, folder, device, model, rank=rank)
    assert isinstance(model, ShardDecoder) and isinstance(draft, ShardDecoder | None)
    return Commands(peer, config, model, draft)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when that one ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(0)


def main() -> None:
    parent, connection = sys.argv[1:]
    _end_with(int(parent))
    secret = sys.stdin.read()  # empty for an inherited socket, which no other process has
    with contextlib.suppress(wire.PeerGone):
        follow(dial(connection, secret) if secret else socket.socket(fileno=int(connection)))


if __name__ == "__main__":
    main()
