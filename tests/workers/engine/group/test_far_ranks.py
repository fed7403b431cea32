"""Ranks that connect as those of other machines do, from processes of this one.

Several Ray nodes: tests/deployments/supervision/test_group_nodes.py.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from penstock.workers.channel.proof import NONCE_BYTES
from penstock.workers.config import EngineConfig
from penstock.workers.engine.group import far, wire
from penstock.workers.engine.group.expert_shares import shares_of_machine
from penstock.workers.engine.group.far import FarRanks, Reception, dial
from penstock.workers.engine.group.process import EXIT_STATUS, RankProcess
from penstock.workers.engine.load import load_engine
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.experts.writer import write_expert_file
from tests.workers.checkpoints import make_checkpoint
from tests.workers.engine.group.forked_ranks import forked_ranks
from tests.workers.engine.group.test_group import engine_of, run
from tests.workers.experts.moe_cases import experts_of

HOST = "127.0.0.1"


class Here:
    """A machine of which this process is the parent."""

    experts: Manifest | None = None

    def __init__(self) -> None:
        self.started: list[RankProcess] = []

    def start(self, address: str, secret: str) -> None:
        self.started.append(RankProcess(str(os.getpid()), address, secret=secret))

    def end(self) -> None:
        for process in self.started:
            process.end()


class Trespassed(Here):
    """Before its rank connects, others do that do not know the secret."""

    def start(self, address: str, secret: str) -> None:
        host, port = address.split(":")
        for sent in (b"", secrets.token_bytes(NONCE_BYTES + far.DIGEST_BYTES)):
            with socket.create_connection((host, int(port))) as peer:
                peer.sendall(sent)
        super().start(address, secret)


def group_of(model: str, num_ranks: int, machines: tuple[Here, ...], **options):
    values = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    config = EngineConfig(
        model=model, device="cpu", threads=1, tensor_parallel_size=num_ranks,
        nodes_per_worker=1 + len(machines), **{**values, **options},
    )  # fmt: skip
    return load_engine(config, far=FarRanks(HOST, machines))


@pytest.mark.parametrize(
    ("name", "num_ranks", "machines", "options"),
    [
        ("llama", 2, (Here(),), {}),
        ("olmoe-4-kv", 4, (Here(),), {"num_blocks": 26}),  # two ranks each
        ("llama-4-kv", 3, (Here(), Trespassed()), {"weights": "int8"}),
    ],
)
def test_ids_of_one_process(name, num_ranks, machines, options):
    found = []
    for make in (
        lambda: group_of(str(make_checkpoint(name)), num_ranks, machines, **options),
        lambda: engine_of(str(make_checkpoint(name)), 1, **options),
    ):
        with forked_ranks():
            engine = make()
        try:
            found.append(run(engine))
        finally:
            engine.close()
    assert found[0] == found[1]


def test_experts_of_each_machine(tmp_path):
    """Caches are filled from the file of their machine, or, where it has none, of the rank's own;
    these have their ranks' experts only."""
    folder, found = make_checkpoint("olmoe-4-kv"), []
    options = {"expert_cache_gb": 0.0002, "expert_store_dir": str(tmp_path)}
    config = EngineConfig(tensor_parallel_size=3, nodes_per_worker=3)
    experts = experts_of(folder)
    shares = shares_of_machine(config, experts.config, 1)
    stored = Here()
    stored.experts = write_expert_file(experts, tmp_path / "a", torch.float32, shares=shares)
    with forked_ranks():
        group = group_of(str(folder), 3, (stored, Here()), **options)
    one = engine_of(str(folder), 1)
    for engine in (group, one):
        try:
            found.append(run(engine))
            engine.model.use_experts(stored.experts, machine=1)  # on a rank with a file, mid-way
            found.append(run(engine))
        finally:
            engine.close()
    assert found == [found[-1]] * 4


RUNS = """
import psutil, sys, time
from tests.workers.checkpoints import make_checkpoint
from tests.workers.engine.group.test_far_ranks import Here, group_of
from tests.workers.engine.group.test_group import run
engine = group_of(sys.argv[1], 2, (Here(),))
run(engine)
(child,) = psutil.Process().children()
print(child.pid, flush=True)
if sys.argv[2] == "idle":
    time.sleep(200)
while True:
    run(engine)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_far_rank_that_ends_takes_the_worker_with_it(state):
    leader = subprocess.Popen(
        [sys.executable, "-c", RUNS, str(make_checkpoint("llama")), state],
        cwd=Path(__file__).parents[4], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert leader.stdout is not None
        psutil.Process(int(leader.stdout.readline())).kill()
        assert leader.wait(100) == EXIT_STATUS
    finally:
        leader.kill()
        leader.wait()


def test_a_rank_ends_with_the_first_one():
    leader = subprocess.Popen(
        [sys.executable, "-c", RUNS, str(make_checkpoint("llama")), "idle"],
        cwd=Path(__file__).parents[4], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert leader.stdout is not None
    rank = psutil.Process(int(leader.stdout.readline()))
    leader.kill()
    leader.wait()
    deadline_s = time.monotonic() + 60
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "an orphan"
        time.sleep(0.1)


def test_a_rank_trusts_no_other_leader():
    """A process that listens at the address and does not know the secret."""
    with socket.create_server((HOST, 0)) as listener:

        def pretend() -> None:
            peer, _ = listener.accept()
            with peer:
                wire.exactly(peer, NONCE_BYTES)
                peer.sendall(secrets.token_bytes(NONCE_BYTES + far.DIGEST_BYTES))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(wire.PeerGone, match="does not know the secret"):
            dial(f"{HOST}:{listener.getsockname()[1]}", "secret")
        thread.join()


def test_no_rank_in_time(monkeypatch):
    monkeypatch.setattr(far, "CONNECT_S", 0.2)
    reception = Reception(HOST)
    with pytest.raises(LoadError, match="machines of a group must reach one another"):
        reception.accept()
    reception.close()


def test_shares_are_equal():
    with pytest.raises(ConfigError, match="cannot be shared equally by nodes_per_worker 2"):
        EngineConfig(tensor_parallel_size=3, nodes_per_worker=2)


def test_an_address_has_an_interface():
    assert far.interface_of(HOST) == far.LOOPBACK
    with pytest.raises(LoadError, match="no network interface"):
        far.interface_of("192.0.2.1")  # kept for documents by RFC 5737
