"""The page of results says what the result files say, and no file is left out."""

from __future__ import annotations

import re

import pytest

from tools.render_results import BLOCK, PAGE, TABLES, Table, main, render
from tools.result_files import (
    RESULTS,
    ROOT,
    Result,
    ResultError,
    fixed,
    load_all,
    markdown,
    parse,
    significant,
)
from tools.result_tables.memory import matmul
from tools.result_tables.serving import offline

ENVELOPE = {
    "benchmark": "engine.offline",
    "date": "2026-01-02",
    "commit": None,
    "command": "python -m benchmarks.engine.offline",
    "machine": {"cpu": "a CPU", "cores": 2},
}


def made_up(results, path="offline/made-up") -> Result:
    return parse(path, ENVELOPE | {"results": results})


def test_the_page_on_disk_is_what_the_files_say(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_check_shows_a_diff_of_a_figure_that_was_changed_by_hand(tmp_path, capsys):
    page = tmp_path / "results.md"
    found = re.search(r"\| \d+\.\d\dx \|", PAGE.read_text())
    assert found is not None
    figure = found[0]
    page.write_text(PAGE.read_text().replace(figure, "| 9.99x |", 1))
    assert main(["--check"], page) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("-") and "9.99x" in line for line in lines)
    assert any(line.startswith("+") and figure in line for line in lines)
    assert main([], page) == 0
    assert page.read_text() == PAGE.read_text()


def test_each_result_file_has_the_envelope():
    assert len(load_all()) >= 40  # raises ResultError for a file without it


def test_result_files_are_json_in_a_folder_of_their_benchmark():
    files = [file.relative_to(RESULTS) for file in RESULTS.rglob("*") if file.is_file()]
    assert [file for file in files if len(file.parts) != 2 or file.suffix != ".json"] == []


def test_each_result_file_is_on_the_page_and_each_link_of_it_exists():
    used = {source for table in TABLES.values() for source in table.sources}
    assert used == set(load_all())
    links = re.findall(r"\]\((\.\./[^)#]+)\)", PAGE.read_text())
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


def test_each_picture_of_a_benchmark_is_on_the_page():
    shown = set(re.findall(r"\.\./images/(\S+\.png)", PAGE.read_text()))
    assert shown and all((ROOT / "docs" / "images" / name).exists() for name in shown)


@pytest.mark.parametrize("key", ["benchmark", "date", "commit", "command", "machine"])
def test_an_envelope_without_a_key_is_refused_by_name(key):
    content = {name: value for name, value in ENVELOPE.items() if name != key} | {"results": {1: 2}}
    with pytest.raises(ResultError, match=rf"x/y\.json lacks {key}"):
        parse("x/y", content)


@pytest.mark.parametrize(
    "payload", [{}, {"results": {}}, {"runs": []}, {"results": 1, "runs": [1]}]
)
def test_an_envelope_needs_figures_of_one_kind(payload):
    with pytest.raises(ResultError):
        parse("x/y", ENVELOPE | payload)


def test_runs_are_a_list_and_results_one_run():
    assert parse("x/y", ENVELOPE | {"runs": [{"a": 1}, {"a": 2}]}).runs == [{"a": 1}, {"a": 2}]
    assert parse("x/y", ENVELOPE | {"results": {"a": 1}}).runs == [{"a": 1}]


def test_the_offline_table_has_medians_and_ratios_to_transformers():
    def run(first, rate):
        return {"first_token_ms": first, "ms_per_token": 10.0, "tokens_per_s": rate}

    runs = {
        "transformers": [run(100.0, 9.0), run(300.0, 10.0), run(200.0, 20.0)],
        "penstock, int8 weights": [run(50.0, 30.0), run(51.0, 25.0), run(52.0, 20.0)],
    }
    text = offline(made_up({"args": {"workload": "W1"}, "runs": runs}))
    assert text.splitlines() == [
        "| W1, median of 3 runs | first token | ms/token | generated tokens/s | ratio |",
        "| --- | --- | --- | --- | --- |",
        "| transformers `generate` | 200 ms | 10.0 | 10.0 | 1.00x |",
        "| Penstock, int8 | 51 ms | 10.0 | 25.0 | 2.50x |",
    ]


def test_the_matmul_table_counts_the_lines_that_are_slower():
    lines = [{"format": "int8", "ratio": ratio} for ratio in (0.9, 1.5, 1.2)]
    text = matmul([made_up({"lines": lines}, "matmul/made-up")])
    assert text.splitlines()[-1] == "| made-up | int8 | 3 | 0.90 | 1.20 | 1.50 | 1 |"


def test_render_replaces_what_is_between_markers_and_keeps_the_rest():
    page = "Before.\n<!-- begin one -->\nold\n<!-- end one -->\nAfter.\n"
    table = Table(["offline/made-up"], lambda result: markdown(("n",), [(result.figures["n"],)]))
    new = render(page, {"offline/made-up": made_up({"n": 7})}, {"one": table})
    assert new.startswith("Before.\n<!-- begin one -->\n- a CPU, 2 cores; 2026-01-02; [offline")
    assert new.endswith("| n |\n| --- |\n| 7 |\n<!-- end one -->\nAfter.\n")
    assert len(BLOCK.findall(new)) == 1


@pytest.mark.parametrize(
    "page",
    [
        "no marker",
        "<!-- begin one -->\n<!-- end two -->\n",
        "<!-- begin other -->\n<!-- end other -->\n",
        "<!-- begin one -->\n<!-- end one -->\n<!-- begin one -->\n<!-- end one -->\n",
    ],
)
def test_markers_that_do_not_fit_the_tables_are_refused(page):
    table = Table(["offline/made-up"], lambda result: "")
    with pytest.raises(ResultError):
        render(page, {"offline/made-up": made_up({"n": 7})}, {"one": table})


def test_a_table_whose_file_is_missing_is_refused_by_name():
    page = "<!-- begin one -->\n<!-- end one -->\n"
    with pytest.raises(ResultError, match=r"offline/gone\.json does not exist"):
        render(page, {}, {"one": Table(["offline/gone"], lambda result: "")})


def test_cells():
    assert [fixed(1234.56, 1), fixed(None), fixed(-0.001, 2), fixed(2, 0, " ms")] == [
        *("1,234.6", "", "0.00", "2 ms")
    ]
    assert [significant(x) for x in (253.8, 9.19, 0.06, 11457.1, 0)] == [
        *("254", "9.19", "0.06", "11,457", "0")
    ]
    with pytest.raises(ValueError, match="2 cells under a head of 1"):
        markdown(("one",), [(1, 2)])
