"""Quantized and sparse experts against the plainest way to compute them; what a request may ask.

The oracle takes each row by itself: the expert's matrices from the checkpoint, its neurons chosen
by the same scores, and a product over those alone.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.neurons import dequantize_neurons, quantize_neurons
from penstock.workers.channel.codec import delta_from, delta_message, request_from, submit_message
from penstock.workers.config import EngineConfig, MoeMode
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.experts.expert_file import copy_bytes
from penstock.workers.experts.modes import StepRows
from penstock.workers.experts.routed import CachedExperts
from penstock.workers.experts.routing import LayerRouting
from penstock.workers.models.loader import load_model
from penstock.workers.request import Delta, FinishReason, Request, RequestError, SamplingParams
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import make_checkpoint, random_prompt, reference_greedy
from tests.workers.experts.moe_cases import MOE, Garbage, experts_of, plain, poison
from tests.workers.models.test_decoder import PagedDecoder, Tokens, folder_of

CLOSE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}
PROMPT, NUM_NEW = 7, 8
QUANTIZED = [("quantized", "int8"), ("quantized", "int4")]


def load(name: str, weights: str = "fp32", **options):
    return load_model(
        folder_of(name), weights=weights, progress=False,
        experts=ExpertSettings(**{"num_slots": 15, "prefetch": False, **options}),
    )  # fmt: skip


@torch.inference_mode()
def teacher_forced(model, ids, mode: str, num_prompt: int, cuts=()) -> torch.Tensor:
    """Logits [len(ids), vocab], computed in pieces that end at `cuts`."""
    paged, seq, rows = PagedDecoder(model), Tokens(list(ids)), []
    forward = model.forward
    for start, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        moe_rows = StepRows.of([(mode, num_prompt, start, end - start)], model.device)
        model.forward = functools.partial(forward, moe_rows=moe_rows)
        rows += [*paged.step((seq, end - start))[0]]
    model.forward = forward
    return torch.stack(rows)


class GarbageOfPool(Garbage):
    def observe_neurons(self, *_: object) -> None: ...

    def forget_experts(self, *_: object) -> None: ...


class Naive:
    """Stands in for a layer's experts: rows one by one, neurons by `active`, fp32 matrices."""

    def __init__(self, model, weights, mode: str):
        self.model, self.weights, self.mode = model, weights, mode
        self.rows = 0
        self.now: Any = None  # layer, ids and rows of the call that is under way

    def mlp(self, layer: int, expert: int, x: torch.Tensor, is_sparse: bool) -> torch.Tensor:
        gate, up, down = self.weights[layer, expert]
        a = torch.nn.functional.silu(gate @ x) * (up @ x)
        if is_sparse:
            kept = self.model.routed.selector.active(layer, expert, x[None])[0]
            return down[:, kept] @ a[kept]
        return down @ a


def matrices(name: str, copies: str = "") -> dict:
    found = {}
    experts = experts_of(make_checkpoint(name))
    for layer in experts.layers:
        for expert in range(experts.config.num_experts):
            gate, up, down = (part.read() for part in experts.parts(layer, expert))
            if copies:
                rows = torch.cat([gate, up, down.T], 1)
                rows = dequantize_neurons(quantize_neurons(rows, copies), 64, copies)
                gate, up, down = rows.split(64, 1)
                down = down.T
            found[layer, expert] = gate, up, down
    return found


@torch.inference_mode()
def naive(
    model, name: str, ids, mode: str, num_prompt: int, monkeypatch, copies: str = ""
) -> torch.Tensor:
    from penstock.workers.models import moe

    oracle = Naive(model, matrices(name, copies), mode)
    layer_of = {id(layer.mlp.experts): i for i, layer in enumerate(model.layers)}

    def route(self, ids, x, state):
        self_layer = layer_of[id(self)]

        def nothing(used):
            yield from ()

        oracle.now = (self_layer, ids.clone(), x.clone())
        return LayerRouting(ids, 5, nothing)

    def moe_mlp(x, ids, weights, experts, **_):
        layer, ids, rows = oracle.now
        for t in range(len(rows)):
            is_sparse = mode == "sparse" and t >= num_prompt
            parts = (
                w * oracle.mlp(layer, e, rows[t], is_sparse)
                for w, e in zip(weights[t], ids[t].tolist(), strict=True)
            )
            x[t] = sum(parts)

    with monkeypatch.context() as patch:
        patch.setattr(CachedExperts, "route", route)
        patch.setattr(moe, "moe_mlp", moe_mlp)
        return teacher_forced(model, ids, "exact", num_prompt)


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize(("mode", "copies"), [("sparse", ""), *QUANTIZED])
def test_against_the_plainest_way(name, mode, copies, thresholds, monkeypatch):
    options = {"thresholds": thresholds(name), "keep": 0.4}
    if mode == "quantized":
        options = {"copies": copies}
    model = load(name, mode=mode, **options)
    ids = random_prompt(PROMPT + NUM_NEW)
    got = teacher_forced(model, ids, mode, PROMPT)
    want = naive(model, name, ids, mode, PROMPT, monkeypatch, copies)
    model.routed.close()
    torch.testing.assert_close(got, want, **CLOSE)
    exact = teacher_forced(plain(name), ids, "exact", PROMPT)
    assert not torch.allclose(got[PROMPT:], exact[PROMPT:], **CLOSE), "nothing was left out"
    if mode == "sparse":
        assert torch.equal(got[:PROMPT], exact[:PROMPT]), "the prompt is exact, bit for bit"


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_sparse_answers_of_quantised_experts(name, weights, thresholds, monkeypatch):
    """The prompt as without a cache, bit for bit; the answer from copies by neurons."""
    options = {"mode": "sparse", "thresholds": thresholds(name), "keep": 0.4}
    model = load(name, weights, **options)
    ids = random_prompt(PROMPT + NUM_NEW)
    got = teacher_forced(model, ids, "sparse", PROMPT)
    assert torch.equal(got[:PROMPT], teacher_forced(plain(name, weights), ids[:PROMPT], "exact", 0))
    got = teacher_forced(model, ids, "sparse", 0)
    want = naive(model, name, ids, "sparse", 0, monkeypatch, weights)
    cache = model.routed.cache
    model.routed.close()
    torch.testing.assert_close(got, want, **CLOSE)
    assert cache.pool.format == weights and cache.manifest.is_packed
    assert cache.pool.rows.shape[1] == copy_bytes(64, weights)


@settings(max_examples=8, deadline=None)
@given(
    num_slots=st.sampled_from([1, 2, 3, 7, 15]),
    prefetch=st.booleans(),
    score=st.sampled_from(["gate", "up", "product"]),
    cuts=st.lists(st.integers(1, PROMPT + NUM_NEW - 1), max_size=5, unique=True).map(sorted),
    seed=st.integers(0, 9),
)
def test_sparse_has_the_same_bits_whatever_the_cache_does(
    num_slots, prefetch, score, cuts, seed, thresholds
):
    """Any capacity, prefetched or not, and whatever is computed together or again."""
    options = {"mode": "sparse", "thresholds": thresholds("olmoe"), "score": score, "keep": 0.3}
    ids = random_prompt(PROMPT + NUM_NEW, seed)
    whole = load("olmoe", **options)
    want = teacher_forced(whole, ids, "sparse", PROMPT)
    whole.routed.close()
    model = load("olmoe", num_slots=num_slots, prefetch=prefetch, **options)
    model.routed.meter.clock = lambda: 0.0
    for _ in range(2):  # with slots of which parts are there
        got = teacher_forced(model, ids, "sparse", PROMPT, tuple(cuts))
        assert torch.equal(got, want)
        model.routed.cache.check()
    model.routed.close()


@pytest.mark.parametrize("score", ["gate", "up", "product"])
def test_a_row_has_the_same_scores_among_any_others(score, thresholds):
    """40 neurons an expert: no whole number of vectors."""
    options = {"mode": "sparse", "thresholds": thresholds("qwen3_moe"), "score": score}
    model = load("qwen3_moe", **options)
    scores = model.routed.selector.scores
    x = torch.randn(97, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    whole = scores.of(1, 2, x)
    assert whole.shape == (97, 40) and (whole >= 0).all()
    for num in (1, 3, 32):
        assert torch.equal(torch.cat([scores.of(1, 2, part) for part in x.split(num)]), whole)
    model.routed.close()


@pytest.mark.parametrize("name", MOE)
def test_streamed_uses_all_neurons(name, thresholds):
    """The model's logits but for the order of additions, whatever is selected; exact prompts."""
    model = load(name, mode="streamed", thresholds=thresholds(name), keep=0.3, num_slots=3)
    poison(model.routed.cache)
    ids = random_prompt(PROMPT + NUM_NEW)
    got = teacher_forced(model, ids, "streamed", PROMPT)
    model.routed.close()
    exact = teacher_forced(plain(name), ids, "exact", PROMPT)
    torch.testing.assert_close(got, exact, atol=5e-5, rtol=1e-5)
    assert torch.equal(got[:PROMPT], exact[:PROMPT])
    assert not torch.equal(got[PROMPT:], exact[PROMPT:]), "nothing came from the pool"


@settings(max_examples=10, deadline=None)
@given(
    num_slots=st.sampled_from([1, 2, 3, 7, 15]),
    prefetch=st.booleans(),
    guess=st.none() | st.integers(0, 9),
    cuts=st.lists(st.integers(1, PROMPT + NUM_NEW - 1), max_size=5, unique=True).map(sorted),
    seed=st.integers(0, 9),
)
def test_streamed_has_the_same_bits_whatever_the_cache_does(
    num_slots, prefetch, guess, cuts, seed, thresholds
):
    """Any capacity, prefetched rightly or wrongly, and whatever is computed together or again."""
    options = {"mode": "streamed", "thresholds": thresholds("olmoe"), "keep": 0.3}
    ids = random_prompt(PROMPT + NUM_NEW, seed)
    whole = load("olmoe", **options)
    want = teacher_forced(whole, ids, "streamed", PROMPT)
    whole.routed.close()
    model = load("olmoe", num_slots=num_slots, prefetch=prefetch, **options)
    poison(model.routed.cache)
    model.routed.meter.clock = lambda: 0.0
    if guess is not None:
        model.routed.predictor = GarbageOfPool(guess)
    for _ in range(2):  # with slots of which parts are there
        got = teacher_forced(model, ids, "streamed", PROMPT, tuple(cuts))
        assert torch.equal(got, want)
        model.routed.cache.check()
    model.routed.close()


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["sparse", "quantized", "streamed"])
def test_built_in(weights, mode):
    """From a bf16 checkpoint, with few slots and with all: the same bits, and not exact ones."""
    ids, found = random_prompt(PROMPT + NUM_NEW), []
    for num_slots in (32, 3):
        options = ExpertSettings(num_slots=num_slots, mode=mode, keep=0.2)
        model = load_model("builtin-moe", weights=weights, progress=False, experts=options)
        found.append(teacher_forced(model, ids, mode, PROMPT, (PROMPT, PROMPT + 1)))
        assert model.routed is not None
        model.routed.close()
    assert torch.equal(*found)
    exact = teacher_forced(plain("builtin-moe", weights), ids, "exact", PROMPT)
    assert torch.isfinite(found[0]).all() and not torch.equal(found[0], exact)
    closeness = torch.nn.functional.cosine_similarity(found[0], exact)
    assert closeness.min() > 0.98


def test_keeping_all_is_exact(thresholds):
    model = load("mixtral", mode="sparse", thresholds=thresholds("mixtral"), keep=1.0, num_slots=2)
    ids = random_prompt(PROMPT + NUM_NEW)
    got = teacher_forced(model, ids, "sparse", PROMPT)
    model.routed.close()
    exact = teacher_forced(plain("mixtral"), ids, "exact", PROMPT)
    torch.testing.assert_close(got, exact, atol=1e-5, rtol=1e-5)  # another order of additions
    assert torch.equal(got[:PROMPT], exact[:PROMPT])


def test_only_wanted_neurons_move(thresholds):
    """Bytes over the link are those of the rows that were counted as missing."""
    model = load("olmoe", mode="sparse", thresholds=thresholds("olmoe"), keep=0.2, num_slots=15)
    ids = random_prompt(1 + NUM_NEW)
    for _ in range(2):
        teacher_forced(model, ids, "sparse", 0, tuple(range(1, 1 + NUM_NEW)))
    cache = model.routed.cache
    model.routed.close()
    counts, link = cache.counts, cache.copier.counts
    missing = counts.num_rows_wanted - counts.num_rows_there
    assert link.demand_bytes == missing * cache.manifest.row_bytes
    assert counts.num_partial and counts.num_misses and counts.num_hits
    assert counts.num_rows_wanted < 0.5 * 2 * 112 * (1 + NUM_NEW) * 3 * 2


def serve(model, mode: MoeMode, modes: dict[str, str | None], **options):
    """Last deltas and ids of requests that run together, each in the mode that it asks for."""
    engine = Engine(
        EngineConfig(
            num_blocks=20,
            block_size=4,
            max_num_seqs=4,
            expert_cache_gb=1.0,
            moe_mode=mode,
            **options,
        ),
        model,
    )
    params = functools.partial(SamplingParams, max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    prompt = tuple(random_prompt(PROMPT))
    requests = [Request(name, prompt, params(moe_mode=wish)) for name, wish in modes.items()]
    found = answers(engine, requests)
    last = {name: deltas[-1] for name, deltas in found.items()}
    return last, {name: ids_of(deltas) for name, deltas in found.items()}


@pytest.mark.parametrize("mode", ["sparse", "quantized"])
def test_requests_of_both_modes_together(mode, thresholds):
    """Each gets what it gets alone: no bits, and no K and V, of one come to the other."""
    options = {"thresholds": thresholds("olmoe"), "keep": 0.1} if mode == "sparse" else {}
    model = load("olmoe", mode=mode, num_slots=3, **options)
    both, ids = serve(model, mode, {"a": None, "b": "exact", "c": mode, "d": "exact"})
    _, inexact = serve(model, mode, {"a": None})
    _, exact = serve(plain("olmoe"), "exact", {"b": "exact"})
    model.routed.close()
    assert ids["a"] == ids["c"] == inexact["a"] and ids["b"] == ids["d"] == exact["b"]
    assert ids["a"] != ids["b"]
    assert (both["a"].moe_mode, both["b"].moe_mode) == (mode, "exact")
    assert both["b"].num_neurons == both["b"].num_skipped_neurons == 0
    if mode == "sparse":
        # The last token of the answer is never looked at; the others have 3 * 2 experts each.
        assert both["a"].num_neurons == (NUM_NEW - 1) * 3 * 2 * 112
        assert 0.7 < both["a"].num_skipped_neurons / both["a"].num_neurons < 1


def test_streamed_answers_are_the_models_own(thresholds):
    """In fp32 the ids of exact requests beside them, which run in the same steps; nothing is
    counted as left out."""
    model = load("olmoe", mode="streamed", num_slots=3, thresholds=thresholds("olmoe"), keep=0.2)
    last, ids = serve(model, "streamed", {"a": None, "b": "exact", "c": "streamed"})
    model.routed.close()
    want = reference_greedy(make_checkpoint("olmoe"), random_prompt(PROMPT), NUM_NEW)
    assert ids["a"] == ids["b"] == ids["c"] == want
    assert (last["a"].moe_mode, last["b"].moe_mode) == ("streamed", "exact")
    assert last["a"].num_neurons == last["a"].num_skipped_neurons == 0


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_streamed_needs_plain_neurons(weights, thresholds):
    """Copies by neurons are no parts of the packed product: their sum would not be the model's."""
    with pytest.raises(ConfigError, match="moe_mode streamed needs the single neurons"):
        load("olmoe", weights, mode="streamed", thresholds=thresholds("olmoe"))


def test_modes_travel():
    """Over the channel between worker and ingress; exact deltas take no byte for it."""
    request = Request("r", (1, 2), SamplingParams(moe_mode="exact"))
    sent = submit_message(request, 3, 0)
    assert request_from(sent, "r").params == request.params
    last = Delta("r", [5], FinishReason.LENGTH, moe_mode="sparse")
    last.num_neurons, last.num_skipped_neurons = 2**40, 2**39
    assert delta_from(delta_message(last, 3), "r") == last
    plain = Delta("r", [5], FinishReason.LENGTH)
    assert delta_from(delta_message(plain, 3), "r") == plain
    assert not delta_message(plain, 3).moe_mode


def test_neurons_are_counted_once(thresholds):
    """Too few blocks: sequences are preempted and computed again, and count the same."""
    model = load("olmoe", mode="sparse", thresholds=thresholds("olmoe"), keep=0.3)
    modes: dict[str, str | None] = {str(i): None for i in range(4)}
    few, ids = serve(model, "sparse", modes, prefix_cache=False)
    one, alone = serve(model, "sparse", {"0": None})
    model.routed.close()
    for i in modes:
        assert ids[i] == alone["0"] and few[i].num_neurons == one["0"].num_neurons
        assert few[i].num_skipped_neurons == one["0"].num_skipped_neurons


def test_a_request_only_becomes_more_exact():
    model = load("olmoe")
    config = EngineConfig(num_blocks=20, block_size=4)
    engine = Engine(config, model)
    for wish, message in (
        ("sparse", "this model is served with exact"),
        ("fast", "must be one of exact"),
    ):
        with pytest.raises(RequestError, match=message) as refused:
            engine.add(Request("r", (1, 2), SamplingParams(moe_mode=wish)))
        assert refused.value.param == "moe_mode"
    engine.add(Request("r", (1, 2), SamplingParams(moe_mode="exact", max_tokens=1)))
    engine.step()
    engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moe_mode": "sparse"}, "expert_cache_gb"),
        ({"moe_mode": "fast", "expert_cache_gb": 1.0}, "moe_mode must be one of"),
        ({"moe_keep": 0.0}, r"moe_keep must lie in \(0, 1\]"),
        ({"moe_score": "down"}, "moe_score must be one of gate, up, product"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)
