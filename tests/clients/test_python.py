"""`penstock-client`: built, installed into an empty environment, and used against a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.serving import Serving, engine_serving, reference_ids, tokenizer

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "clients" / "python"
PROMPT = "It was a bright morning, and"
SAMPLING = {"max_tokens": 12, "temperature": 1.0, "seed": 11, "ignore_eos": True}

# Runs in the empty environment: an answer in pieces, blocking and asyncio, and what was imported.
STREAMS = """
import asyncio, json, sys
from penstock_client import AsyncClient, Client, ClientError, FinishReason
target, prompt, sampling = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with Client(target) as client:
    completed = list(client.generate(prompt, **sampling))
    chat = list(client.chat([{"role": "user", "content": "What feeds the turbine?"}], **sampling))
    try:
        client.complete(prompt, max_tokens=0)
    except ClientError as error:
        refused = [error.code, error.param]

async def stream():
    async with AsyncClient(target) as client:
        return [token async for piece in client.generate(prompt, **sampling)
                for token in piece.token_ids]

assert chat[-1].finish_reason is FinishReason.LENGTH
print(json.dumps({
    "num_pieces": len(chat),
    "chat": "".join(piece.text for piece in chat),
    "token_ids": [token for piece in completed for token in piece.token_ids],
    "asyncio": asyncio.run(stream()),
    "refused": refused,
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
}))
"""


def run(*command: str | Path) -> str:
    # pip may fetch over TLS, and then needs the system's authorities.
    variables = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    done = subprocess.run(
        list(map(str, command)), env=variables, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", out, SOURCE)
    (built,) = out.glob("penstock_client-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel and what it needs, and no more."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*pip, "--constraint", ROOT / "constraints.txt", wheel)
    return python


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with engine_serving() as running:
        yield running


def test_it_streams_from_a_real_server(python: Path, serving: Serving) -> None:
    printed = json.loads(
        run(python, "-I", "-c", STREAMS, serving.grpc_target, PROMPT, json.dumps(SAMPLING))
    )
    expected = reference_ids(tokenizer().encode(PROMPT), **SAMPLING)
    assert printed["token_ids"] == printed["asyncio"] == expected
    assert printed["num_pieces"] > 6 and printed["chat"]
    assert printed["refused"] == ["invalid_value", "max_tokens"]
    assert not {"torch", "ray", "numpy", "penstock"} & set(printed["modules"])


@pytest.mark.parametrize("page", ["clients/python/README.md", "docs/guide/python-client.md"])
def test_the_pages_say_what_works(python: Path, serving: Serving, page: str) -> None:
    found = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None
    code = found[1].replace("127.0.0.1:8001", serving.grpc_target)
    assert run(python, "-I", "-c", code).strip()


def test_it_brings_grpcio_and_protobuf_and_nothing_else(python: Path) -> None:
    listed = run(sys.executable, "-m", "pip", "--python", python, "list", "--format", "json")
    names = {each["name"].lower().replace("_", "-") for each in json.loads(listed)}
    # The last one is grpcio's own.
    assert names == {"penstock-client", "grpcio", "protobuf", "typing-extensions"}


def test_the_wheel_has_the_contracts_and_no_file_of_penstock(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for contract in ("penstock/v1/inference.proto", "inference/open_inference.proto"):
            published = archive.read(f"penstock_client/protos/{contract}")
            assert published == (ROOT / "protos" / contract).read_bytes()
    folders = {name.split("/")[0] for name in names}
    assert {each for each in folders if not each.endswith(".dist-info")} == {"penstock_client"}
    assert any(name.endswith("/LICENSE") for name in names)
    assert not any("internal" in name for name in names)


def test_both_names_work_in_one_process(wheel: Path, serving: Serving) -> None:
    """Also where the contracts differ: the installed one is made another, as of another version."""
    both = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from google.protobuf import descriptor_pb2, descriptor_pool\n"
        "other = descriptor_pb2.FileDescriptorProto(\n"
        "    name='penstock/v1/inference.proto', package='penstock.v1')\n"
        "descriptor_pool.Default().Add(other)\n"
        "import penstock_client\n"
        "print(penstock_client.Client(sys.argv[2]).complete('The', max_tokens=2).text)\n"
    )
    assert run(sys.executable, "-c", both, wheel, serving.grpc_target).strip()
    same = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import penstock_client\n"
        "from penstock.deployments.client import Client\n"
        "answers = [each(sys.argv[2]).complete('The', max_tokens=2, temperature=0.0)\n"
        "           for each in (penstock_client.Client, Client)]\n"
        "assert answers[0].token_ids == answers[1].token_ids, answers\n"
    )
    run(sys.executable, "-c", same, wheel, serving.grpc_target)


def test_its_version_and_its_needs_are_those_of_penstock() -> None:
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    theirs = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    assert theirs["version"] == ours["version"]
    assert theirs["requires-python"] == ours["requires-python"]
    assert set(theirs["dependencies"]) <= set(ours["dependencies"])
