"""TLS of the real listeners: clients that trust the CA or do not, rotation under load, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import uvicorn
import uvloop
from cryptography import x509

from penstock.deployments.client import AsyncClient, Client, ClientError
from penstock.deployments.client.tls import ClientTls
from penstock.deployments.config import ServeConfig
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.connections import Connections
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.ingress.http.protocol import bounded_protocol
from penstock.deployments.ingress.http.tls import TlsServer
from penstock.deployments.ingress.listeners import open_listeners
from penstock.deployments.ingress.metrics.families import of_certificates
from penstock.deployments.security.authority import make_all, renew_all
from penstock.deployments.security.certificates import Certificates
from penstock.deployments.supervision.view import ClusterView
from penstock.workers.request import Delta, FinishReason
from tests.deployments.ingress.dispatch.test_pool import CONFIG, Node
from tests.deployments.ports import free_port
from tests.deployments.serving import ScriptedBackend, Serving

LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)  # that of Ray's actors is uvloop's
NUM_TOKENS = 40
SCRIPT = (*([100 + n] for n in range(4)), FinishReason.STOP)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_all(tmp_path / "certs", "test", days=30)
    return tmp_path / "certs"


@contextlib.contextmanager
def tls_server(folder: Path, *script: Any, client_ca: bool = False) -> Iterator[Serving]:
    certificates = certificates_of(folder, client_ca=client_ca)
    with Serving(ScriptedBackend(*(script or SCRIPT)), certificates=certificates) as serving:
        yield serving


def certificates_of(folder: Path, *, client_ca: bool = False) -> Certificates:
    ca = str(folder / "ca.crt") if client_ca else None
    return Certificates(str(folder / "server.crt"), str(folder / "server.key"), ca)


def tls_of(folder: Path, *, shows: bool = False) -> ClientTls:
    pair = (str(folder / "client.crt"), str(folder / "client.key")) if shows else (None, None)
    return ClientTls(str(folder / "ca.crt"), *pair)


def serial_in(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def shown(port: int, folder: Path) -> int:
    """The serial number of the certificate that a new connection gets."""
    context = tls_of(folder).context()
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        der = secure.getpeercert(binary_form=True)
        assert der is not None and secure.version() == "TLSv1.3"
        return x509.load_der_x509_certificate(der).serial_number


def shown_by_grpc(target: str, folder: Path) -> int:
    """As `shown`, for the gRPC port, which speaks HTTP/2 only."""
    host, _, port = target.rpartition(":")
    context = tls_of(folder).context()
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        der = secure.getpeercert(binary_form=True)
        assert der is not None and secure.selected_alpn_protocol() == "h2"
        return x509.load_der_x509_certificate(der).serial_number


def grpc_refusal(serving: Serving, **options: Any) -> grpc.StatusCode:
    """With which status a call fails."""
    with Client(serving.grpc_target, **options) as client, pytest.raises(ClientError) as refused:
        client.models()
    return refused.value.status


def openai_client(serving: Serving, tls: ClientTls) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=tls.context())
    return openai.OpenAI(
        base_url=f"{serving.base_url}/v1", api_key="none", http_client=http, max_retries=0
    )


def chat(client: openai.OpenAI) -> list[str]:
    stream = client.chat.completions.create(
        model="builtin", messages=[{"role": "user", "content": "Hello"}], stream=True
    )
    return [part.choices[0].finish_reason or "" for part in stream if part.choices]


def test_clients_that_trust_the_ca_are_served_by_https_and_grpc(folder: Path):
    with tls_server(folder) as serving:
        assert chat(openai_client(serving, tls_of(folder)))[-1] == "stop"
        with Client(serving.grpc_target, ca_file=str(folder / "ca.crt")) as client:
            answer = client.reply([{"role": "user", "content": "Hello"}])
        assert len(answer.token_ids) == 4


def test_clients_that_do_not_trust_the_ca_are_not(folder: Path, tmp_path: Path):
    make_all(tmp_path / "other", "test", days=30)
    wrong = tls_of(tmp_path / "other")
    with tls_server(folder) as serving:
        with pytest.raises(openai.APIConnectionError):
            chat(openai_client(serving, wrong))
        assert grpc_refusal(serving, ca_file=wrong.ca_file) == grpc.StatusCode.UNAVAILABLE
        assert serving.backend.requests == []


def test_a_name_that_the_certificate_lacks_is_refused(folder: Path):
    with tls_server(folder) as serving:
        context = tls_of(folder).context()
        plain = socket.create_connection(("127.0.0.1", serving.http_port), 10)
        with plain, pytest.raises(ssl.SSLCertVerificationError):
            context.wrap_socket(plain, server_hostname="example.com")


def test_with_a_client_ca_only_clients_that_show_a_certificate_are_served(
    folder: Path, tmp_path: Path
):
    make_all(tmp_path / "other", "test", days=30)
    other = tmp_path / "other"
    strangers = ClientTls(
        str(folder / "ca.crt"), str(other / "client.crt"), str(other / "client.key")
    )
    known = tls_of(folder, shows=True)
    with tls_server(folder, client_ca=True) as serving:
        assert chat(openai_client(serving, known))[-1] == "stop"
        with Client(serving.grpc_target, credentials=known.credentials()) as client:
            assert client.models()[0].name == "builtin"
        num = len(serving.backend.requests)
        for tls in (tls_of(folder), strangers):
            with pytest.raises(openai.APIConnectionError):
                chat(openai_client(serving, tls))
            status = grpc_refusal(serving, credentials=tls.credentials())
            assert status == grpc.StatusCode.UNAVAILABLE
        assert len(serving.backend.requests) == num


def test_a_plain_request_is_closed_at_once_and_others_are_served(folder: Path):
    with tls_server(folder) as serving:
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"http://127.0.0.1:{serving.http_port}/health", timeout=60)
        # Not DEADLINE_EXCEEDED, after the time of the call.
        assert grpc_refusal(serving, timeout_s=60) == grpc.StatusCode.UNAVAILABLE
        assert chat(openai_client(serving, tls_of(folder)))[-1] == "stop"


def test_http_refuses_tls_1_2(folder: Path):
    with tls_server(folder) as serving:
        context = tls_of(folder).context()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        plain = socket.create_connection(("127.0.0.1", serving.http_port), 10)
        with plain, pytest.raises(ssl.SSLError, match=r"(?i)protocol|alert"):
            context.wrap_socket(plain, server_hostname="localhost")


class HeldBackend(ScriptedBackend):
    """Streams that are under way until the test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    async def generate(self, admission: AdmissionRequest) -> AsyncIterator[Delta]:
        request_id = admission.request.request_id
        for n in range(NUM_TOKENS):
            while n == NUM_TOKENS // 2 and not self.released.is_set():
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.02)
            yield Delta(request_id, [100 + n])
        yield Delta(request_id, [], FinishReason.STOP)


class Background:
    """Runs a function in a thread; `result` waits for it."""

    def __init__(self, function: Any):
        self._function = function
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._function())
        except BaseException as error:
            self._outcome.append(error)

    @property
    def is_done(self) -> bool:
        return bool(self._outcome)

    def result(self) -> Any:
        self._thread.join(60)
        assert self._outcome, "it has not ended"
        if isinstance(self._outcome[0], BaseException):
            raise self._outcome[0]
        return self._outcome[0]


@pytest.mark.parametrize("new_loop", LOOPS)
def test_streams_run_across_a_rotation_and_new_connections_get_the_new_certificate(
    folder: Path, new_loop: Any
):
    certificates = certificates_of(folder)
    backend = HeldBackend()
    with Serving(backend, certificates=certificates, new_loop=new_loop) as serving:
        begun = [threading.Event() for _ in range(4)]

        def by_http(began: threading.Event) -> int:
            num = 0
            stream = openai_client(serving, tls_of(folder)).chat.completions.create(
                model="builtin",
                messages=[{"role": "user", "content": "Hello"}],
                stream=True,
                extra_body={"return_token_ids": True},
            )
            for part in stream:
                began.set()
                for choice in part.choices:
                    num += len(getattr(choice, "token_ids", None) or ())
            return num

        def by_grpc(began: threading.Event) -> int:
            num = 0
            with Client(serving.grpc_target, ca_file=str(folder / "ca.crt"), resume_s=0) as client:
                for piece in client.chat([{"role": "user", "content": "Hello"}]):
                    began.set()
                    num += len(piece.token_ids)
            return num

        functions = (by_http, by_http, by_grpc, by_grpc)
        streams = [
            Background(lambda each=each, began=began: each(began))
            for each, began in zip(functions, begun, strict=True)
        ]
        for began in begun:
            assert began.wait(30)
        for _ in range(3):  # rotations, with the streams running
            renew_all(folder, days=30)
            assert certificates.reload()
            newest = serial_in(folder / "server.crt")
            assert shown(serving.http_port, folder) == newest
            assert shown_by_grpc(serving.grpc_target, folder) == newest
        assert not any(stream.is_done for stream in streams)
        backend.released.set()
        assert [stream.result() for stream in streams] == [NUM_TOKENS] * 4


def test_a_wrong_new_pair_leaves_the_old_one_in_use(folder: Path):
    certificates = certificates_of(folder)
    with Serving(ScriptedBackend(*SCRIPT), certificates=certificates) as serving:
        first = serial_in(folder / "server.crt")
        key = (folder / "server.key").read_bytes()
        renew_all(folder, days=30)
        (folder / "server.key").write_bytes(key)  # of the old certificate
        assert not certificates.reload() and not certificates.reload()
        assert certificates.reload_failed
        assert shown(serving.http_port, folder) == first
        assert shown_by_grpc(serving.grpc_target, folder) == first
        assert chat(openai_client(serving, tls_of(folder)))[-1] == "stop"


def test_the_cas_of_clients_rotate_for_grpc_too(folder: Path, tmp_path: Path):
    make_all(tmp_path / "other", "test", days=30)
    other, ca = tmp_path / "other", tmp_path / "clients.crt"
    shutil.copy(folder / "ca.crt", ca)
    certificates = Certificates(str(folder / "server.crt"), str(folder / "server.key"), str(ca))
    pair = (str(other / "client.crt"), str(other / "client.key"))
    strangers = ClientTls(str(folder / "ca.crt"), *pair).credentials()
    known = tls_of(folder, shows=True).credentials()
    with Serving(ScriptedBackend(*SCRIPT), certificates=certificates) as serving:
        assert grpc_refusal(serving, credentials=strangers) == grpc.StatusCode.UNAVAILABLE
        shutil.copy(other / "ca.crt", ca)
        assert certificates.reload()
        with Client(serving.grpc_target, credentials=strangers) as client:
            assert client.models()[0].name == "builtin"
        assert grpc_refusal(serving, credentials=known) == grpc.StatusCode.UNAVAILABLE


def test_metrics_show_a_failed_reload_and_the_time_that_is_left(folder: Path):
    certificates = certificates_of(folder)

    def figures() -> dict[str, float]:
        families = of_certificates({"clients": certificates})
        return {each.name: each.samples[0].value for each in families}

    seen = figures()
    assert seen["penstock_cert_reload_failed"] == 0
    assert 29.9 < seen["penstock_cert_expires_seconds"] / 86_400 < 30
    (folder / "server.crt").write_text("none")
    certificates.reload()
    certificates.reload()
    seen = figures()
    assert seen["penstock_cert_reload_failed"] == 1
    assert 29.9 < seen["penstock_cert_expires_seconds"] / 86_400 < 30  # of the one in use


def test_an_ingress_with_tls_serves_and_drains(folder: Path, model: Any, run: Any):
    """The listeners of production, over a worker: what runs ends whole, what has not begun ends."""
    node = Node(model)
    node.thread.start()
    config = ServeConfig(
        engine=CONFIG,
        metrics_port=free_port(),
        http_port=free_port(),
        grpc_port=free_port(),
        tls_cert_file=str(folder / "server.crt"),
        tls_key_file=str(folder / "server.key"),
    )

    async def scenario() -> None:
        pool = WorkerPool("test")
        listeners = await open_listeners(config, pool, None, ClusterView, "ingress")
        pool.update([node.channel.info])
        async with asyncio.timeout(60):
            while not (pool.ready() and listeners.http.started):
                await asyncio.sleep(0.01)
        tls, body = tls_of(folder), {"model": "builtin", "prompt": "It was", "ignore_eos": True}
        async with httpx.AsyncClient(verify=tls.context(), base_url=config.http_url) as client:
            assert (await client.get("/ready")).status_code == 200
            assert listeners.num_connections == 1
            page = await client.get(f"http://127.0.0.1:{config.metrics_port}/metrics")
            assert 'penstock_cert_reload_failed{use="clients"} 0.0' in page.text
            assert "penstock_http_connections 1.0" in page.text
            target = config.address(config.grpc_port)
            async with AsyncClient(target, credentials=tls.credentials()) as over_grpc:
                assert (await over_grpc.models())[0].name == "builtin"
            silent = await asyncio.open_connection("127.0.0.1", config.http_port)
            answer = asyncio.ensure_future(
                client.post("/v1/completions", json={**body, "max_tokens": 400}, timeout=60)
            )
            while not node.thread.stats().num_running:
                await asyncio.sleep(0.005)
            await asyncio.wait_for(listeners.close(0.0, 60.0), 60)
            usage = (await answer).json()["usage"]
            assert usage["completion_tokens"] == 400
            assert await silent[0].read(1) == b""
            silent[1].close()
            with pytest.raises(httpx.ConnectError):
                await client.get("/live")
        assert listeners.metrics is not None
        await asyncio.to_thread(listeners.metrics.close)
        await pool.close()

    try:
        run(scenario())
    finally:
        node.stop()


async def _scheme(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the scheme of the request."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@contextlib.asynccontextmanager
async def listener_of(
    folder: Path, handshake_s: float
) -> AsyncIterator[tuple[int, Connections, Callable[[], Awaitable[None]]]]:
    """The listener alone, for 8 connections: its port, its connections, and what stops it."""
    connections = Connections(8, 8)
    config = uvicorn.Config(
        _scheme,
        http=bounded_protocol(connections, Counter()),
        ws="none",
        lifespan="off",
        log_config=None,
    )
    context = certificates_of(folder).server_context
    server = TlsServer(config, context, connections, handshake_s=handshake_s)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))

    async def stop() -> None:
        server.should_exit = True
        await asyncio.wait_for(serving, 30)

    try:
        yield listener.getsockname()[1], connections, stop
    finally:
        await stop()


async def _number(connections: Connections, num: int) -> None:
    async with asyncio.timeout(30):
        while connections.num != num:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_silent_connections_end_and_are_counted_before_their_handshake(folder: Path, new_loop: Any):
    async def scenario() -> None:
        async with listener_of(folder, 1.0) as (port, connections, _):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            await _number(connections, 8)
            async with httpx.AsyncClient(verify=tls_of(folder).context(), timeout=60) as client:
                answer = await client.get(f"https://localhost:{port}/")
                assert answer.text == "https"
            assert connections.num_evicted == 1 and connections.num_refused == 0
            for reader, writer in silent:  # the first had to go for the client, the others in time
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(1), 30) == b""
                writer.close()
            await _number(connections, 0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_handshake_does_not_hold_up_the_end(folder: Path, new_loop: Any):
    async def scenario() -> None:
        async with listener_of(folder, 600.0) as (port, connections, stop):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await _number(connections, 1)
            await stop()
            assert connections.num == 0
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(1), 30) == b""
            writer.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
