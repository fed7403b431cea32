"""Ranks on other machines: how they are started, and how they connect to the first rank.

Each end proves to the other that it knows a secret of this group (channel/proof.py). What then
travels, steps and rows of activations, is not encrypted: the network between the machines of a
group has to be private, as for NCCL.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from typing import Protocol

import psutil

from penstock.workers.channel.proof import NONCE_BYTES, Proof
from penstock.workers.engine.group import wire
from penstock.workers.errors import LoadError
from penstock.workers.experts.expert_file import Manifest

CONNECT_S = 120.0  # for a rank's process to start and to connect
DIGEST_BYTES = 32
LOOPBACK = "lo"


class Machine(Protocol):
    """Another machine of a group."""

    @property
    def experts(self) -> Manifest | None:
        """Of the file there that expert caches are filled from; None: each rank writes its own."""

    def start(self, address: str, secret: str) -> None:
        """Start a rank there that connects to `address`, HOST:PORT, and knows `secret`."""

    def end(self) -> None:
        """End all ranks that were started there."""


@dataclass(frozen=True, slots=True)
class FarRanks:
    """The machines of a group beside this one, whose address `host` they can reach."""

    host: str
    machines: tuple[Machine, ...]

    @property
    def num_machines(self) -> int:
        return 1 + len(self.machines)


class Reception:
    """Where ranks of other machines connect."""

    def __init__(self, host: str):
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(CONNECT_S)
        name, port = self._listener.getsockname()[:2]
        self.address = f"{name}:{port}"
        self.secret = secrets.token_hex(32)

    def accept(self) -> socket.socket:
        """The next that proves to know the secret. Raises LoadError if none comes in time."""
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                raise LoadError(
                    f"a rank on another machine did not connect to {self.address} within "
                    f"{CONNECT_S:g} s ({error}); machines of a group must reach one another"
                ) from error
            try:
                _welcome(peer, Proof(self.secret, own="leader", peer="rank"))
            except wire.PeerGone:
                peer.close()
                continue
            return peer

    def close(self) -> None:
        self._listener.close()


def dial(address: str, secret: str) -> socket.socket:
    """Connect to the first rank's reception. Raises PeerGone unless it proves the secret, too."""
    host, _, port = address.rpartition(":")
    try:
        peer = socket.create_connection((host, int(port)), CONNECT_S)
    except OSError as error:
        raise wire.PeerGone(f"{address}: {error}") from error
    proof = Proof(secret, own="rank", peer="leader")
    peer.sendall(proof.nonce)
    nonce, shown = wire.exactly(peer, NONCE_BYTES), wire.exactly(peer, DIGEST_BYTES)
    if not proof.is_of_peer(shown, nonce):
        peer.close()
        raise wire.PeerGone(f"{address} does not know the secret of this group")
    peer.sendall(proof.of_own(nonce))
    _settle(peer)
    return peer


def interface_of(host: str) -> str:
    """The name of the network interface that has this address. Raises LoadError if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == host for each in addresses):
            return name
    raise LoadError(f"no network interface of this machine has the address {host}")


def free_port(host: str) -> int:
    """A port that nothing listens on now."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def _welcome(peer: socket.socket, proof: Proof) -> None:
    peer.settimeout(CONNECT_S)
    nonce = wire.exactly(peer, NONCE_BYTES)
    try:
        peer.sendall(proof.nonce + proof.of_own(nonce))
    except OSError as error:
        raise wire.PeerGone(str(error)) from error
    if not proof.is_of_peer(wire.exactly(peer, DIGEST_BYTES), nonce):
        raise wire.PeerGone("it does not know the secret")
    _settle(peer)


def _settle(peer: socket.socket) -> None:
    """From now on: no limit to a wait, but a machine that is gone is noticed."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
