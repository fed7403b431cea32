"""/v1/files and /v1/batches, called by OpenAI's own client, unmodified."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import time

import httpx
import openai
import pytest

from tests.deployments.batch.requests import errors_of, write_input
from tests.deployments.serving import EngineBackend, ScriptedBackend, Serving

KEYS = ("first-key", "second-key")
NUM_LINES = 60


@pytest.fixture(scope="module")
def backend():
    engine = EngineBackend()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def serving(backend, tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("data")
    with Serving(backend, api_keys=KEYS, data_dir=data_dir) as running:
        yield running


@pytest.fixture(scope="module")
def clients(serving):
    url = f"{serving.base_url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key=KEYS[0], max_retries=0) as first,
        openai.OpenAI(base_url=url, api_key=KEYS[1], max_retries=0) as second,
    ):
        yield first, second


@pytest.fixture
def client(clients):
    return clients[0]


def line(number, **body):
    body = {"prompt": "The door", "max_tokens": 4, **body}
    request = {"custom_id": f"request {number}", "method": "POST", "url": "/v1/completions"}
    return json.dumps({**request, "body": body}).encode() + b"\n"


def upload(client, content=None, **options):
    content = b"".join(map(line, range(3))) if content is None else content
    return client.files.create(file=("in.jsonl", content), purpose="batch", **options)


def create(client, file, **options):
    options = {"endpoint": "/v1/completions", "completion_window": "24h", **options}
    return client.batches.create(input_file_id=file.id, **options)


def wait(client, batch, within_s=120):
    deadline_s = time.monotonic() + within_s
    while True:
        batch = client.batches.retrieve(batch.id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.1)


def test_a_file_is_stored_listed_read_and_deleted(client):
    content = b"".join(map(line, range(5)))
    file = client.files.create(file=("../../etc/pass wd.jsonl", content), purpose="batch")
    assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
    assert file.bytes == len(content)
    assert file.filename.endswith("pass wd.jsonl")
    assert abs(file.created_at - time.time()) < 60
    assert file.expires_at - file.created_at == 30 * 86400
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    assert file in list(client.files.list())
    assert file in list(client.files.list(purpose="batch", order="asc", limit=100))
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    assert file not in list(client.files.list())


def test_lists_come_in_pages(client):
    made = [upload(client).id for _ in range(5)]
    page = client.files.list(limit=2)
    seen = [each.id for each in page.data]
    assert page.has_more
    while page.has_next_page():
        page = page.get_next_page()
        seen += [each.id for each in page.data]
    assert sorted(seen) == sorted({*seen})
    assert {*made} <= {*seen}


def test_lists_are_in_the_order_of_creation_within_a_second_too(client):
    files = [upload(client).id for _ in range(8)]
    batches = [create(client, client.files.retrieve(files[0])).id for _ in range(8)]
    for kind, made in ((client.files, files), (client.batches, batches)):
        # Batches of other tests may end meanwhile, with files of their own.
        ours = [each.id for each in kind.list(limit=100).data if each.id in made]
        assert ours == made[::-1]
        page = kind.list(limit=3)  # it ends and the next begins within a second
        paged = [each.id for each in page.data]
        while page.has_next_page() and not {*made} <= {*paged}:
            page = page.get_next_page()
            paged += [each.id for each in page.data]
        assert [each for each in paged if each in made] == ours
    for batch in batches:
        with contextlib.suppress(openai.BadRequestError):  # it is completed by now
            client.batches.cancel(batch)


def test_an_expiry_is_kept(client):
    file = upload(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at - file.created_at == 3600
    with pytest.raises(openai.BadRequestError, match=r"expires_after\[seconds\] must lie in"):
        upload(client, expires_after={"anchor": "created_at", "seconds": 5})


def test_a_batch_from_its_upload_to_its_results(client, tmp_path):
    given = write_input(tmp_path / "in.jsonl", NUM_LINES, max_tokens=6)
    chat = [each for each in given.read_text().splitlines() if "chat" in each]
    content = "\n".join(chat).encode()
    batch = create(
        client,
        upload(client, content),
        endpoint="/v1/chat/completions",
        metadata={"purpose": "a test"},
    )
    assert batch.status in ("validating", "in_progress")
    assert batch.metadata == {"purpose": "a test"}
    assert batch.expires_at - batch.created_at == 86400
    assert batch.output_file_id is None
    batch = wait(client, batch)
    assert batch.status == "completed"
    assert batch.model == "builtin"
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (30, 30, 0)
    assert batch.usage.output_tokens > 30
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    file = client.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output"
    lines = client.files.content(batch.output_file_id).text.splitlines()
    assert file.bytes == sum(len(each) + 1 for each in lines)
    custom_ids = [json.loads(each)["custom_id"] for each in chat]
    assert [json.loads(each)["custom_id"] for each in lines] == custom_ids
    for each in map(json.loads, lines):
        direct = json.loads(chat[custom_ids.index(each["custom_id"])])["body"]
        if "seed" in direct or direct.get("temperature") == 0:
            answer = client.chat.completions.create(
                model="builtin",
                messages=direct.pop("messages"),
                max_tokens=direct.pop("max_tokens"),
                extra_body=direct,
            )
            choice = each["response"]["body"]["choices"][0]
            assert choice["token_ids"] == answer.choices[0].token_ids
    assert batch in list(client.batches.list(limit=5))


def test_a_batch_of_responses(client):
    def request(i, **body):
        named = {"custom_id": f"request {i}", "method": "POST", "url": "/v1/responses"}
        body = {"input": "Who was at the door?", "max_output_tokens": 6, "temperature": 0, **body}
        return json.dumps({**named, "body": body}) + "\n"

    content = "".join((request(0), request(1, seed=3, temperature=1), request(2, top_p=2)))
    batch = create(client, upload(client, content.encode()), endpoint="/v1/responses")
    batch = wait(client, batch)
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 2, 1)
    first, _ = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    answer = client.responses.create(
        input="Who was at the door?", max_output_tokens=6, temperature=0, model="builtin"
    )
    body = first["response"]["body"]
    assert body["output"][0]["content"][0]["text"] == answer.output_text
    assert (answer.usage.input_tokens, batch.usage.output_tokens) == (
        body["usage"]["input_tokens"],
        12,
    )
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(body["id"])


def test_requests_that_fail_are_in_the_error_file(client, tmp_path):
    content = line(1) + line(2, temperature=-1) + line(3, max_tokens=10**6)
    batch = wait(client, create(client, upload(client, content)))
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 1, 2)
    errors = tmp_path / "errors"
    errors.write_bytes(client.files.content(batch.error_file_id).read())
    assert errors_of(errors) == {
        "request 2": "invalid_value",
        "request 3": "context_length_exceeded",
    }


def test_an_input_that_cannot_be_run_fails_whole_and_names_its_lines(client):
    content = line(1) + b"{\n" + line(1) + line(4, model="gpt-x") + line(5, stream=True)
    batch = wait(client, create(client, upload(client, content)))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    found = [(each.line, each.param, each.code) for each in batch.errors.data]
    assert found == [
        (2, None, "invalid_json_line"),
        (3, "custom_id", "duplicate_custom_id"),
        (4, "body.model", "model_not_found"),
        (5, "body.stream", "invalid_value"),
    ]
    assert batch.output_file_id is None


def test_a_line_for_another_endpoint_fails_the_batch(client):
    batch = create(client, upload(client), endpoint="/v1/chat/completions")
    assert [each.param for each in wait(client, batch).errors.data] == ["url"] * 3


def test_a_batch_is_cancelled_and_keeps_what_is_done(client):
    content = b"".join(line(i, max_tokens=200, ignore_eos=True) for i in range(400))
    batch = create(client, upload(client, content))
    deadline_s = time.monotonic() + 100
    while client.batches.retrieve(batch.id).request_counts.completed == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    cancelling = client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    assert client.batches.cancel(batch.id).cancelling_at == cancelling.cancelling_at
    batch = wait(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    counts = batch.request_counts
    assert counts.completed + counts.failed == counts.total == 400
    assert 0 < counts.completed < 400
    lines = client.files.content(batch.output_file_id).text.splitlines()
    assert len(lines) == counts.completed
    lines = client.files.content(batch.error_file_id).text.splitlines()
    assert {json.loads(each)["error"]["code"] for each in lines} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="the batch is cancelled and cannot be"):
        client.batches.cancel(batch.id)


def test_a_key_sees_its_own_files_and_batches_only(clients):
    first, second = clients
    file = upload(first)
    batch = create(first, file)
    for call in (second.files.retrieve, second.files.content, second.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    for call in (second.batches.retrieve, second.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    with pytest.raises(openai.NotFoundError):
        create(second, file)
    assert list(second.files.list()) == []
    assert list(second.batches.list()) == []
    output = wait(first, batch).output_file_id
    with pytest.raises(openai.NotFoundError):
        second.files.content(output)
    assert first.files.content(output).read()


@pytest.mark.parametrize("file_id", ["..", "file-..", "%2e%2e%2fexecutor.lock", "file-" + "a" * 32])
def test_an_id_is_never_a_path(serving, file_id):
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{file_id}"):
        answer = httpx.get(f"{serving.base_url}{path}", headers=headers)
        assert answer.status_code == 404


def test_a_batch_of_embeddings(client):
    texts = ["The river", "A lamp"]
    lines = [
        {"custom_id": text, "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for text in texts
    ]
    content = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    batch = wait(client, create(client, upload(client, content), endpoint="/v1/embeddings"))
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)
    output = client.files.content(batch.output_file_id).read()
    for each in map(json.loads, output.splitlines()):
        (found,) = each["response"]["body"]["data"]
        (want,) = client.embeddings.create(model="builtin", input=each["custom_id"]).data
        assert found["embedding"] == pytest.approx(want.embedding, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"endpoint": "/v1/score"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, None),
        ({"extra_body": {"unknown": 1}}, "unknown"),
    ],
)
def test_a_wrong_field_of_a_batch_is_named(client, options, param):
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, upload(client), **options)
    assert refused.value.param in (param, "output_expires_after.seconds")


def test_the_output_of_a_batch_is_no_input(client):
    batch = wait(client, create(client, upload(client)))
    file = client.files.retrieve(batch.output_file_id)
    with pytest.raises(openai.BadRequestError, match="purpose is batch_output"):
        create(client, file)


def test_a_batch_goes_on_when_its_input_is_deleted(client):
    file = upload(client)
    batch = create(client, file)
    client.files.delete(file.id)
    assert wait(client, batch).request_counts.completed == 3


class Upload:
    """A body of an upload, as bytes, in pieces."""

    TYPE = "multipart/form-data; boundary=XyZ"

    def __init__(self, *parts, end=b"--XyZ--\r\n"):
        self.content = b"".join(parts) + end

    @staticmethod
    def part(name, content, filename=None):
        named = f'; filename="{filename}"' if filename else ""
        head = f'--XyZ\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
        return head.encode() + content + b"\r\n"

    def send(self, serving, piece=7, **headers):
        pieces = [self.content[i : i + piece] for i in range(0, len(self.content), piece)]
        return httpx.post(
            f"{serving.base_url}/v1/files",
            content=iter(pieces),
            headers={
                "authorization": f"Bearer {KEYS[0]}",
                "content-type": self.TYPE,
                **headers,
            },
        )


PURPOSE = Upload.part("purpose", b"batch")
FILE = Upload.part("file", b"a\r\n--XyY\r\n--Xy", "f")


@pytest.mark.parametrize("piece", [1, 3, 64, 4096])
@pytest.mark.parametrize("parts", [(PURPOSE, FILE), (FILE, PURPOSE)])
def test_an_upload_in_pieces_of_any_size_is_the_same(serving, client, parts, piece):
    answer = Upload(*parts).send(serving, piece)
    assert answer.status_code == 200, answer.text
    assert client.files.content(answer.json()["id"]).read() == b"a\r\n--XyY\r\n--Xy"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (Upload(PURPOSE), "file"),
        (Upload(FILE), "purpose"),
        (Upload(FILE, Upload.part("purpose", b"fine-tune")), "purpose"),
        (Upload(FILE, FILE, PURPOSE), "file"),
        (Upload(FILE, PURPOSE, PURPOSE), "purpose"),
        (Upload(FILE, PURPOSE, Upload.part("other", b"x")), "other"),
        (Upload(FILE, Upload.part("purpose", b"b" * 2000)), "purpose"),
        (Upload(PURPOSE, FILE, end=b""), None),
        (Upload(PURPOSE, FILE[:-6], end=b""), None),
        (Upload(end=b""), None),
        (Upload(end=b"--XyZ--\r\n"), "file"),
        (Upload(b"--other\r\n", end=b""), None),
        (Upload(b"--XyZ\r\n" + b"A: b\r\n" * 5000, end=b""), None),
        (Upload(b"--XyZ\r\n" + b"A: " + b"b" * 100_000 + b"\r\n\r\n", end=b""), None),
    ],
)
def test_a_malformed_upload_is_refused_and_leaves_nothing(serving, tmp_path, body, param):
    before = sorted(serving._data_dir.rglob("file-*"))
    answer = body.send(serving, 4096)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert sorted(serving._data_dir.rglob("file-*")) == before


def test_a_page_of_another_origin_cannot_upload(serving):
    body = Upload(FILE, PURPOSE)
    assert body.send(serving, origin="http://evil.example").status_code == 415
    assert body.send(serving, origin=serving.base_url).status_code == 200
    typed = {"content-type": "text/plain"}
    assert body.send(serving, **typed).status_code == 415


def test_a_file_that_is_too_large_is_refused_before_it_is_read(serving):
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 300000000\r\n"
        f"Authorization: Bearer {KEYS[0]}\r\nContent-Type: {Upload.TYPE}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", serving.http_port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_sizes_are_bounded(serving, client, monkeypatch):
    for module in ("batch.file_store", "ingress.http.batches.upload"):
        monkeypatch.setattr(f"penstock.deployments.{module}.MAX_FILE_BYTES", 100)
    with pytest.raises(openai.APIStatusError) as refused:
        upload(client, b"x" * 101)
    assert refused.value.status_code == 413
    upload(client, b"x" * 100)
    monkeypatch.undo()
    monkeypatch.setattr("penstock.deployments.batch.file_store.MAX_OWNER_BYTES", 1000)
    with pytest.raises(openai.APIStatusError, match="delete some"):
        upload(client, b"x" * 900)
    monkeypatch.undo()
    monkeypatch.setattr("penstock.deployments.batch.executor.MAX_LINES", 2)
    batch = wait(client, create(client, upload(client)))
    assert batch.status == "failed"
    assert [each.code for each in batch.errors.data] == ["too_many_lines"]


def test_without_a_data_folder_each_call_names_the_setting():
    with Serving(ScriptedBackend([1, 2])) as serving:
        url = f"{serving.base_url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            for call in (
                lambda: client.files.create(file=io.BytesIO(b"x"), purpose="batch"),
                client.files.list,
                lambda: client.files.retrieve("file-1"),
                client.batches.list,
                lambda: client.batches.retrieve("batch_1"),
                lambda: client.batches.create(
                    input_file_id="f", endpoint="/v1/completions", completion_window="24h"
                ),
            ):
                with pytest.raises(openai.APIStatusError, match="--data-dir") as refused:
                    call()
                assert (refused.value.status_code, refused.value.code) == (404, "not_configured")


def test_a_batch_expires_with_what_is_done(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "penstock.deployments.ingress.http.batches.schemas.CreateBatchRequest.window_s", 3
    )
    with Serving(backend, data_dir=tmp_path) as serving:
        url = f"{serving.base_url}/v1"
        with openai.OpenAI(base_url=url, api_key="none") as client:
            content = b"".join(line(i, max_tokens=200, ignore_eos=True) for i in range(500))
            batch = wait(client, create(client, upload(client, content)))
            assert batch.status == "expired"
            assert batch.expired_at >= batch.expires_at
            counts = batch.request_counts
            assert counts.completed + counts.failed == 500
            lines = client.files.content(batch.error_file_id).text.splitlines()
            assert {json.loads(each)["error"]["code"] for each in lines} == {"batch_expired"}
