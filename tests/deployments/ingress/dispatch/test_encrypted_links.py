"""The channel under TLS: the same tokens, and nothing for whoever is in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.security.authority import make_all, renew_all
from penstock.deployments.security.cluster_links import ClusterCertificate, Role
from penstock.workers.channel import unproven
from penstock.workers.channel.encrypted import TlsSource, message_connection
from penstock.workers.channel.framing import MessageConnection, connected, listening
from penstock.workers.channel.unproven import MAX_UNPROVEN
from penstock.workers.request import FinishReason
from penstock.workers.stats import WorkerInfo
from tests.deployments.ingress.dispatch.test_pool import Node, alone, collect, request
from tests.deployments.waiting import until


def certificate(folder: Path, role: Role) -> ClusterCertificate:
    return ClusterCertificate(str(folder), role, reload_s=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certs")
    make_all(made, "test", days=20)
    return made


@pytest.fixture
def node(model: Any, folder: Path) -> Iterator[Node]:
    made = Node(model, tls=partial(certificate(folder, "worker").server_end, "ingress"))
    made.thread.start()
    yield made
    made.stop()


def pool_with(folder: Path, role: Role = "ingress") -> WorkerPool:
    return WorkerPool("test", tls=partial(certificate(folder, role).client_end, "worker"))


def test_many_requests_get_the_tokens_that_they_would_get_alone(model, node, run, folder):
    submitted = [request(n, 60, seed=n, temperature=0.7) for n in range(8)]

    async def scenario() -> list[list[int]]:
        pool = pool_with(folder)
        pool.update([node.channel.info])
        await until(lambda: pool.num_connected == 1)
        got = await asyncio.gather(*(collect(pool, each) for each in submitted))
        await pool.close()
        await node.is_idle()
        return [ids for ids, _ in got]

    assert node.channel.info.is_encrypted
    assert run(scenario()) == [alone(model, each) for each in submitted]


class Middle:
    """Ends the TLS of both sides with certificates of its own, passes all messages on, and keeps
    them."""

    def __init__(self, info: WorkerInfo, server: TlsSource, client: TlsSource):
        self.target, self._server, self._client = info.address, server, client
        self.heard: list[bytes] = []
        self.reasons: list[str] = []
        self.info = info

    async def start(self) -> None:
        self._listener, address = listening("127.0.0.1")
        self.info = replace(self.info, address=address)
        self._task = asyncio.ensure_future(self._accept())

    async def close(self) -> None:
        self._task.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            incoming, _ = await loop.sock_accept(self._listener)
            outgoing = await connected(self.target)
            ends: list[MessageConnection] = []

            def passed_to(
                number: int, ends: list[MessageConnection] = ends
            ) -> Callable[[bytes], None]:
                def passed(message: bytes) -> None:
                    self.heard.append(message)
                    ends[number].send(message)

                return passed

            ends.append(
                message_connection(
                    loop,
                    incoming,
                    self._server(),
                    on_message=passed_to(1),
                    on_end=self.reasons.append,
                )
            )
            ends.append(
                message_connection(
                    loop,
                    outgoing,
                    self._client(),
                    on_message=passed_to(0),
                    on_end=self.reasons.append,
                )
            )


def attempts(run: Any, middle: Middle, pool: WorkerPool) -> None:
    """The pool tries to connect through `middle`, a few times, in vain."""

    async def scenario() -> None:
        await middle.start()
        pool.update([middle.info])
        await until(lambda: len(middle.reasons) >= 4)
        assert not pool.num_connected and not pool.ready()
        await pool.close()
        await middle.close()

    run(scenario())


def test_a_middle_with_a_ca_of_its_own_hears_nothing(node, run, folder, tmp_path, caplog):
    make_all(tmp_path, "test", days=20)  # another CA of the same name
    middle = Middle(
        node.channel.info,
        partial(certificate(tmp_path, "worker").server_end, "ingress"),
        partial(certificate(tmp_path, "ingress").client_end, "worker"),
    )
    with caplog.at_level(logging.WARNING):
        attempts(run, middle, pool_with(folder))
    assert not middle.heard
    lines = [each.message for each in caplog.records if "refused the" in each.message]
    assert any("refused the worker" in each and "TLS failed" in each for each in lines)


def test_a_middle_with_certificates_of_the_cluster_gets_no_prompt(node, run, folder, tmp_path):
    """Both ends take its certificates, but their proofs are for one that it has not the key of."""
    for name in ("worker", "ingress"):  # its own ones, of the same CA
        (tmp_path / f"{name}.crt").write_bytes((folder / f"{name}.crt").read_bytes())
        (tmp_path / f"{name}.key").write_bytes((folder / f"{name}.key").read_bytes())
        (tmp_path / f"{name}.key").chmod(0o600)
    for name in ("ca.crt", "ca.key"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    renew_all(tmp_path, days=20)
    middle = Middle(
        node.channel.info,
        partial(certificate(tmp_path, "worker").server_end, "ingress"),
        partial(certificate(tmp_path, "ingress").client_end, "worker"),
    )
    attempts(run, middle, pool_with(folder))
    assert middle.heard  # challenges and proofs
    assert not any(node.channel.info.token.encode() in each for each in middle.heard)
    assert not node.channel._connections.peers


@pytest.mark.parametrize("kind", ["another role", "another CA", "in the clear"])
def test_what_is_no_ingress_of_the_cluster_is_refused(node, run, folder, tmp_path, caplog, kind):
    info = node.channel.info
    if kind == "another role":
        pool = pool_with(folder, "worker")
    elif kind == "another CA":
        make_all(tmp_path, "test", days=20)
        pool = pool_with(tmp_path)
    else:
        pool, info = WorkerPool("test"), replace(info, is_encrypted=False)

    async def scenario() -> None:
        pool.update([info])
        await until(lambda: any("refused the" in each.message for each in caplog.records))
        assert not pool.num_connected and not node.channel._connections.peers
        await pool.close()

    with caplog.at_level(logging.WARNING):
        run(scenario())


def test_settings_that_differ_are_named(node, run, folder, caplog):
    clear, secret = WorkerPool("test"), pool_with(folder)

    async def scenario() -> None:
        clear.update([node.channel.info])
        secret.update([replace(node.channel.info, is_encrypted=False)])
        await clear.close()
        await secret.close()

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert "it has cluster_certs_dir, and this ingress has not" in caplog.records[0].message
    assert "it has not cluster_certs_dir, and this ingress has" in caplog.records[1].message


def test_new_certificates_are_taken_and_streams_go_on(model, run, tmp_path):
    make_all(tmp_path, "test", days=20)
    node = Node(model, tls=partial(certificate(tmp_path, "worker").server_end, "ingress"))
    node.thread.start()
    submitted = request(3, 300)

    async def scenario() -> tuple[list[int], bytes, bytes]:
        first, second = pool_with(tmp_path), pool_with(tmp_path)
        begun: set[str] = set()
        first.update([node.channel.info])
        await until(lambda: first.num_connected == 1)
        running = asyncio.ensure_future(collect(first, submitted, begun))
        await until(lambda: begun)
        renew_all(tmp_path, days=20)
        second.update([node.channel.info])
        await until(lambda: second.num_connected == 1)
        before, after = _binding(first), _binding(second)
        _, last = await collect(second, request(4))
        assert last.finish_reason is FinishReason.LENGTH
        ids, _ = await running
        await first.close()
        await second.close()
        return ids, before, after

    ids, before, after = run(scenario())
    node.stop()
    assert ids == alone(model, submitted) and before != after


def _binding(pool: WorkerPool) -> bytes:
    (link,) = pool._links.values()
    assert link._messages is not None
    return link._messages.binding


def test_half_handshakes_keep_no_ingress_out(node, run, folder, monkeypatch):
    monkeypatch.setattr(unproven, "HELLO_S", 60.0)  # all of them are there at a time

    async def scenario() -> FinishReason | None:
        strangers = [await connected(node.channel.info.address) for _ in range(3 * MAX_UNPROVEN)]
        for stranger in strangers:
            stranger.send(b"\x16\x03\x01\x40\x00\x01\x01\x86\xa0")  # half a ClientHello
        await until(lambda: len(node.channel._connections._unproven) == MAX_UNPROVEN)
        pool = pool_with(folder)
        pool.update([node.channel.info])
        await until(lambda: pool.num_connected == 1)
        _, last = await collect(pool, request(1))
        await pool.close()
        for stranger in strangers:
            stranger.close()
        await until(lambda: not len(node.channel._connections._unproven))
        return last.finish_reason

    assert run(scenario()) is FinishReason.LENGTH
