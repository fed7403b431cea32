"""Where the gate keeps what it learns: the automatic file, and files that cannot be used."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from penstock.deployments.cluster import PREDICTOR_FILE, _with_predictor_files
from penstock.deployments.config import config_from
from penstock.deployments.prediction import predictor_file
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.predictor import LengthPredictor


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def trained() -> LengthPredictor:
    predictor = LengthPredictor()
    predictor.observe(Features("m", "alice"), 40, "stop")
    return predictor


def test_the_automatic_file_is_its_owners_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        file = predictor_file.automatic("penstock", "org/model:v1")
        assert file is not None
        predictor_file.save(file, trained())
    finally:
        os.umask(before)
    path = Path(file)
    assert path.parent == home / "state" / "penstock"
    assert path.name.startswith("penstock_org-model-v1_") and path.suffix == ".npz"
    assert (mode(path.parent), mode(path)) == (0o700, 0o600)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert ("m",) in predictor_file.load(file).ends.groups


def test_each_application_and_each_model_has_its_own(home: Path) -> None:
    names = [("a", "b/c"), ("a", "b-c"), ("a_b", "c"), ("a", "b_c"), ("..", "/"), ("a", "m" * 500)]
    files = [predictor_file.automatic(*each) for each in names]
    assert len(set(files)) == len(names)
    for file in files:
        assert file is not None and Path(file).parent == home / "state" / "penstock"
        predictor_file.save(file, LengthPredictor())
    assert predictor_file.automatic(*names[0]) == files[0]


@pytest.mark.parametrize("given", [None, "", "relative/state"])
def test_the_default_is_below_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    if given is None:
        monkeypatch.delenv("XDG_STATE_HOME")
    else:
        monkeypatch.setenv("XDG_STATE_HOME", given)
    file = predictor_file.automatic("penstock", "m")
    assert file is not None
    assert Path(file).parent == home / "home" / ".local" / "state" / "penstock"


def test_a_folder_that_cannot_be_made_is_said_with_the_remedy(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "state").write_text("no folder")
    with caplog.at_level(logging.WARNING, "penstock.gate"):
        assert predictor_file.automatic("penstock", "m") is None
    assert str(home / "state" / "penstock") in caplog.text
    assert "set predictor_file to" in caplog.text


def test_a_folder_that_is_read_only_is_said_before_a_minute_is_over(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root
    with caplog.at_level(logging.WARNING, "penstock.gate"):
        assert predictor_file.automatic("penstock", "m") is None
    assert "set predictor_file to" in caplog.text


def test_a_file_that_cannot_be_read_is_no_obstacle(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one in a folder that the gate may not even look into."""
    damaged = home / "damaged"
    damaged.write_bytes(b"PK\3\4 and no more")
    (home / "file").write_text("")
    for file in (damaged, home / "file" / "below"):
        with caplog.at_level(logging.WARNING, "penstock.gate"):
            assert not predictor_file.load(str(file)).models
        assert f"cannot use {file}" in caplog.text
    caplog.clear()
    assert not predictor_file.load(str(home / "missing")).models and not caplog.text


def test_without_a_file_that_stays_there_is_one_in_the_clusters_folder() -> None:
    models = [{"model": "builtin", "predictor_file": None}, {"model": "builtin-moe"}]
    config = config_from({"models": models})
    files = [each.predictor_file for each in _with_predictor_files(config, "/folder").models]
    assert files == [f"/folder/builtin-{PREDICTOR_FILE}", "auto"]
