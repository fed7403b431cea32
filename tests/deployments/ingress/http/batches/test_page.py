"""docs/operations/batch.md: its input and its Python block, as they are printed."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from penstock.deployments.cli.main import main
from tests.deployments.serving import EngineBackend, Serving

PAGE = (Path(__file__).parents[5] / "docs" / "operations" / "batch.md").read_text()


def block(language):
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.S)
    assert found is not None
    return found[1]


def test_the_page_is_true(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(block("json"))
    assert main(["batch", "in.jsonl", "out.jsonl", "--check"]) == 0
    assert capsys.readouterr().out == "in.jsonl: 2 requests, well-formed\n"
    # Of the API a batch has one endpoint, so the page's code runs the first line alone.
    Path("in.jsonl").write_text(block("json").splitlines()[0])
    backend = EngineBackend()
    with Serving(backend, data_dir=tmp_path / "data") as serving:
        code = block("python").replace("127.0.0.1:8000", f"127.0.0.1:{serving.http_port}")
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, "docs/operations/batch.md", "exec"), {})
    backend.stop()
    assert re.fullmatch(r"batch_[0-9a-f]{32} (validating|in_progress|completed)\n", said.getvalue())
