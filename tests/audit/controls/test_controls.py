"""Known-broken forms are caught, each by the judge that its fault belongs to."""

from fractions import Fraction

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.controls.dpi_published import bounded_loss, path_loss
from dpstream.audit.controls.shared_noise import SharedNoise
from dpstream.audit.controls.spas_published import SpasPublished, svt_loss
from dpstream.audit.replay import record, replay
from dpstream.errors import BudgetExceeded
from dpstream.mechanisms import REGISTRY, Spas
from dpstream.mechanisms.parts.above_threshold import split
from tests.support.fixed import RUN, SECRET


def busy(steps, bins=1):
    """A stream that jumps every ten steps."""
    level = np.where(np.arange(steps) // 10 % 2, 4000, 100)[:, None]
    return np.repeat(level, bins, axis=1)


def test_controls_are_not_offered():
    """No registered name leads to a control."""
    assert not any("controls" in path for path in REGISTRY.values())


@pytest.mark.parametrize("window", [30, 40, 50])
def test_the_ledger_refuses_published_spas(window):
    """Its warm-up, its lasting run and its positives do not fit; the sound form does."""
    data = busy(400)
    with pytest.raises(BudgetExceeded):
        dps.release(SpasPublished(epsilon=1, window=window), data, secret=SECRET, run_id=RUN)

    dps.release(Spas(epsilon=1, window=window), data, secret=SECRET, run_id=RUN)


def test_one_rho_for_ever_loses_more_than_was_claimed():
    """Outcomes outside the window pin rho down; then every test inside it costs by itself."""
    window, epsilon_s, threshold = 120, 0.25, 400.0
    before = [True, False] * 200  # one test near the threshold in each of 400 earlier windows
    unchanged = [threshold] * len(before)
    published = svt_loss(
        [*unchanged, *([threshold] * window)],
        [*unchanged, *([threshold + 1] * window)],
        [*before, *([False] * window)],
        threshold=threshold,
        rho_scale=2 / epsilon_s,
        nu_scale=4 / epsilon_s,
    )

    assert published > 1 > epsilon_s  # beyond epsilon, let alone the tests' share of it


def test_a_sound_run_loses_no_more_than_its_budget():
    """The same changed window within one fresh run; changes may go either way."""
    window, budget = 120, 0.25
    e1, e2 = (float(part) for part in split(dps.mechanisms.base.exact(budget)))
    rng = np.random.default_rng(5)
    for last in (False, True):
        for _ in range(20):
            distances = rng.integers(0, 40, window).astype(float)
            neighbour = distances + rng.integers(-1, 2, window)
            outcomes = [False] * (window - 1) + [last]
            scales = {"rho_scale": 1 / e1, "nu_scale": 2 / e2}
            loss = svt_loss(distances, neighbour, outcomes, threshold=20, **scales)
            assert abs(loss) <= budget


def test_printed_dpi_loses_more_than_epsilon():
    """A user who decides every slot: the exact loss of one path, on sums and on means of scores."""
    budgets = [Fraction(1, t * (t + 1)) for t in range(1, 201)]  # below 1 for ever
    floats = [float(budget) for budget in budgets]
    printed, sound = (path_loss(floats, printed=form) for form in (True, False))

    assert sound <= 1 < 4 < printed <= float(bounded_loss(budgets))
    assert printed > path_loss(floats[:100], printed=True) + 0.5  # and it never stops growing
    assert sound > 0.95  # the bound of the sound form is reached


def test_shared_noise_reveals_differences():
    """Whatever the epsilon, the difference of two bins is exact; sound noise hides it."""
    data = np.array([[5, 9]] * 20)
    shared, _ = released(SharedNoise(epsilon=0.01, window=5), data)
    sound, _ = released(dps.mechanisms.Uniform(epsilon=0.01, window=5), data)

    assert (shared[:, 1] - shared[:, 0] == 4).all()
    assert (sound[:, 1] - sound[:, 0] != 4).any()


def test_the_laws_catch_shared_noise():
    """Fewer draws than published coordinates, and answers that do not move with the data."""
    data = np.array([[5, 9]] * 20)
    mechanism = SharedNoise(epsilon=1, window=5)
    values, calls = released(mechanism, data)
    neighbour = data.copy()
    neighbour[7, 1] += 1

    assert sum(call.value.size for call in calls) < values.size
    assert replay(mechanism, neighbour, calls).loss == 0  # the law wants a loss above 0


def released(mechanism, data):
    calls, releases = record(mechanism, data, secret=SECRET, run=RUN)
    return np.array([release.values for release in releases]), calls
