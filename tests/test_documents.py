"""What README and docs tell a user to run does run: their code blocks against live servers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.serving import EngineBackend, Serving

ROOT = Path(__file__).parents[1]


def blocks(document, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.S)


@pytest.fixture(scope="module")
def live():
    backend = EngineBackend()
    with Serving(backend) as serving:
        yield serving
    backend.stop()


def on_ports_of(live, code):
    code = code.replace("smollm2", "builtin")  # which this server has, wherever tests run
    port = str(live.http_port)
    return code.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace(
        "127.0.0.1:8001", live.grpc_target
    )


@pytest.mark.parametrize("index", range(2))
def test_readme_python(live, index):
    code = on_ports_of(live, blocks("README.md", "python")[index])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, f"README.md block {index}", "exec"), {})
    assert said.getvalue().strip()


def test_readme_curl(live):
    text = (ROOT / "README.md").read_text()
    indented = re.search(r"^    (curl .*?)\n\n", text, re.S | re.M)
    assert indented is not None
    command = on_ports_of(live, re.sub(r"^    ", "", indented[1], flags=re.M))
    answer = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=200, check=True
    )
    events = [line[6:] for line in answer.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert any(json.loads(event)["choices"] for event in events[:-1])


@pytest.mark.parametrize("index", range(2))
def test_long_answers_page(live, index):
    code = on_ports_of(live, blocks("docs/guide/long-answers.md", "python")[index])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, f"docs/guide/long-answers.md block {index}", "exec"), {})
    num_tokens, num_evicted = re.findall(r"\d+", said.getvalue().splitlines()[-1])
    assert int(num_tokens) == 300 > int(num_evicted) > 150


def test_embeddings_page(live):
    code = on_ports_of(live, blocks("docs/guide/embeddings.md", "python")[0])
    found: dict[str, Any] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = code.replace("Qwen3-Embedding-0.6B", "builtin")
        exec(compile(code, "docs/guide/embeddings.md", "exec"), found)
    assert [len(each.embedding) for each in found["answer"].data] == [64, 64]


def test_engine_page():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(
            compile(blocks("docs/design/engine.md", "python")[0], "docs/design/engine.md", "exec"),
            {},
        )
    assert said.getvalue().splitlines()[-1].endswith("length")


def test_offline_page():
    said = io.StringIO()
    page = "docs/guide/offline.md"
    with contextlib.redirect_stdout(said):
        exec(compile(blocks(page, "python")[0], page, "exec"), {})
    assert said.getvalue().count(" length\n") == 2


def test_every_file_that_the_documents_name_exists():
    named = set()
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = document.read_text()
        named |= set(
            re.findall(
                r"`((?:docs|workers|kernels|deployments|benchmarks|tests|tools|protos)/[\w./-]+)`",
                text,
            )
        )
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing


def test_gate_page():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(blocks("docs/design/gate.md", "python")[0], "docs/design/gate.md", "exec"), {})
    assert printed.getvalue().strip() == "[]"  # no request waits any more


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_the_documents_leads_somewhere():
    broken = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                broken.append(f"{document.relative_to(ROOT)}: {link}")
    assert not broken
