"""The notebook of the guide, executed by nbconvert in a kernel of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat

NOTEBOOK = Path(__file__).parents[3] / "docs" / "guide" / "notebook.ipynb"


def test_the_notebook_of_the_guide_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jupyter", "nbconvert", "--to", "notebook", "--execute"),
            *("--ExecutePreprocessor.timeout=400", "--output-dir", str(tmp_path), str(NOTEBOOK)),
        ],
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = nbformat.read(tmp_path / NOTEBOOK.name, as_version=4).cells
    outputs = [
        "".join(
            part.get("text") or part["data"]["text/plain"]
            for part in cell.outputs
            if part.get("name") != "stderr"
        )
        for cell in cells
        if cell.cell_type == "code"
    ]
    loaded, generated, answers, shaped, refused, closed = outputs
    assert loaded == "2048"
    assert [line.partition(" -> ")[0] for line in generated.splitlines()] == [
        "'The river'",
        "'A lamp in the window'",
        "'It was a bright morning, and'",
    ]
    assert len(set(answers.splitlines())) == 3
    assert shaped in ("'wind'", "'water'")
    assert refused == "prompts[1]: the prompt is empty\n"
    assert closed == ""


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
