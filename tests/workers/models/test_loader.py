"""Loading: every layout becomes the same model, every damage an error that names the spot."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.models.loader import load_model
from penstock.workers.progress import LOADING, Progress
from penstock.workers.weights.checkpoint import open_checkpoint
from penstock.workers.weights.hub import resolve_model
from tests.workers.checkpoints import ALL, make_checkpoint, random_model, reference_logits
from tests.workers.models.test_decoder import PagedDecoder, Tokens

IDS = [5, 90, 17, 4, 198, 33]
SOME_TENSOR = "model.layers.1.mlp.up_proj.weight"


def logits_of(folder: Path, weights: str = "auto") -> torch.Tensor:
    decoder = load_model(folder, weights=weights, progress=False)
    return PagedDecoder(decoder).step((Tokens(IDS), len(IDS)))[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may change."""
    return Path(shutil.copytree(make_checkpoint("llama"), tmp_path / "model"))


def rewrite(folder: Path, change) -> None:
    """Let `change` edit the tensors of the checkpoint in `folder`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def rewrite_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


class TestLayouts:
    def test_sharded_is_single(self, tmp_path: Path):
        model = random_model(*ALL["llama"])
        model.save_pretrained(tmp_path, max_shard_size="60KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        assert torch.equal(logits_of(tmp_path), logits_of(make_checkpoint("llama")))

    @pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
    def test_one_tensor_an_expert_is_all_experts_in_one(self, name: str, tmp_path: Path):
        random_model(*ALL[name]).save_pretrained(tmp_path, save_original_format=False)
        fused, published = open_checkpoint(tmp_path), open_checkpoint(make_checkpoint(name))
        assert any(key.endswith("experts.gate_up_proj") for key in fused)
        gate = "w1" if name == "mixtral" else "gate_proj"
        assert any(key.endswith(f"experts.0.{gate}.weight") for key in published)
        assert torch.equal(logits_of(tmp_path), logits_of(make_checkpoint(name)))

    def test_a_lone_file_of_another_name_is_taken(self, folder: Path):
        (folder / "model.safetensors").rename(folder / "weights.safetensors")
        assert torch.equal(logits_of(folder), logits_of(make_checkpoint("llama")))

    def test_tied_embeddings_may_be_stored_under_either_name_or_both(self, tmp_path: Path):
        expected = logits_of(make_checkpoint("llama-tied"))
        folder = Path(shutil.copytree(make_checkpoint("llama-tied"), tmp_path / "model"))
        assert "lm_head.weight" not in open_checkpoint(folder)
        embedding = "model.embed_tokens.weight"
        rewrite(folder, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
        assert torch.equal(logits_of(folder), expected)
        rewrite(folder, lambda t: t.pop(embedding))
        assert torch.equal(logits_of(folder), expected)
        rewrite(folder, lambda t: t.update({embedding: -t["lm_head.weight"]}))
        torch.testing.assert_close(
            logits_of(folder), reference_logits(folder, IDS), atol=2e-4, rtol=1e-4
        )
        assert not torch.allclose(logits_of(folder), expected, atol=0.1)


class TestDtypes:
    def test_auto_is_what_the_config_says(self, folder: Path):
        assert load_model(folder, progress=False).dtype == torch.float32
        rewrite_config(folder, dtype="bfloat16")
        decoder = load_model(folder, progress=False)
        assert decoder.dtype == torch.bfloat16
        assert decoder.config.dtype == "bf16"
        assert load_model(folder, weights="fp32", progress=False).dtype == torch.float32

    def test_auto_is_what_is_stored_where_the_config_says_nothing(self, folder: Path):
        rewrite_config(folder, dtype=None)
        rewrite(folder, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
        assert load_model(folder, progress=False).config.dtype == "bf16"

    def test_fp16_becomes_something_that_a_cpu_computes_in(self, folder: Path, caplog):
        rewrite_config(folder, dtype="float16")
        rewrite(folder, lambda t: t.update({k: v.half() for k, v in t.items()}))
        with caplog.at_level(logging.INFO, "penstock.loader"):
            decoder = load_model(folder, progress=False)
        assert decoder.dtype in (torch.bfloat16, torch.float32)
        assert "fp16" in caplog.text
        exact = logits_of(folder, "fp32")
        torch.testing.assert_close(
            exact, reference_logits(folder, IDS, torch.float32), atol=2e-4, rtol=1e-4
        )

    def test_an_unknown_format_is_refused(self, folder: Path):
        with pytest.raises(ConfigError, match=r"'int3'.*fp32"):
            load_model(folder, weights="int3", progress=False)


def _drop(tensors) -> None:
    del tensors[SOME_TENSOR]


def _reshape(tensors) -> None:
    tensors[SOME_TENSOR] = tensors[SOME_TENSOR].T.contiguous()


def _to_int(tensors) -> None:
    tensors[SOME_TENSOR] = tensors[SOME_TENSOR].int()


class TestMismatch:
    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (_drop, "is missing"),
            (_reshape, r"shape \[64, 112\].*\[112, 64\]"),
            (_to_int, "is I32; weights must be one of F16"),
        ],
    )
    def test_the_error_names_file_and_tensor(self, folder: Path, change, why: str):
        rewrite(folder, change)
        with pytest.raises(LoadError, match=why) as raised:
            load_model(folder, progress=False)
        assert SOME_TENSOR in str(raised.value)
        assert str(folder) in str(raised.value)

    def test_a_config_of_another_size_names_the_tensor(self, folder: Path):
        rewrite_config(folder, intermediate_size=80)
        with pytest.raises(LoadError, match=r"layers\.0\.mlp\.gate_proj.*\[112, 64\].*\[80, 64\]"):
            load_model(folder, progress=False)

    def test_unknown_tensors_are_named_and_known_leftovers_are_not(self, folder: Path, caplog):
        load_model(folder, progress=False)
        leftovers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        rewrite(folder, lambda t: t.update(leftovers))
        load_model(folder, progress=False)
        assert not caplog.records
        rewrite(folder, lambda t: t.update({"model.layers.7.surprise": torch.ones(3)}))
        load_model(folder, progress=False)
        assert "model.layers.7.surprise" in caplog.text
        assert "inv_freq" not in caplog.text


class TestProgress:
    def test_a_bar_of_bytes_on_a_terminal_that_ends_full(self, folder: Path, capfd, monkeypatch):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        load_model(folder, progress=True)
        out, err = capfd.readouterr()
        assert out == ""
        assert "loading weights: 100%" in err
        assert "B/s" in err

    def test_or_silence(self, folder: Path, capfd, monkeypatch):
        load_model(folder)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        load_model(folder, progress=False)
        assert capfd.readouterr() == ("", "")

    def test_or_a_report_of_every_byte(self, folder: Path):
        seen: list[Progress] = []
        load_model(folder, progress=seen.append)
        total = sum(each.num_bytes for each in open_checkpoint(folder).values())
        done = [each.done for each in seen]
        assert {(each.phase, each.total) for each in seen} == {(LOADING, total)}
        assert done == sorted(done) and (done[0], done[-1]) == (0, total)


class TestNames:
    def test_a_folder_is_itself(self, folder: Path):
        assert resolve_model(str(folder)) == folder

    @pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/nowhere-at-all", "a/b/c"])
    def test_a_missing_path_is_not_looked_up_on_the_hub(self, name: str):
        with pytest.raises(LoadError, match="is no folder"):
            resolve_model(name)

    def test_a_file_is_no_folder(self, folder: Path):
        with pytest.raises(LoadError, match="is no folder"):
            resolve_model(str(folder / "config.json"))

    def test_offline_the_error_names_the_remedy(self):
        with pytest.raises(LoadError, match=r"penstock-tests/absent: HF_HUB_OFFLINE .*its folder"):
            resolve_model("penstock-tests/absent")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path, caplog):
    """GLM-4.5's files have one after the last; any other tensor that is not known is named."""
    source = make_checkpoint("glm4_moe")
    tensors = load_file(source / "model.safetensors")
    more = {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.2." in name
    }
    more["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file({**tensors, **more}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    load_model(tmp_path, progress=False)
    assert "unknown tensors" not in caplog.text
    odd = {"model.layers.1.odd": torch.zeros(2)}
    save_file({**tensors, **odd}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_model(tmp_path, progress=False)
    assert "1 unknown tensors are ignored: model.layers.1.odd" in caplog.text


LOADED = """
import sys
from penstock.workers.models.loader import load_model

def resident() -> tuple[int, int]:
    lines = open("/proc/self/status").read().splitlines()
    found = dict(line.split(":", 1) for line in lines if line.startswith(("VmHWM", "VmRSS")))
    return tuple(int(found[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))

before, _ = resident()
model = load_model(sys.argv[1], progress=False)
now, peak = resident()
print(now - before, peak - before, model.weights.num_bytes)
"""


def test_what_was_read_does_not_stay_in_memory(tmp_path):
    """glibc keeps what is freed: half of a bf16 model for as long as the worker lived."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12,
        num_attention_heads=16, num_key_value_heads=4, architectures=["LlamaForCausalLM"],
        max_position_embeddings=128, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        shapes = LlamaForCausalLM(config).state_dict()
    save_file(
        {name: torch.zeros(each.shape, dtype=torch.bfloat16) for name, each in shapes.items()},
        tmp_path / "model.safetensors",
    )
    config.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOADED, tmp_path], check=True, capture_output=True, text=True
    )
    grown, peak, weights = map(int, done.stdout.split())
    assert weights > 250 << 20
    assert grown < 1.15 * weights and peak < 1.5 * weights
