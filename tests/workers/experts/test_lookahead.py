"""Predicting the next layer's experts: the control, the counts, and how predictions are used."""

from __future__ import annotations

import pytest
import torch

from penstock.workers.experts.build import ExpertSettings
from penstock.workers.experts.lookahead import ExpertPredictor, RoutedLayer, num_common
from penstock.workers.experts.transfer_meter import WINDOW_S, TransferCounts, TransferMeter
from penstock.workers.models.loader import load_model
from penstock.workers.models.moe import MoeMlp
from tests.workers.checkpoints import random_prompt
from tests.workers.experts.moe_cases import MOE, logits_of
from tests.workers.models.test_decoder import folder_of


@pytest.fixture
def steps(monkeypatch):
    """(model's layer order, residual state, routing) of each MoE layer that ran."""
    seen = []
    routing = MoeMlp._routing

    def note(self, ids, x, scores, workspace):
        seen.append((self, workspace.residual.clone(), ids.clone()))
        return routing(self, ids, x, scores, workspace)

    monkeypatch.setattr(MoeMlp, "_routing", note)
    return seen


def load(name: str, **settings):
    experts = ExpertSettings(num_slots=15, **settings)
    model = load_model(folder_of(name), weights="fp32", progress=False, experts=experts)
    assert model.routed is not None
    model.routed.meter.clock = lambda: 0.0  # however busy this machine is, the link has time
    return model


@pytest.mark.parametrize("name", [*MOE, "qwen2_moe-normed", "qwen3_moe-sparse-step", "builtin-moe"])
def test_control(steps, name):
    """A layer's own norm and router on its own state are its routing: 100 %, on every row."""
    model = load(name)
    logits_of(model, random_prompt(11), 3)
    model.routed.close()
    predictor = model.routed.predictor
    layer_of = {id(layer.mlp): index for index, layer in enumerate(model.layers)}
    num = 0
    for mlp, state, ids in steps:
        guessed = predictor.predict_ids(state, layer_of[id(mlp)])
        assert num_common(guessed, ids) == ids.numel()
        num += ids.numel()
    assert num == sum(model.config.moe_layers) * 14 * model.config.num_experts_per_token


def test_accuracy_is_that_of_the_whole_rule(steps):
    """What was counted, computed again: norm, softmax and top k in plain PyTorch, row by row."""
    model = load("olmoe")
    prompt = random_prompt(1)
    logits_of(model, prompt, 6)
    model.routed.close()
    stats = {each.layer: each for each in model.routed.stats().by_layer}
    mlps = [layer.mlp for layer in model.layers]
    by_token = [steps[i : i + 3] for i in range(0, len(steps), 3)]
    for layer in (1, 2):
        right = repeated = 0
        for token, layers in enumerate(by_token):
            state = layers[layer - 1][1][0]
            norm = model.layers[layer].mlp_norm
            normed = state * (state.pow(2).mean() + model.config.rms_norm_eps).rsqrt() * norm
            weights, ids = mlps[layer].choose(normed[None])
            actual = set(layers[layer][2][0].tolist())
            right += len(actual & set(ids[0].tolist()))
            if token:
                repeated += len(actual & set(by_token[token - 1][layer][2][0].tolist()))
        assert stats[layer].num_routed == 14 and stats[layer].num_right == right
        assert (stats[layer].num_repeated_routed, stats[layer].num_repeated) == (12, repeated)
    assert stats[0].num_routed == 0, "nothing comes before the first layer"


def test_likeliest_first_and_all_where_all_are_wanted():
    """Two of 16 experts a row: the one that most rows want comes first; 11 rows want nearly all."""

    class PrescribedPredictor(ExpertPredictor):
        def predict_ids(self, state, layer):
            return state.long()

    layers = [RoutedLayer(layer, torch.ones(2), lambda x: (x, x.long())) for layer in (0, 3)]
    predictor = PrescribedPredictor(layers, num_experts=16, top_k=2, eps=0.0)
    assert predictor.next_of(0) == 3 and predictor.next_of(3) is None
    assert predictor.predict_experts(torch.tensor([[7.0, 2.0], [2.0, 9.0]]), 3) == [2, 7, 9]
    assert predictor.needs_all_experts(11) and not predictor.needs_all_experts(10)
    predictor.forget(3)
    predictor.observe(3, torch.tensor([[7, 2], [2, 9]]))
    assert predictor.accuracy[3].num_routed == 0, "what was not guessed is not counted"
    predictor.predict_experts(torch.tensor([[7.0, 2.0]]), 3)
    predictor.observe(3, torch.tensor([[2, 4]]))
    assert (predictor.accuracy[3].num_routed, predictor.accuracy[3].num_right) == (2, 1)


def test_no_prefetch():
    """Nothing comes ahead that is not certain; the experts of a prompt, all of them, are. What
    would have been predicted is counted all the same, in two steps of 32; the baseline only of
    steps that follow one another."""
    model = load("mixtral", prefetch=False)
    logits_of(model, random_prompt(1), 2)
    assert model.routed.stats().num_prefetched == 0 == model.routed.stats().prefetch_bytes
    logits_of(model, random_prompt(9), 0)
    model.routed.close()
    assert model.routed.stats().num_prefetched

    def counts():
        layers = model.routed.stats().by_layer
        return sum(e.num_routed for e in layers), sum(e.num_repeated_routed for e in layers)

    num_layers, top_k = 3, 2
    before = counts()
    assert before[0] > 0
    for _ in range(2):
        model.routed.observe_step(0.01, 1)
    logits_of(model, random_prompt(1), 20)
    assert counts() == before, "these steps are not counted"
    for _ in range(30):
        model.routed.observe_step(0.01, 1)
    logits_of(model, random_prompt(1), 0)  # the 33rd: its token before is not known
    first = counts()
    assert first == (before[0] + (num_layers - 1) * top_k, before[1])
    logits_of(model, random_prompt(1), 0)
    assert counts() == (first[0] + (num_layers - 1) * top_k, first[1] + num_layers * top_k)


def test_a_saturated_link():
    """Demands take more than half of the time: nothing is foreseen until they take less."""
    now = [0.0]
    meter = TransferMeter(TransferCounts(), clock=lambda: now[0])
    for busy_s, is_saturated in ((0.0, False), (0.2, True), (0.2, True), (0.1, False)):
        for _ in range(20):
            now[0] += WINDOW_S / 10 + 1e-6
            meter.counts.demand_busy_s += busy_s / 0.25 * WINDOW_S / 10
            last = meter.is_saturated()
        assert last == is_saturated
    model = load("olmoe")
    model.routed.meter.share = 1.0
    logits_of(model, random_prompt(1), 3)
    model.routed.close()
    stats = model.routed.stats()
    assert stats.num_withheld == 4 * 2 and not stats.num_prefetched
