"""The bank of models: what is done for speed with many bins changes little."""

import numpy as np
import pytest

from dpstream.mechanisms.w_event import pacer_models
from dpstream.mechanisms.w_event.pacer_models import models

GRID = models(1.0, 40, thin=True)


def beliefs(light, monkeypatch):
    """The counts that 310 bins are thought to have, and their truth, after 40 publications."""
    monkeypatch.setattr(pacer_models, "_LIGHT", light)
    rng, scale, bank = np.random.default_rng(8), 30.0, None
    level, seen, errors = rng.uniform(50, 900, 310), [], []
    for step in range(40):
        level = level * (3.0 if step == 20 else 1.0) + rng.normal(0, 8, 310)
        z = level + rng.laplace(0, scale, 310)
        if bank is None:
            bank, belief = pacer_models.first_belief(z, scale, GRID)
        else:
            bank, belief = pacer_models.learn(bank, z, scale, 1, GRID)
        seen.append(belief.count)
        errors.append(np.abs(belief.count - level).mean())
    return np.array(seen), float(np.mean(errors))


def test_light_models_may_learn_as_from_gaussian_noise(monkeypatch):
    """Errors stay within 1%, through a jump; if all models did so, they would not."""
    exact, error = beliefs(0.0, monkeypatch)
    quick, quick_error = beliefs(1e-3, monkeypatch)
    _, gaussian_error = beliefs(2.0, monkeypatch)

    assert not np.array_equal(exact, quick)
    assert quick_error == pytest.approx(error, rel=0.01)
    assert gaussian_error != pytest.approx(error, rel=0.01)


def test_few_bins_are_never_approximated(monkeypatch):
    """Up to 300 bins every model learns exactly, whatever it weighs."""
    outcomes = []
    for light in (0.0, 2.0):
        monkeypatch.setattr(pacer_models, "_LIGHT", light)
        bank, _ = pacer_models.first_belief(np.full(300, 90.0), 30.0, GRID)
        _, belief = pacer_models.learn(bank, np.full(300, 140.0), 30.0, 1, GRID)
        outcomes.append(belief.count)

    assert np.array_equal(*outcomes)
