"""What each rank of a group holds and sends, against the plan; and a model for which only a group
has the memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.kernels.gather import gather as gather_in_memory
from penstock.workers.engine.engine import Engine
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards import memory
from penstock.workers.planning.group import Group
from penstock.workers.planning.hardware import device_named
from penstock.workers.planning.roofline import Roofline
from penstock.workers.request import Request, SamplingParams
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import make_checkpoint, random_model, random_prompt
from tests.workers.engine.group.test_group import engine_of

# Widths that two ranks share evenly, and weights that are most of a process's memory.
EVEN = {
    "vocab_size": 192, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
EVEN_MOE = {
    **EVEN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
LARGE = {
    **EVEN, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 8,
}  # fmt: skip
LENT: dict[str, Any] = {
    "num_blocks": 80, "max_num_seqs": 3, "max_num_batched_tokens": 64, "speculate": "off",
    "kv_commit": "eager",
}  # fmt: skip
PP2 = {"pipeline_parallel_size": 2}
# Bytes beside what Python and torch take: the weights of LARGE are 725 MiB; one process needs more
# than 800, each of two ranks less than 680.
LIMIT = 750 << 20


def made(model_type: str, settings: dict[str, int], folder: Path) -> Path:
    random_model(model_type, settings).save_pretrained(folder)
    return folder


def answer(engine: Engine, num_tokens: int = 8) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return ids_of(answers(engine, [Request("a", (5, 6, 7), params)])["a"])


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "olmoe"])
def test_memory_and_calls_are_as_planned(model_type, tmp_path, monkeypatch):
    settings = EVEN if model_type == "llama" else EVEN_MOE
    folder = made(model_type, settings, tmp_path)
    config, group = ModelConfig.from_pretrained(folder), Group(2)
    received: list[int] = []
    monkeypatch.setattr(memory, "gather", counted(received))
    engine = engine_of(str(folder), 2, weights="fp32", kv="auto")
    try:
        plan = Roofline(config, device_named("cpu"), "fp32", "fp32", block_size=4, group=group)
        stats = engine.stats()
        for rank in stats.ranks:
            # Biases, which the plan leaves whole, are the difference.
            assert rank.weight_bytes == pytest.approx(plan.weight_bytes, rel=5e-3)
            assert rank.kv_bytes == stats.num_blocks * plan.block_bytes
        assert stats.num_block_bytes == 2 * plan.block_bytes
        calls = [each.num_gathers for each in stats.ranks]
        received.clear()
        answer(engine, 1)  # one step, of three rows
        ranks = engine.stats().ranks
        assert [each.num_gathers - n for each, n in zip(ranks, calls)] == [group.calls(config)] * 2
        if model_type == "llama":  # experts' rows go by the routes of the tokens
            assert sum(received) == group.sent_bytes(config, 3, 1, 4)
        assert ranks[0].received_bytes - stats.ranks[0].received_bytes == sum(received)
        num_logits_bytes = 4 * config.vocab_size // 2  # for the first rank alone
        assert ranks[1].received_bytes - stats.ranks[1].received_bytes == (
            sum(received) - num_logits_bytes
        )
        steps = engine.stats().num_steps
        answer(engine, 9)
        num_steps = engine.stats().num_steps - steps
        assert ranks[0].num_gathers + num_steps * group.calls(config) == (
            engine.stats().ranks[0].num_gathers
        )
        assert all(each.wait_s > 0 for each in engine.stats().ranks)
    finally:
        engine.close()


def counted(received: list[int]):
    """`gather`, and what this rank receives by it."""

    def gather(own, shared, first, out, meeting):
        received.append((shared.numel() - own.numel()) * own.element_size())
        gather_in_memory(own, shared, first, out, meeting)

    return gather


@pytest.mark.parametrize("cut", [{"num_ranks": 3}, {"num_ranks": 1, **PP2}])
def test_all_ranks_borrow_the_same_blocks_for_a_step(cut):
    """As many as the rank with the smallest blocks needs, beside blocks that long answers hold."""
    folder = str(make_checkpoint("llama-4-kv"))  # of which three ranks have 2, 1 and 1 KV heads
    requests = [
        Request(
            str(n),
            tuple(random_prompt(n)),
            SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
        )
        for n in (70, 71, 50, 66)
    ]
    one = engine_of(folder, 1, num_blocks=400, activation_memory="separate")
    want = answers(one, requests)
    one.close()
    apart = engine_of(folder, threads=3, activation_memory="separate", **LENT, **cut)
    has_all = apart.stats().ranks
    apart.close()
    engine = engine_of(folder, threads=3, **LENT, **cut)
    try:
        found = answers(engine, requests)
        assert {name: ids_of(deltas) for name, deltas in found.items()} == {
            name: ids_of(deltas) for name, deltas in want.items()
        }
        assert engine.stats().num_shortened_steps > 0
        saved = engine.memory.plan.bytes_for(64) - engine.memory.plan.bytes_for(3)
        for rank, more in zip(engine.stats().ranks, has_all, strict=True):
            assert more.reserve_bytes - rank.reserve_bytes == pytest.approx(saved, abs=512)
    finally:
        engine.close()


LIMITED = """
import resource, sys
from penstock.workers.errors import LoadError
from tests.workers.engine.group.test_group import engine_of
from tests.workers.engine.group.test_memory import LIMIT, answer, in_use
bound = in_use() + LIMIT
resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
try:
    engine = engine_of(sys.argv[1], int(sys.argv[2]), weights="fp32")
except LoadError as error:
    sys.exit(str(error))
print(answer(engine))
engine.close()
"""


def in_use() -> int:
    """The bytes that RLIMIT_DATA counts of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmData")).split()[1]) << 10


def test_two_ranks_serve_what_one_process_has_no_memory_for(tmp_path):
    assert resource.getrlimit(resource.RLIMIT_DATA)[1] == resource.RLIM_INFINITY
    folder = made("llama", LARGE, tmp_path)
    found = [
        subprocess.run(
            [sys.executable, "-c", LIMITED, str(folder), str(ranks)],
            cwd=Path(__file__).parents[4], capture_output=True, timeout=200, check=False, text=True,
        )
        for ranks in (1, 2)
    ]  # fmt: skip
    assert found[0].returncode == 1
    assert "the memory this process may use does not suffice" in found[0].stderr
    assert "--tensor-parallel-size" in found[0].stderr
    assert found[1].returncode == 0, found[1].stderr
    engine = engine_of(str(folder), 1, weights="fp32")
    try:
        assert found[1].stdout.split("\n")[-2] == str(answer(engine))
    finally:
        engine.close()
