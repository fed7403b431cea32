"""Python programs of the pages run: against a live server, or alone. The table names every block of
every page, and where a block runs that does not run here."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import pytest

from tests.deployments.serving import EngineBackend, Serving
from tests.docs.pages import ROOT, all_blocks

CLIENT = """
from openai import OpenAI
client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="x")
"""
# Page and place: what goes before, the package that it needs, and a part of what it prints (None:
# it prints nothing).
HERE: dict[tuple[str, int], tuple[str, str, str | None]] = {
    ("docs/guide/agents.md", 0): ("", "openai", 'weather {"city": "'),
    ("docs/guide/agents.md", 1): ("", "anthropic", ""),
    ("docs/guide/agents.md", 2): ("", "langchain_openai", ""),
    ("docs/guide/from-vllm.md", 0): ("", "", ""),
    ("docs/guide/lost-connections.md", 0): ("", "openai", None),
    ("docs/guide/structured-output.md", 0): (CLIENT, "openai", None),
    ("docs/reference/http-api.md", 0): ("", "openai", ""),
    ("docs/reference/http-api.md", 1): ("", "anthropic", ""),
    ("docs/reference/http-api.md", 2): (CLIENT, "openai", ""),
    ("docs/design/prediction.md", 0): ("", "", "p90="),
}
ELSEWHERE = {
    **{("README.md", at): "tests/test_documents.py" for at in range(2)},
    **{("docs/guide/long-answers.md", at): "tests/test_documents.py" for at in range(2)},
    ("docs/design/engine.md", 0): "tests/test_documents.py",
    ("docs/design/gate.md", 0): "tests/test_documents.py",
    ("docs/guide/offline.md", 0): "tests/test_documents.py",
    ("docs/guide/python-client.md", 0): "tests/clients/test_python.py",
    ("docs/guide/ray-data.md", 0): "tests/deployments/test_ray_data.py",
}
# Read by test_blocks.py only: what they need is not in a test's reach, or they are parts.
NOT_RUN = {
    ("docs/guide/python-client.md", 1),  # goes on with the client of the block before
    ("docs/guide/adapters.md", 0),  # one call, with an adapter of its own
    ("docs/guide/embeddings.md", 0),  # a model of the hub
    ("docs/guide/several-models.md", 0),  # one call, with "..." for its messages
    ("docs/operations/batch.md", 0),  # a file of requests
    ("docs/operations/security.md", 0),  # certificates
}


def programs() -> dict[tuple[str, int], str]:
    found: dict[tuple[str, int], str] = {}
    for block in all_blocks("python"):
        page = str(block.page.relative_to(ROOT))
        found[page, sum(known == page for known, _ in found)] = block.text
    return found


def test_every_program_is_accounted_for():
    assert set(programs()) <= {*HERE, *ELSEWHERE, *NOT_RUN}
    assert {*HERE, *ELSEWHERE} <= set(programs())
    assert all((ROOT / file).exists() for file in ELSEWHERE.values())
    for (page, _), file in ELSEWHERE.items():
        assert page.rpartition("/")[2] in (ROOT / file).read_text(), (page, file)


@pytest.fixture(scope="module")
def live() -> Iterator[Serving]:
    backend = EngineBackend()
    with Serving(backend) as serving:
        yield serving
    backend.stop()


@pytest.mark.parametrize("place", HERE, ids=lambda place: f"{place[0]}-{place[1]}")
def test_it_runs(live, place):
    before, package, printed = HERE[place]
    if package:
        pytest.importorskip(package)
    code = f"{before}{programs()[place]}"
    code = code.replace("127.0.0.1:8000", f"127.0.0.1:{live.http_port}")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, f"{place[0]} block {place[1]}", "exec"), {})
    if printed is None:
        assert not said.getvalue()
    else:  # an answer that is drawn may end at once
        assert printed in said.getvalue()
