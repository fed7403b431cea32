"""LoRA adapters in a group: each rank has its part, and answers are those of one process.

Real processes. The oracle is one process with the same adapters, whose answers equal those of
merged checkpoints (tests/workers/adapters).
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penstock.workers.adapters.changes import adapter_fields
from penstock.workers.adapters.packed import Adapter, AdapterPart, adapter_bytes, pack_adapter
from penstock.workers.adapters.peft import read_adapter
from penstock.workers.adapters.step import StepAdapters
from penstock.workers.adapters.table import AdapterTable
from penstock.workers.engine import load
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.group import wire
from penstock.workers.engine.group.adapters import AdapterRanks, HeldAdapters
from penstock.workers.engine.group.peer import Peer
from penstock.workers.errors import LoadError
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import load_model
from penstock.workers.models.shards.decoder import ShardDecoder
from penstock.workers.models.shards.shard import Shard
from penstock.workers.models.stages.stage import Stage
from penstock.workers.request import Request, RequestError, SamplingParams
from penstock.workers.stats import AdapterChange
from tests.workers.adapters.peft_files import ATTENTION, MLP, write_adapter
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import make_checkpoint, random_prompt
from tests.workers.engine.group.forked_ranks import forked_ranks
from tests.workers.engine.group.test_far_ranks import Here, group_of
from tests.workers.engine.group.test_group import engine_of

NAMES = ("", "all", "some")
PROMPTS = {"short": random_prompt(3), "long": random_prompt(41), "even": random_prompt(16)}
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")  # as phi3 stores them
Answer = tuple[list[int], list[Any]]  # ids and logprobs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Of an adapter of a checkpoint: `all` linears that it may change, `some`, or `other` numbers
    of all."""
    root = tmp_path_factory.mktemp("adapters")

    @functools.cache
    def written(base: str, name: str) -> Path:
        checkpoint, folder = make_checkpoint(base), root / f"{base}-{name}"
        linears = FUSED if base == "phi3" else ATTENTION + MLP
        how: dict[str, dict[str, Any]] = {
            "all": {"rank": 5, "targets": linears, "seed": 1},
            "some": {"rank": 3, "targets": ("v_proj", "o_proj", "down_proj"), "seed": 2},
            "other": {"rank": 8, "targets": linears, "seed": 3},
        }
        write_adapter(folder, checkpoint, **how[name])
        keep(folder, lambda tensor: "expert" not in tensor)
        return folder

    return written


def keep(folder: Path, wanted: Callable[[str], bool]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if wanted(name)}
    save_file(tensors, file)


@contextmanager
def running(base: str, folders: Any, cut: dict[str, int], **options: Any) -> Iterator[Engine]:
    """An engine with the adapters `all` and `some`; `cut`: nothing for one process."""
    modules = tuple(f"{name}={folders(base, name)}" for name in NAMES if name)
    lora = {"enable_lora": True, "lora_modules": modules, "max_loras": 3, "max_lora_rank": 8}
    size = {"threads": 4, "max_num_seqs": 8, "max_num_batched_tokens": 100, "num_blocks": 128}
    with forked_ranks():
        engine = engine_of(str(make_checkpoint(base)), 1, **{**size, **lora, **cut, **options})
    try:
        yield engine
    finally:
        engine.close()


def run(engine: Engine, names: tuple[str, ...] = NAMES) -> dict[str, Answer]:
    """Every prompt with every adapter, and without one, all at once; the short ones are sampled."""
    requests = [
        Request(
            f"{prompt} {name}",
            tuple(ids),
            SamplingParams(
                temperature=0.8 * (prompt == "short"), seed=7, max_tokens=9, ignore_eos=True,
                logprobs=2,
            ),
            adapter=name,
        )
        for prompt, ids in PROMPTS.items()
        for name in names
    ]  # fmt: skip
    found = answers(engine, requests)
    return {name: (ids_of(each), [d.logprobs for d in each]) for name, each in found.items()}


def check_of_one(base: str, folders: Any, cut: dict[str, int], **options: Any) -> None:
    with running(base, folders, {}, **options) as one:
        expected = run(one)
    for prompt in PROMPTS:
        ids = {tuple(expected[f"{prompt} {name}"][0]) for name in NAMES}
        assert len(ids) == len(NAMES), "an adapter that changes nothing"
    with running(base, folders, cut, **options) as group:
        assert run(group) == expected


TP, PP = "tensor_parallel_size", "pipeline_parallel_size"


@pytest.mark.parametrize(
    ("base", "cut", "weights"),
    [
        ("llama", {TP: 2}, "fp32"),
        ("llama-4-kv", {TP: 3}, "int8"),  # nothing divides evenly
        ("llama", {TP: 4}, "bf16"),  # more ranks than KV heads
        ("llama", {PP: 2}, "int8"),  # two layers and one
        ("qwen3", {TP: 2, PP: 2}, "bf16"),
        ("olmo2", {TP: 2, PP: 2}, "int8"),  # norms over all heads, none before the layers
        ("qwen2_moe-normed", {TP: 2}, "fp32"),  # experts, and a layer without
        ("glm4_moe", {PP: 3}, "bf16"),
        ("glm4", {TP: 3}, "int4"),  # rotary pairs that are neighbours, shared KV heads
        ("phi3", {TP: 2}, "int8"),  # fused files
    ],
)  # fmt: skip
def test_answers_of_one_process(base, cut, weights, folders):
    check_of_one(base, folders, cut, weights=weights)


@pytest.mark.parametrize(
    ("cut", "options"),
    [
        ({TP: 2}, {"num_blocks": 40, "kv_commit": "eager", "max_num_batched_tokens": 16}),
        ({PP: 2}, {"kv_commit": "deferred", "kv_defer_mode": "always", "ridge_tokens": 64}),
        ({TP: 2, PP: 2}, {"speculate": "lookup", "async_scheduling": "on"}),
        ({TP: 2}, {"num_blocks": 40, "host_kv_gb": 0.01, "kv_restore": "load"}),
    ],
)
def test_under_every_schedule(cut, options, folders):
    check_of_one("llama", folders, cut, **options)


def test_by_collective_operations(monkeypatch, folders):
    """What GPUs use, by gloo."""
    monkeypatch.setattr(load, "transport_of", lambda device, is_far: "gloo")
    check_of_one("llama-4-kv", folders, {TP: 3}, weights="bf16")


@pytest.mark.parametrize("cut", [{TP: 2}, {TP: 2, PP: 2}])
def test_adapters_come_and_go_while_requests_run(cut, folders):
    """One is replaced, and one dropped, in the middle of an answer; a third one comes."""

    def story(engine: Engine) -> list[Any]:
        table = engine.adapters
        assert table is not None
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)

        def request(name: str, adapter: str) -> Request:
            return Request(name, tuple(PROMPTS["long"]), params, adapter=adapter)

        found: list[Any] = [run(engine)]
        for name in NAMES:
            engine.add(request(f"before {name}", name))
        deltas = engine.step() + engine.step()
        table.load("all", str(folders("llama", "other")))
        assert table.unload("some") and not table.unload("some")
        table.load("new", str(folders("llama", "some")))
        with pytest.raises(RequestError, match="no adapter named 'some'"):
            engine.add(request("refused", "some"))
        for name in ("all", "new"):
            engine.add(request(f"after {name}", name))
        while engine.has_work():
            deltas += engine.step()
            engine.check()
        found.append([(d.request_id, d.token_ids, d.logprobs) for d in deltas])
        found.append(run(engine, ("", "all", "new")))  # prefixes of the first ones may be cached
        found.append([table.unload(name) for name in ("all", "new")])
        found.append(run(engine, ("",)))  # replayed again
        return found

    with running("llama", folders, {}) as one:
        expected = story(one)
    with running("llama", folders, cut) as group:
        assert story(group) == expected
        assert group.adapters is not None and not group.adapters.total_bytes


def test_each_rank_has_its_part(folders):
    """And the bytes of all are told, as those of one process are, but for copies of A."""
    folder, config = folders("llama", "all"), ModelConfig.from_pretrained(make_checkpoint("llama"))
    with running("llama", folders, {TP: 2}) as group:
        table, model = group.adapters, group.model
        assert table is not None and isinstance(model, ShardDecoder)
        file = read_adapter(folder)
        parts = [
            packed_for(Shard(model.whole_config, rank, 2), Stage(0, 1, 3), file) for rank in (0, 1)
        ]
        found = table.find("all")
        assert found is not None
        assert (found.num_bytes, *found.other_bytes) == tuple(each.num_bytes for each in parts)
        assert [rank.adapter_bytes for rank in group.stats().ranks] == table.rank_bytes
        whole = pack_adapter("a", file, config_of("llama"), torch.device("cpu")).num_bytes
        assert found.num_bytes < 0.75 * whole
        assert table.num_bytes < table.reserved_bytes < 3 * adapter_bytes(config, 8)
        fields = adapter_fields(table, [])
        assert fields["adapter_bytes"] == table.total_bytes == sum(table.rank_bytes)
        assert table.rank_bytes[0] == table.num_bytes > 0 < table.rank_bytes[1]


def config_of(base: str) -> ModelConfig:
    return ModelConfig.from_pretrained(make_checkpoint(base))


def packed_for(shard: Shard, stage: Stage, file: Any) -> Adapter:
    def outputs(name: str) -> slice:
        span = shard.rows_of(name)
        assert span is not None
        return slice(span.first, span.end)

    part = AdapterPart(stage.layers, outputs)
    adapter = pack_adapter("a", file, shard.config, torch.device("cpu"), part)
    assert adapter.num_bytes <= adapter_bytes(shard.config, file.rank, part)
    assert len(adapter.layers) == len(stage.layers)
    return adapter


def refusal(table: AdapterTable, folder: Path, name: str = "bad") -> str:
    names, num_bytes = table.names, table.total_bytes
    with pytest.raises(LoadError) as refused:
        table.load(name, str(folder))
    assert (table.names, table.total_bytes) == (names, num_bytes)
    return str(refused.value)


def test_a_bad_adapter_is_refused_as_in_one_process(folders, tmp_path):
    """Wherever it is wrong: in a layer of the last stage, too. All ranks go on."""
    wrong = [tmp_path / "missing", write_adapter(tmp_path / "mistral", make_checkpoint("mistral"))]
    base = make_checkpoint("llama")
    wrong.append(write_adapter(tmp_path / "rank", base, rank=9))
    wrong.append(write_adapter(tmp_path / "last", base, rank=2))
    keep(wrong[-1], lambda tensor: "layers.2.mlp.up_proj.lora_B" not in tensor)
    wrong.append(write_adapter(tmp_path / "bias", base, bias="all"))
    found = []
    for cut in ({}, {TP: 2, PP: 2}):
        with running("llama", folders, cut, max_loras=2) as engine:
            table = engine.adapters
            assert table is not None
            texts = [refusal(table, folder, "all") for folder in wrong]
            texts.append(refusal(table, folders("llama", "other")))
            changes = [AdapterChange(1, "bad", str(wrong[0])), AdapterChange(2, "some", None)]
            fields = adapter_fields(table, changes)
            texts += [str(fields["adapter_failures"]), str(fields["adapters"])]
            found.append((texts, run(engine, ("", "all"))))
    assert found[0] == found[1]
    words = ("no LoRA adapter", "another base", "max_lora_rank", "no lora_B", "bias", "max_loras")
    assert all(word in text for word, text in zip(words, found[0][0]))


def test_a_rank_that_cannot_load_an_adapter_says_so_and_none_keeps_it(
    folders, tmp_path, monkeypatch
):
    """Ranks of other machines, whose folder of the same path lacks the adapter, or holds another:
    a path that begins with the working directory is another folder for each process."""
    here, there = tmp_path / "here", tmp_path / "there"
    base = make_checkpoint("llama")
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(there)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    group = group_of(str(base), 2, (Here(),), **lora)
    monkeypatch.chdir(here)
    folder = Path("/proc/self/cwd/adapter")
    try:
        table = group.adapters
        assert table is not None
        write_adapter(here / "adapter", base, rank=5, seed=1)
        assert refusal(table, folder) == (
            f"rank 1 of the group, on another machine: {folder} is no LoRA adapter: it has no "
            "adapter_config.json, which peft writes (an adapter's folder must be at the same path, "
            "with the same files, on each machine of a group)"
        )
        write_adapter(there / "adapter", base, rank=5, seed=2)
        assert "holds other files than the first rank has read" in refusal(table, folder)
        write_adapter(there / "adapter", base, rank=5, seed=1)
        table.load("all", str(folder))
        found = run(group, ("", "all"))
    finally:
        group.close()
    with running("llama", folders, {}) as one:
        assert run(one, ("", "all")) == found


def test_adapters_change_on_another_thread_than_steps_run_on(folders):
    """As in a worker. What the ranks are told of both keeps apart, and the answers stay."""
    with running("llama", folders, {}) as one:
        expected = run(one)
    with running("llama", folders, {TP: 2, PP: 2}) as group:
        table, ends = group.adapters, threading.Event()
        assert table is not None

        def change() -> int:
            number = 0
            while not ends.is_set():
                table.load("other", str(folders("llama", ("other", "some")[number % 2])))
                number += table.unload("other")
            return number

        with ThreadPoolExecutor(1) as thread:
            changing = thread.submit(change)
            try:
                for _ in range(3):
                    assert run(group) == expected
            finally:
                ends.set()
            assert changing.result() > 3


def test_a_rank_drops_an_adapter_when_the_first_one_has_let_go_of_it(folders):
    """Not while a sequence or a step has it."""
    mine, theirs = socket.socketpair()
    model = load_model(make_checkpoint("llama"), progress=False)
    held = HeldAdapters(model, partial(wire.send, theirs))

    def send(kind: int, contents: bytes) -> None:
        wire.send(mine, kind, contents)
        held.take(*wire.receive(theirs))

    with mine, theirs:
        ranks = AdapterRanks([Peer(1, mine, is_here=True)], send, num_here=1)
        table = AdapterTable(config_of("llama"), model.device, 2, 8, None, ranks)
        step = StepAdapters([(table.load("a", str(folders("llama", "all"))), 0, 4)], model.device)
        table.load("b", str(folders("llama", "some")))
        ranks.before_step(step)
        chosen = held.of_step()
        assert chosen is not None and held.of_step() is None
        assert [(each.number, *rows) for each, *rows in chosen.spans] == [(1, 0, 4)]
        assert table.unload("a") and held.numbers == [1, 2]
        table.load("b", str(folders("llama", "other")))
        assert held.numbers == [1, 3]
        del step
        ranks.before_step(None)
        assert held.numbers == [3] and held.of_step() is None


@given(st.data())
def test_a_part_of_a_step_has_the_adapters_of_its_rows(data):
    adapters = [Adapter(str(n), b"", (), 1, 0, n) for n in range(3)]
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    chosen = data.draw(st.lists(st.sampled_from([None, *adapters]), min_size=8, max_size=8))
    rows: list[Adapter | None] = []
    spans = []
    for adapter, length in zip(chosen, lengths):
        if adapter is not None:
            spans.append((adapter, len(rows), len(rows) + length))
        rows += [adapter] * length
    step = StepAdapters(spans, torch.device("cpu"))
    bounds = sorted({0, len(rows), *data.draw(st.lists(st.integers(0, len(rows)), max_size=4))})
    found: list[Adapter | None] = []
    for first, end in pairwise(bounds):
        own: list[Adapter | None] = [None] * (end - first)
        part = step.part(first, end)
        for adapter, a, b in () if part is None else part.spans:
            own[a:b] = [adapter] * (b - a)
        found += own
    assert found == rows
