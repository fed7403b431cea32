"""Workers whose model has other files: an ingress uses those of its own tokenizer only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.deployments.config import config_from
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.preflight import check_before_start
from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.weights.model_digest import model_digest
from penstock.workers.worker import Worker
from tests.deployments.waiting import until
from tests.workers.checkpoints import VOCAB_SIZE, make_checkpoint

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, configuration and tokenizer, all saved by transformers."""
    folder = Path(tmp_path_factory.mktemp("models")) / "first"
    shutil.copytree(make_checkpoint("llama"), folder)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"w{n}": n for n in range(3, VOCAB_SIZE)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def swap_two_words(folder: Path) -> None:
    """As of a vocabulary in another order: of the same size, and with the same words."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["w7"], words["w8"] = words["w8"], words["w7"]
    path.write_text(json.dumps(content))


def add_a_token(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text())
    content["added_tokens_decoder"] = {"198": {"content": "<call>", "special": True}}
    path.write_text(json.dumps(content))


def another_end(folder: Path) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "eos_token_id": 9}))


def another_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )


@contextmanager
def worker_of(folder: Path, **settings: Any) -> Iterator[Worker]:
    config = EngineConfig(
        model=str(folder), weights="fp32", device="cpu", num_blocks=64, threads=1, **settings
    )
    worker = Worker.load(config, model_name="m", host="127.0.0.1")
    try:
        yield worker
    finally:
        worker.stop()


@pytest.mark.parametrize("change", [swap_two_words, add_a_token, another_end, another_template])
def test_a_worker_of_another_tokenizer_is_as_if_it_were_not_there(
    checkpoint, tmp_path, run, caplog, change: Change
):
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    change(other)
    same = change is another_template  # an ingress alone renders templates
    with ExitStack() as stack:
        workers = [stack.enter_context(worker_of(each)) for each in (checkpoint, other)]
        infos = [worker.info for worker in workers]

        async def scenario() -> tuple[list[int], bool]:
            tokenizer = model_digest(checkpoint).partition("-")[0]
            both, alone = (WorkerPool("test", tokenizer_digest=tokenizer) for _ in range(2))
            try:
                both.update(infos)
                alone.update(infos[1:])
                await until(lambda: both.num_connected == 1 + same)
                await until(lambda: alone.num_connected == same)
                return sorted(both._links), alone.ready()
            finally:
                await both.close()
                await alone.close()

        used, is_ready = run(scenario())
    assert used == sorted(info.epoch for info in infos[: 1 + same])
    assert is_ready is same, "requests would go to it"
    lines = [each.getMessage() for each in caplog.records if "another tokenizer" in each.message]
    assert len(lines) == (0 if same else 2)
    assert all("compare the model's files" in line for line in lines)


def test_a_pinned_digest_is_the_only_one_that_starts(checkpoint, tmp_path):
    digest = model_digest(checkpoint)
    with worker_of(checkpoint, model_digest=digest) as worker:
        assert worker.info.model_digest == digest
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    swap_two_words(other)
    found = model_digest(other)
    with pytest.raises(LoadError, match=f"digest {found}, and {digest} is configured"):
        Worker.load(
            EngineConfig(model=str(other), device="cpu", model_digest=digest),
            model_name="m",
            host="127.0.0.1",
        )
    with pytest.raises(ConfigError, match=r"^model_digest: the files in"):
        check_before_start(config_from({"model": str(other), "model_digest": digest}))


def test_a_revision_is_for_models_of_the_hub(checkpoint):
    with pytest.raises(ConfigError, match=r"^revision 'v1' is for models of the hub"):
        check_before_start(config_from({"model": str(checkpoint), "revision": "v1"}))
