"""The model of a step's time against workers whose time is known."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.workers.execution.step_model import TERMS, StepModel

TRUE = np.array([9e-3, 2e-4, 3.3e-7, 2.5e-5])


def steps(num: int, seed: int, true: np.ndarray = TRUE):
    rng = np.random.default_rng(seed)
    for _ in range(num):
        rows = int(rng.integers(1, 65))
        cached = rows * int(rng.integers(50, 1500))
        prompt = int(rng.integers(0, 2)) * int(rng.integers(1, 1024))
        noise = float(rng.lognormal(0.0, 0.05))
        yield rows, cached, prompt, float(np.array([1, rows, cached, prompt]) @ true) * noise


def test_it_finds_the_coefficients_and_follows_when_they_change():
    model = StepModel()
    for true in (TRUE, TRUE * np.array([1.5, 1.0, 2.0, 0.5])):
        for step in steps(16_000, 1, true):
            model.observe(*step)
        errors = [abs(model.seconds(*s[:3]) / s[3] - 1) for s in steps(300, 2, true)]
        assert np.median(errors) < 0.06, "no more than the noise"
    found = model.coefficients()
    assert tuple(found) == TERMS
    assert found["prompt_token"] == pytest.approx(1.25e-5, rel=0.1)
    assert found["cached_token"] == pytest.approx(6.6e-7, rel=0.15)


def test_what_never_varies_stays_finite_and_a_hiccup_does_not_throw_it():
    model = StepModel()
    for i in range(20_000):
        model.observe(4, 400, 0, 0.02 if i != 19_990 else 30.0)
    assert model.seconds(4, 400, 0) == pytest.approx(0.02, rel=0.05)
    assert all(np.isfinite(list(model.coefficients().values())))


@pytest.mark.parametrize("loads", [(1, 4, 16), (2,), (3, 40)])
def test_long_spells_of_one_load_do_not_forget_the_others(loads):
    """Thousands of steps with a constant number of rows; then what a full worker would do."""
    model, rng = StepModel(), np.random.default_rng(3)
    for num_rows in (*loads, *loads[:1]):
        for i in range(3000):
            cached = num_rows * int(rng.integers(150, 400))
            prompt = 0 if i % 20 else int(rng.integers(50, 400))
            took = float(np.array([1, num_rows, cached, prompt]) @ TRUE)
            model.observe(num_rows, cached, prompt, took * float(rng.lognormal(0.0, 0.2)))
    found = model.coefficients()
    assert min(found.values()) >= 0
    if len(loads) > 1:
        want = float(np.array([1, 64, 64 * 250, 0]) @ TRUE)
        assert model.seconds(64, 64 * 250, 0) == pytest.approx(want, rel=0.25)
    for num_rows in loads:
        want = float(np.array([1, num_rows, num_rows * 250, 100]) @ TRUE)
        assert model.seconds(num_rows, num_rows * 250, 100) == pytest.approx(want, rel=0.1)


def test_before_any_step():
    assert StepModel().coefficients() == dict.fromkeys(TERMS, 0.0)
