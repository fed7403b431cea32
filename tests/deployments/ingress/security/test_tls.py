"""TLS of the real listeners: clients that trust the CA or do not, rotation under load, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from penstock.deployments.client import Client, ClientError
from penstock.deployments.client.tls import ClientTls
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.security.authority import make_all, renew_all
from penstock.deployments.security.certificates import Certificates
from penstock.workers.request import Delta, FinishReason
from tests.deployments.serving import ScriptedBackend, Serving, Step
from tests.deployments.tls import LOOPS, certificates_of, serial_in, shown, shown_by_grpc, tls_of

NUM_TOKENS = 40
SCRIPT: tuple[Step, ...] = (*([100 + n] for n in range(4)), FinishReason.STOP)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_all(tmp_path / "certs", "test", days=30)
    return tmp_path / "certs"


@contextlib.contextmanager
def tls_server(folder: Path, *script: Any, client_ca: bool = False) -> Iterator[Serving]:
    certificates = certificates_of(folder, client_ca=client_ca)
    with Serving(ScriptedBackend(*(script or SCRIPT)), certificates=certificates) as serving:
        yield serving


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
