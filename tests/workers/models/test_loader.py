"""Loading: every layout becomes the same model, every damage an error that names the spot."""

from __future__ import annotations

import functools
import http.server
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.models.loader import load_model
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
    def test_a_bar_of_bytes_on_stderr_that_ends_full(self, folder: Path, capfd):
        load_model(folder, progress=True)
        out, err = capfd.readouterr()
        assert out == ""
        assert "loading: 100%" in err
        assert "B/s" in err

    def test_or_silence(self, folder: Path, capfd):
        load_model(folder, progress=False)
        assert capfd.readouterr() == ("", "")


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
        with pytest.raises(LoadError, match=r"'penstock-tests/absent'.*network.*its folder"):
            resolve_model("penstock-tests/absent")


class Hub(http.server.SimpleHTTPRequestHandler):
    """As much of a model hub as its client needs to fetch one repository, `me/tiny`."""

    COMMIT = "0" * 40
    requested: list[str]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *args) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        root = Path(self.directory)
        path = self.path.partition("?")[0]
        resolve = f"/me/tiny/resolve/{self.COMMIT}/"
        if path == "/api/models/me/tiny/revision/main":
            body = json.dumps({"id": "me/tiny", "sha": self.COMMIT, "siblings": []}).encode()
        elif path == f"/api/models/me/tiny/tree/{self.COMMIT}":
            files = sorted(p for p in root.rglob("*") if p.is_file())
            body = json.dumps(
                [
                    {
                        "type": "file",
                        "path": str(p.relative_to(root)),
                        "size": p.stat().st_size,
                        "oid": "1" * 40,
                    }
                    for p in files
                ]
            ).encode()
        elif path.startswith(resolve) and (root / path.removeprefix(resolve)).is_file():
            self.requested.append(path.removeprefix(resolve))
            body = (root / path.removeprefix(resolve)).read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hash(path) & 0xFFFFFFFF:x}"')
        self.send_header("X-Repo-Commit", self.COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


class TestHub:
    def test_a_hub_id_is_fetched_without_what_is_not_needed_and_found_again_offline(
        self, folder: Path, tmp_path: Path
    ):
        for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "model.py"):
            (folder / name).write_bytes(b"junk")
        (folder / "original").mkdir()
        (folder / "original" / "model.safetensors").write_bytes(b"junk")
        (folder / "tokenizer.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("x")
        requested: list[str] = []
        handler = type("Handler", (Hub,), {"requested": requested})
        server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = (
            "from huggingface_hub import constants\n"
            "from penstock.workers.models.loader import load_model\n"
            "for constants.HF_HUB_OFFLINE in (False, True):\n"
            "    print(len(load_model('me/tiny', progress=False).layers))"
        )
        env = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "0",
        }
        try:
            run = subprocess.run(
                [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200
            )
        finally:
            server.shutdown()
            server.server_close()
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == ["3", "3"]
        assert sorted(set(requested)) == [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
