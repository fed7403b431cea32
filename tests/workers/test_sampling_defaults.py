"""The model's own sampling parameters: how generation_config.json is read, and what it refuses."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError
from penstock.workers.request import RequestError, SamplingParams
from penstock.workers.sampling_defaults import NAMES, SamplingDefaults, read_sampling_defaults
from penstock.workers.weights.hub import BUILTIN, resolve_model

STATED = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}


def read(folder: Path, stated: Any, generation_config: str | None = "auto") -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(stated))
    return read_sampling_defaults(folder, generation_config)


def test_the_files_values_are_read(tmp_path: Path) -> None:
    others = {"do_sample": True, "eos_token_id": [1, 2], "max_new_tokens": 9, "typical_p": 0.5}
    assert dict(read(tmp_path, {**STATED, **others}).values) == STATED
    assert set(STATED) == set(NAMES)


def test_what_says_nothing_is_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, {}).values == {}
    assert read(tmp_path, dict.fromkeys(NAMES)).values == {}
    # As SamplingParams has them anyway.
    assert read(tmp_path, {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0}).values == {}
    assert read(tmp_path, STATED, None).values == {}
    assert read_sampling_defaults(tmp_path / "elsewhere", "auto").values == {}


def test_whole_numbers_and_fractions_have_their_types(tmp_path: Path) -> None:
    values = read(tmp_path, {"temperature": 0, "top_k": 40.0, "repetition_penalty": 2}).values
    assert values == {"temperature": 0, "top_k": 40, "repetition_penalty": 2}
    assert [type(values[name]) for name in values] == [float, int, float]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, 101, "0.6", True, [0.6], float("nan"))),
        *(("top_p", value) for value in (0, 1.1, float("inf"))),
        *(("top_k", value) for value in (-2, 2.5, 2**31, float("inf"), float("nan"))),
        *(("min_p", value) for value in (-0.1, 1.5)),
        *(("repetition_penalty", value) for value in (0, -1, 101)),
    ],
)
def test_values_that_no_request_may_have_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {name} must be .*number in"):
        read(tmp_path, {name: value})
    assert read(tmp_path, {name: value}, None).values == {}


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read as JSON"):
        read_sampling_defaults(tmp_path, "auto")


def test_the_built_in_models_state_none() -> None:
    for name in BUILTIN:
        assert read_sampling_defaults(resolve_model(name), "auto").values == {}


def test_the_setting_is_auto_or_none() -> None:
    with pytest.raises(
        ConfigError, match=r"generation_config must be auto, or none .*; got 'other'"
    ):
        EngineConfig(generation_config="other")
    assert EngineConfig(generation_config="vllm").generation_config == "vllm"


numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))


@given(
    st.dictionaries(st.sampled_from(NAMES), numbers),
    st.dictionaries(st.sampled_from(NAMES), st.just(0.5)),
)
def test_what_is_accepted_passes_a_requests_own_check(
    stated: dict[str, Any], asked: dict[str, Any]
) -> None:
    """And a request's own values go first."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            defaults = read(Path(folder), stated)
        except ConfigError:
            return
    defaults.params({}).check(100)
    params = defaults.params(asked)
    for name in NAMES:
        own = defaults.values.get(name, getattr(SamplingParams(), name))
        assert getattr(params, name) == asked.get(name, own)
    with pytest.raises(RequestError):
        defaults.params({"temperature": -1.0}).check(100)
