"""The connection under TLS carries the same messages as the one in the clear, or ends."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import ssl
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.deployments.security.authority import make_all, new_leaf, read_authority
from penstock.deployments.security.cluster_links import ClusterCertificate, der_of
from penstock.deployments.security.identity import Identity
from penstock.workers.channel import encrypted
from penstock.workers.channel.encrypted import EncryptedConnection
from penstock.workers.channel.framing import CLOSED, HEADER, READ_BYTES
from penstock.workers.errors import ConfigError
from tests.workers.channel.ends import Certs, End, both, sockets, until

SIZES = (0, 1, 15, 200, 4096, 16_376, 16_384, 65_528, 65_536, 70_001, 300_000)
CLEAR = (None, None)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return Certs(tmp_path_factory.mktemp("certs"))


def message(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


@settings(max_examples=30)
@given(
    up=st.lists(st.sampled_from(SIZES), max_size=25),
    down=st.lists(st.sampled_from(SIZES), max_size=25),
    seed=st.integers(0, 1000),
    is_encrypted=st.booleans(),
)
def test_messages_arrive_whole_and_in_order(
    certs: Certs, up: list[int], down: list[int], seed: int, is_encrypted: bool
) -> None:
    """In both directions at once, from threads of their own, over sockets that take little."""
    sent = [[message(number, size) for number, size in enumerate(sizes)] for sizes in (up, down)]

    async def scenario() -> list[list[bytes]]:
        ends = both(certs.pair() if is_encrypted else CLEAR, seed)
        threads = [
            threading.Thread(target=_send_all, args=(end, mine))
            for end, mine in zip(ends, sent, strict=True)
        ]
        for thread in threads:
            thread.start()
        sizes = [len(down), len(up)]
        await until(lambda: [len(end.messages) for end in ends] == sizes or any_reason(ends))
        for thread in threads:
            thread.join()
        assert not any(end.reasons for end in ends)
        got = [list(end.messages) for end in ends]
        for end in ends:  # the handshake is over, if nothing was sent
            end.connection.send(b"")
        await until(lambda: all(len(end.messages) > len(mine) for end, mine in zip(ends, got)))
        ends[0].socket.is_choppy = False
        ends[0].connection.end("enough")
        await until(lambda: ends[1].reasons)
        assert ends[1].reasons == [CLOSED]
        return got

    assert asyncio.run(scenario()) == sent[::-1]


def _has_last(end: End) -> bool:
    return end.messages[-1:] == [b"last"]


def any_reason(ends: Sequence[End]) -> bool:
    return any(end.reasons for end in ends)


def _send_all(end: End, messages: list[bytes]) -> None:
    for each in messages:
        end.connection.send(each)


class Twins(RuleBasedStateMachine):
    """The same is done to a connection in the clear and to one under TLS."""

    certs: Certs

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.pairs = [both(CLEAR), both(self.certs.pair())]
        self.sent: list[list[bytes]] = [[], []]

    @rule(side=st.integers(0, 1), size=st.sampled_from(SIZES))
    def send(self, side: int, size: int) -> None:
        self.sent[side].append(message(len(self.sent[side]), size))
        for pair in self.pairs:
            pair[side].connection.send(self.sent[side][-1])

    @rule(side=st.integers(0, 1), is_blocked=st.booleans())
    def block(self, side: int, is_blocked: bool) -> None:
        for pair in self.pairs:
            pair[side].socket.is_blocked = is_blocked

    @rule(turns=st.integers(1, 40))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.run_until_complete(asyncio.sleep(0))

    @invariant()
    def what_came_is_a_beginning_of_what_was_sent(self) -> None:
        for pair in getattr(self, "pairs", ()):
            for side, end in enumerate(pair):
                sent = self.sent[1 - side]
                assert end.messages == sent[: len(end.messages)] and not end.reasons

    def teardown(self) -> None:
        for pair in self.pairs:
            for end in pair:
                end.socket.is_blocked = False

        def is_all_there(pair: tuple[End, End]) -> bool:
            return [end.messages for end in pair] == self.sent[::-1]

        self.loop.run_until_complete(until(lambda: all(map(is_all_there, self.pairs))))
        for pair in self.pairs:
            assert not any(end.connection.is_stuck for end in pair)
            assert [end.connection.num_unsent_bytes for end in pair] == [0, 0]
            for number, end in enumerate(pair):  # the handshake is over, if nothing was sent
                end.connection.send(b"last")
                other = pair[1 - number]
                self.loop.run_until_complete(until(partial(_has_last, other)))
            pair[0].connection.end("done")
            self.loop.run_until_complete(until(partial(any_reason, pair[1:])))
            assert pair[1].reasons == [CLOSED]
        self.loop.close()


def test_both_connections_do_the_same(certs: Certs) -> None:
    Twins.certs = certs
    case = Twins.TestCase
    case.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
    case("runTest").runTest()


def test_a_message_as_large_as_they_may_be_passes(certs: Certs) -> None:
    large = message(1, 20 << 20)

    async def scenario() -> None:
        one, other = both(certs.pair())
        one.connection.send(large)
        other.connection.send(b"meanwhile")
        one.connection.send(b"after it")
        await until(lambda: len(other.messages) == 2 and one.messages)
        assert other.messages == [large, b"after it"] and one.messages == [b"meanwhile"]
        one.connection.end("done")

    asyncio.run(scenario())


def test_both_ends_know_the_servers_certificate(certs: Certs) -> None:
    async def scenario() -> list[bytes]:
        ends = both(certs.pair())
        assert [end.connection.binding for end in ends] == [b"", b""]
        ends[1].connection.send(b"challenge")  # waits for the handshake
        await until(lambda: ends[0].messages)
        return [end.connection.binding for end in ends]

    der = der_of(certs.worker.newest())
    assert asyncio.run(scenario()) == [hashlib.sha256(der).digest()] * 2


def test_an_end_that_does_not_say_so_was_cut(certs: Certs) -> None:
    async def scenario() -> list[str]:
        one, other = both(certs.pair())
        one.connection.send(b"hello")
        await until(lambda: other.messages)
        one.socket.shutdown(socket.SHUT_WR)
        await until(lambda: other.reasons)
        return other.reasons

    assert asyncio.run(scenario()) == ["the connection was cut"]


class Between:
    """Copies bytes between two sockets, and changes some: `alter` gets what goes to the server."""

    def __init__(self, alter: Any):
        self.client, near = sockets()
        far, self.server = sockets()
        for each in (near, far):
            each.setblocking(False)
        self._tasks = [
            asyncio.ensure_future(self._copy(near, far, alter)),
            asyncio.ensure_future(self._copy(far, near, lambda data: data)),
        ]

    async def _copy(self, source: socket.socket, target: socket.socket, alter: Any) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, 1 << 16):
            await loop.sock_sendall(target, alter(data))


@pytest.mark.parametrize("place", [0, 5, 12, -1])
def test_a_changed_byte_ends_the_connection(certs: Certs, place: int) -> None:
    """Of a record's head, of its content, of its digest."""

    async def scenario() -> tuple[End, End]:
        is_altered = False

        def alter(data: bytes) -> bytes:
            changed = bytearray(data)
            if is_altered:
                changed[place] ^= 0x40
            return bytes(changed)

        between, (client, server) = Between(alter), certs.pair()
        one, other = End(between.client, client), End(between.server, server)
        one.connection.send(b"as it is")
        await until(lambda: other.messages)
        is_altered = True
        one.connection.send(b"a prompt")
        await until(lambda: other.reasons and one.reasons)
        return one, other

    one, other = asyncio.run(scenario())
    assert other.messages == [b"as it is"]
    assert other.reasons[0].startswith("TLS failed: ") and len(one.reasons) == 1


def leaf_of(folder: Path, role: Any, cluster: str = "test") -> ClusterCertificate:
    make_all(folder, cluster, days=1)
    return ClusterCertificate(str(folder), role)


def refusals(client: Any, server: Any) -> tuple[list[str], list[str], list[bytes]]:
    """Why client and server end, and all that either has received."""

    async def scenario() -> tuple[list[str], list[str], list[bytes]]:
        one, other = both((client, server))
        one.connection.send(b"secret")
        other.connection.send(b"secret")
        await until(lambda: one.reasons and other.reasons)
        return one.reasons, other.reasons, one.messages + other.messages

    return asyncio.run(scenario())


def test_a_certificate_of_another_ca_is_refused(certs: Certs, tmp_path: Path) -> None:
    other = leaf_of(tmp_path, "worker")
    ours, _, got = refusals(certs.ingress.client_end("worker"), other.server_end("ingress"))
    assert ours == ["TLS failed: unable to get local issuer certificate"] or "self" in ours[0]
    assert not got
    stranger = leaf_of(tmp_path, "ingress")
    _, ours, got = refusals(stranger.client_end("worker"), certs.worker.server_end("ingress"))
    assert ours[0].startswith("TLS failed: ") and b"secret" not in got


def test_a_certificate_of_another_role_is_refused(certs: Certs) -> None:
    """All are of one CA."""
    ours, _, got = refusals(certs.ingress.client_end("gate"), certs.worker.server_end("ingress"))
    assert ours == ["its certificate is refused: it is a worker, not a gate"] and not got
    _, ours, got = refusals(certs.worker.client_end("worker"), certs.worker.server_end("ingress"))
    assert ours == ["its certificate is refused: it is a worker, not a ingress"]
    assert b"secret" not in got


def test_an_expired_certificate_is_refused(certs: Certs, tmp_path: Path) -> None:
    """Of an end that has started before it expired: files that have are not loaded."""
    authority = read_authority(certs.folder)
    contexts = {}
    for role in ("worker", "ingress"):
        leaf = new_leaf(authority, Identity("test", role), days=-60 / 86_400)  # a minute ago
        leaf.write(tmp_path, role)
        is_server = role == "worker"
        kind = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
        context = contexts[role] = ssl.SSLContext(kind)
        context.check_hostname = False
        context.load_verify_locations(certs.folder / "ca.crt")
        context.load_cert_chain(tmp_path / f"{role}.crt", tmp_path / f"{role}.key")
    server = encrypted.TlsEnd(contexts["worker"], lambda _: None, is_server=True, certificate=b"x")
    ours, _, got = refusals(certs.ingress.client_end("worker"), server)
    assert ours == ["TLS failed: certificate has expired"] and not got
    client = encrypted.TlsEnd(contexts["ingress"], lambda _: None)
    _, ours, got = refusals(client, certs.worker.server_end("ingress"))
    assert ours == ["TLS failed: certificate has expired"] and b"secret" not in got
    (tmp_path / "ca.crt").write_bytes((certs.folder / "ca.crt").read_bytes())
    with pytest.raises(ConfigError, match=r"cluster_certs_dir .* expired at"):
        ClusterCertificate(str(tmp_path), "worker")


def test_an_end_without_a_certificate_is_refused(certs: Certs) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    bare = encrypted.TlsEnd(context, lambda _: None)
    _, ours, got = refusals(bare, certs.worker.server_end("ingress"))
    assert ours[0].startswith("TLS failed: ") and b"secret" not in got


def test_tls_1_2_is_refused(certs: Certs) -> None:
    end = certs.ingress.client_end("worker")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(certs.folder / "ca.crt")
    context.load_cert_chain(certs.folder / "ingress.crt", certs.folder / "ingress.key")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    old = encrypted.TlsEnd(context, end.check_peer)
    _, ours, got = refusals(old, certs.worker.server_end("ingress"))
    assert ours[0].startswith("TLS failed: ") and not got


CLIENT_HELLO = b"\x16\x03\x01\x40\x00" + b"\x01\x01\x86\xa0\x03\x03"  # of 100,000 bytes


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "no TLS handshake within 0.3 s"),
        (CLIENT_HELLO, "no TLS handshake within 0.3 s"),
        (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", "TLS failed: "),
        (HEADER.pack(5, 0) + b"hello", "TLS failed: "),  # a message in the clear
        (
            (CLIENT_HELLO + bytes(16378) + (b"\x16\x03\x01\x40\x00" + bytes(16384)) * 3),
            "a TLS handshake of more than 32768 bytes",
        ),
    ],
)
def test_half_a_handshake_is_bounded(
    certs: Certs, monkeypatch: pytest.MonkeyPatch, said: bytes, why: str
) -> None:
    monkeypatch.setattr(encrypted, "HANDSHAKE_S", 0.3)

    async def scenario() -> tuple[End, int]:
        ours, theirs = sockets()
        ours.setblocking(False)
        end = End(theirs, certs.worker.server_end("ingress"))
        assert isinstance(end.connection, EncryptedConnection)
        await asyncio.get_running_loop().sock_sendall(ours, said)
        await until(lambda: end.reasons)
        ours.close()
        return end, end.connection._num_handshake_bytes

    end, num_bytes = asyncio.run(scenario())
    assert end.reasons[0].startswith(why) and not end.messages
    assert num_bytes <= encrypted.MAX_HANDSHAKE_BYTES + READ_BYTES


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_what_waits_for_a_peer_that_never_reads_is_bounded(
    certs: Certs, is_encrypted: bool
) -> None:
    async def scenario() -> tuple[int, list[str]]:
        one, other = both(certs.pair() if is_encrypted else CLEAR, max_unsent_bytes=1 << 20)
        other.connection.send(b"ready")
        await until(lambda: one.messages)
        one.socket.is_blocked, most = True, 0
        while not one.reasons:
            one.connection.send(bytes(1 << 16))
            most = max(most, one.connection.num_unsent_bytes)
            await asyncio.sleep(0)
        return most, one.reasons

    most, reasons = asyncio.run(scenario())
    assert reasons == ["the other end does not read what is sent to it"]
    assert (1 << 20) - (1 << 18) < most <= (1 << 20) + 1000
