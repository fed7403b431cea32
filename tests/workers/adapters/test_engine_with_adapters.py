"""Engine: answers with adapters are those of merged checkpoints, however requests are batched.

The oracle is transformers' `generate` in fp32 on W + scale * B A.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels.cpu import native
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, RequestError, SamplingParams
from penstock.workers.speculation.proposers import Lookup
from penstock.workers.speculation.widths import MeasuredWidths, StepCosts
from tests.workers.adapters.peft_files import ATTENTION, MLP, merged, write_adapter
from tests.workers.answers import answers, ids_of, poison_released
from tests.workers.checkpoints import make_checkpoint, random_prompt, reference_greedy

NUM_NEW = 12
KINDS: dict[str, dict[str, Any]] = {
    "r4": {"rank": 4},
    "r1": {"rank": 1},
    "r16": {"rank": 16, "lora_alpha": 20},
    "r3 of q and v": {"rank": 3, "targets": ("q_proj", "v_proj"), "lora_alpha": 12},
    "r8 of o and down": {"rank": 8, "targets": ("o_proj", "down_proj")},
    "rslora": {"rank": 5, "use_rslora": True, "lora_alpha": 3},
    "patterns": {"rank": 4, "ranks": {"k_proj": 7}, "alpha_pattern": {"up_proj": 9}},
    "r2 of the MLP": {"rank": 2, "targets": MLP, "lora_alpha": 6},
}


@functools.cache
def _root() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="penstock-adapters-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def adapter(kind: str, base: str = "llama") -> tuple[Path, Path]:
    """The folder of an adapter, and of its merged checkpoint."""
    return _adapter(kind, base)


@functools.cache
def _adapter(kind: str, base: str) -> tuple[Path, Path]:
    number, checkpoint = [*KINDS].index(kind), make_checkpoint(base)
    folder = _root() / f"{base}-{number}"
    how = dict(KINDS[kind])
    if base == "phi3":
        how["targets"] = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    if base in ("mixtral", "qwen3_moe"):
        how["targets"] = ATTENTION
    write_adapter(folder, checkpoint, seed=number, **how)
    return folder, merged(folder, checkpoint, _root() / f"{base}-{number}-merged")


@functools.cache
def model_of(name: str, weights: str) -> Decoder:
    return load_model(make_checkpoint(name), weights=weights, progress=False)


def engine_of(
    kinds: tuple[str, ...] = (*KINDS,),
    base: str = "llama",
    weights: str = "fp32",
    speculation: Any = None,
    **settings: Any,
) -> Engine:
    modules = tuple(f"{kind.replace(' ', '-')}={adapter(kind, base)[0]}" for kind in kinds)
    fixed = {"num_blocks": 256, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    lora = {"enable_lora": True, "lora_modules": modules, "max_lora_rank": 32}
    config = EngineConfig(**{**fixed, **lora, **settings})
    engine = Engine(config, model_of(base, weights), speculation=speculation)
    engine.arena.storage.fill_(0xFF)
    poison_released(engine)
    return engine


def request(kind: str, prompt: list[int], name: str = "", **more: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    adapter_name = kind.replace(" ", "-")
    return Request(name or kind or "base", tuple(prompt), params, adapter=adapter_name, **more)


def expected(kind: str, prompt: list[int], base: str = "llama") -> list[int]:
    folder = adapter(kind, base)[1] if kind else make_checkpoint(base)
    return reference_greedy(folder, prompt, NUM_NEW)


def batch(prompt: list[int]) -> list[Request]:
    """One request of each adapter, and one without, all with the same prompt."""
    return [request(kind, prompt) for kind in ("", *KINDS)]


PROMPT = random_prompt(37, seed=2)


def test_eight_adapters_and_the_base_in_one_batch_answer_as_merged_checkpoints():
    wanted = {kind or "base": expected(kind, PROMPT) for kind in ("", *KINDS)}
    assert len({tuple(ids) for ids in wanted.values()}) == 9, "an adapter that changes nothing"
    found = answers(engine_of(), batch(PROMPT))
    assert {name: ids_of(each) for name, each in found.items()} == wanted


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16},  # chunks
        {"num_blocks": 43, "kv_commit": "eager"},  # preemption
        {"kv_commit": "deferred", "kv_defer_mode": "always", "ridge_tokens": 64},
        {"merge_steps": False},
        {"num_blocks": 40, "host_kv_gb": 0.01, "kv_restore": "load"},
        {"async_scheduling": "on"},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_any_schedule_gives_the_same_answers(settings):
    engine = engine_of(**settings)
    found = answers(engine, batch(PROMPT))
    for kind in ("", *KINDS):
        assert ids_of(found[kind or "base"]) == expected(kind, PROMPT), kind
    if settings.get("kv_commit") == "eager":
        assert engine.stats().num_preemptions > 0


def test_a_prefix_is_shared_within_an_adapter_alone():
    """The same prompt, one after another: with another adapter nothing is reused."""
    engine = engine_of(kinds=("r4", "r16"))
    for kind, name, is_hit in (
        ("r4", "first", False), ("", "base", False), ("r16", "other", False),
        ("r4", "again", True), ("", "base again", True), ("r16", "other again", True),
    ):  # fmt: skip
        deltas = answers(engine, [request(kind, PROMPT, name)])[name]
        assert ids_of(deltas) == expected(kind, PROMPT), name
        assert (deltas[0].num_cached_tokens > 0) == is_hit, name


@pytest.mark.parametrize("base", ["phi3", "glm4", "gemma2", "olmo2", "mixtral", "qwen3"])
def test_other_families(base):
    """Fused files, rotary pairs that are neighbours, norms before and after, routed experts."""
    engine = engine_of(kinds=("r4",), base=base)
    found = answers(engine, [request("r4", PROMPT), request("", PROMPT)])
    assert expected("r4", PROMPT, base) != expected("", PROMPT, base)
    assert ids_of(found["r4"]) == expected("r4", PROMPT, base)
    assert ids_of(found["base"]) == expected("", PROMPT, base)


def test_drafts_are_verified_with_the_adapter():
    prompt = random_prompt(9, seed=5) * 4
    costs = MeasuredWidths(StepCosts({1: 1.0, 16: 1.0}))
    engine = engine_of(speculation=(Lookup(), costs), speculate="lookup")
    found = answers(engine, batch(prompt))
    for kind in ("", *KINDS):
        assert ids_of(found[kind or "base"]) == expected(kind, prompt), kind
    assert sum(each[-1].num_draft_tokens for each in found.values()) > 0


needs_native = pytest.mark.skipif(
    native.bound.library is None, reason="PyTorch's products have other bits for other sizes"
)


def logits_of(engine: Engine, requests: list[Request], watched: str) -> torch.Tensor:
    """The logits of each token of one request of a batch."""
    executor: Any = engine.executor
    compute, rows = executor.compute, []

    def kept(step: Any, before: Any, workspace: Any) -> Any:
        output = compute(step, before, workspace)
        for seq, row in step.row_of.items():
            if seq.request.request_id == watched:
                rows.append(engine.memory.logits[row].clone())
        return output

    executor.compute = kept
    answers(engine, requests)
    return torch.stack(rows)


@needs_native
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["", "r4", "r8 of o and down"])
def test_a_row_has_the_same_bits_in_any_batch(weights, kind):
    """Alone, and beside requests with other adapters, the same adapter, and none."""
    name = kind or "base"
    alone = logits_of(engine_of(weights=weights), [request(kind, PROMPT)], name)
    others = [*batch(PROMPT), request(kind, PROMPT[:20], "same"), request("", PROMPT[:9], "none")]
    beside = logits_of(engine_of(weights=weights, max_num_batched_tokens=23), others, name)
    assert torch.equal(alone, beside) and alone.isfinite().all()


@needs_native
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_rows_without_an_adapter_keep_the_bits_of_an_engine_without_adapters(weights):
    plain = Engine(
        EngineConfig(num_blocks=256, block_size=4, max_num_seqs=16, max_num_batched_tokens=64),
        model_of("llama", weights),
    )
    wanted = logits_of(plain, [request("", PROMPT)], "base")
    assert torch.equal(logits_of(engine_of(weights=weights), batch(PROMPT), "base"), wanted)


@needs_native
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_a_quantised_base_takes_the_addition_that_was_trained(weights):
    """The difference that the adapter makes is nearly that in fp32: a small adapter's, since both
    bases differ by their rounding."""

    def change(of: str) -> torch.Tensor:
        engine = engine_of(weights=of)
        adapted = logits_of(engine, [request("r3 of q and v", PROMPT)], "r3 of q and v")[0]
        return adapted - logits_of(engine, [request("", PROMPT)], "base")[0]

    found, wanted = change(weights), change("fp32")
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.85


def test_a_dropped_adapter_ends_with_its_requests():
    engine = engine_of(kinds=("r4", "r16"))
    assert engine.adapters is not None
    running = request("r4", PROMPT)
    engine.add(running)
    deltas = engine.step()
    assert engine.adapters.unload("r4") and not engine.adapters.unload("r4")
    with pytest.raises(RequestError, match="no adapter named 'r4'"):
        engine.add(request("r4", PROMPT, "late"))
    engine.adapters.load("r4", str(adapter("r1")[0]))  # another one takes the name
    engine.add(request("r4", PROMPT, "new"))
    while engine.has_work():
        deltas += engine.step()
    of = {name: [d for d in deltas if d.request_id == name] for name in ("r4", "new")}
    assert ids_of(of["r4"]) == expected("r4", PROMPT)
    assert ids_of(of["new"]) == expected("r1", PROMPT)


def test_a_continued_answer_names_its_adapter():
    ids = expected("r16", PROMPT)
    rest = request("r16", PROMPT, "rest", emitted_ids=tuple(ids[:5]))
    assert ids_of(answers(engine_of(), [rest])["rest"]) == ids[5:]


def test_an_engine_without_adapters_refuses_their_names():
    engine = Engine(EngineConfig(num_blocks=64, block_size=4), model_of("llama", "fp32"))
    with pytest.raises(RequestError, match="no adapter named 'r4'") as refused:
        engine.add(request("r4", PROMPT))
    assert refused.value.code == "model_not_found"
