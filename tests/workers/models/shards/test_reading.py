"""What each rank of a group reads of a checkpoint: its part, and together everything once."""

from __future__ import annotations

import pytest
import torch

from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.reading import own_part
from penstock.workers.models.shards.shard import Shard
from penstock.workers.weights.checkpoint import StoredTensor, open_checkpoint
from penstock.workers.weights.gguf import open_gguf
from tests.workers.checkpoints import ALL, make_checkpoint, random_model
from tests.workers.engine.group.test_group import both
from tests.workers.gguf_files import write_gguf


def parts_of(
    tensors: dict[str, StoredTensor], config: ModelConfig, num_ranks: int
) -> list[tuple[dict[str, StoredTensor], frozenset[str]]]:
    return [own_part(tensors, Shard(config, rank, num_ranks)) for rank in range(num_ranks)]


def check_once(tensors: dict[str, StoredTensor], config: ModelConfig, num_ranks: int) -> None:
    """Every tensor is read whole by every rank, or once by all together, in their order."""
    parts = parts_of(tensors, config, num_ranks)
    for name, stored in tensors.items():
        holders = [(part[name], modules) for part, modules in parts if name in part]
        module, _, kind = name.rpartition(".")
        known = {name, module} if kind != "bias" else {name}
        is_cut = [not known.isdisjoint(modules) for _, modules in holders]
        assert len(set(is_cut)) == 1
        if is_cut[0]:
            assert len(holders) == num_ranks
            whole = torch.cat([each.read(codes=True) for each, _ in holders])
            assert torch.equal(whole, stored.read(codes=True))
            assert sum(each.num_bytes for each, _ in holders) == stored.num_bytes
        else:
            assert len(holders) == 1 if ".experts." in name else len(holders) == num_ranks
            assert all(each == stored for each, _ in holders)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "name", ["llama", "llama-bias", "llama-tied", "olmoe", "mixtral", "qwen3_next", "qwen3_5_text"]
)
def test_a_checkpoint_is_read_once(name, num_ranks):
    folder = make_checkpoint(name)
    config = ModelConfig.from_pretrained(folder)
    check_once(open_checkpoint(folder), config, min(num_ranks, config.num_kv_heads))


@pytest.mark.parametrize("matrices", ["Q4_0", "Q8_0", "F16"])
def test_a_gguf_file_is_read_once(matrices, tmp_path):
    """The rows of q and k change places in it, by heads."""
    pytest.importorskip("gguf", reason="the package gguf, which writes the files, is missing")
    model_type, settings = ALL["llama"]  # its widths are whole blocks:
    random_model(model_type, {**settings, "intermediate_size": 128}).save_pretrained(tmp_path)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", matrices)
    check_once(open_gguf(file), ModelConfig.from_pretrained(file), 2)
    group, one = both(str(file), weights="auto")
    assert group == one


@pytest.mark.parametrize("name", ["llama-4-kv", "olmoe-4-kv"])
def test_a_rank_reads_its_share(name):
    folder = make_checkpoint(name)
    tensors = open_checkpoint(folder)
    parts = parts_of(tensors, ModelConfig.from_pretrained(folder), 4)

    def of_linears(part: dict[str, StoredTensor]) -> int:
        linears = (each for name, each in part.items() if "_proj." in name)
        return sum(each.num_bytes for each in linears)

    total = of_linears(tensors)
    shares = [of_linears(part) for part, _ in parts]
    assert sum(shares) == total
    assert max(shares) < 0.41 * total  # five experts, of which the first rank has two


def test_packed_tensors_are_read_whole_and_cut_in_memory():
    """Those of compressed-tensors and the like, whose rows are not ranges of bytes."""
    folder = make_checkpoint("llama")
    tensors = open_checkpoint(folder)
    module = "model.layers.0.self_attn.q_proj"
    weight = tensors.pop(f"{module}.weight")
    tensors[f"{module}.qweight"] = weight
    tensors["model.layers.0.self_attn.k_proj.weight_scale"] = weight
    ((part, modules), _) = parts_of(tensors, ModelConfig.from_pretrained(folder), 2)
    assert part[f"{module}.qweight"] == weight and module not in modules
    assert "model.layers.0.self_attn.k_proj" not in modules
    assert "model.layers.0.self_attn.v_proj" in modules
