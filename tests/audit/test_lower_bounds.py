"""Lower bounds hold as often as they say, and find what is there."""

import numpy as np
import pytest
from scipy.stats import binom

from dpstream.audit.lower_bounds import (
    MANY_OUTPUTS,
    Event,
    as_a_whole,
    bound_from_event,
    clopper_pearson_lower,
    clopper_pearson_upper,
    linear,
    lower_bound,
    output_by_output,
    shifts,
)


@pytest.mark.parametrize(("hits", "runs"), [(0, 50), (1, 50), (17, 50), (50, 50)])
def test_clopper_and_pearson(hits, runs):
    """The bounds are the probabilities at which the count becomes as unlikely as the error."""
    low = float(clopper_pearson_lower(hits, runs, 0.01))
    high = float(clopper_pearson_upper(hits, runs, 0.01))

    assert low == 0 if hits == 0 else binom.sf(hits - 1, runs, low) == pytest.approx(0.01)
    assert high == 1 if hits == runs else binom.cdf(hits, runs, high) == pytest.approx(0.01)


def laplace(rng, shift, scale, runs, size=1):
    return np.rint(rng.laplace(shift, scale, (runs, size)))


def test_bounds_are_false_no_more_often_than_they_say():
    """200 audits of noise that loses exactly what it claims, at an error of 0.2.

    Each is rejected with probability at most 0.2 (the bounds are conservative: far less), so more
    than 70 rejections have a chance below 1e-6. (Counting an event on the runs that chose it does
    not pass.)
    """
    rng, rejected = np.random.default_rng(0), 0
    for _ in range(200):
        one, two = (laplace(rng, shift * 4, 4.0, 1000) for shift in (0, 1))
        rejected += lower_bound(one, two, epsilon=1, delta=0, error=0.2).epsilon > 1

    assert binom.sf(70, 200, 0.2) < 1e-6
    assert rejected <= 70


def test_too_little_noise_is_found():
    """The same audit of noise that is a third too small."""
    rng = np.random.default_rng(1)
    one, two = (laplace(rng, shift * 40, 27.0, 40_000) for shift in (0, 1))

    assert lower_bound(one, two, epsilon=1, delta=0, error=1e-3).epsilon > 1


def test_both_orders_are_tried():
    """What only the second world can publish is a loss too."""
    one, two = np.zeros((400, 1)), np.tile([[0.0], [1.0]], (200, 1))
    bound = lower_bound(one, two, epsilon=1, delta=0, error=1e-3)

    assert bound.event.order == "two over one"
    assert bound.epsilon > 2


def test_delta_is_taken_off():
    """An event that delta allows for shows nothing; beyond it, the rest counts."""
    event = Event(score="s", order="one over two", threshold=0, hits=300, other_hits=0, runs=10_000)

    assert bound_from_event(event, epsilon=1, delta=0.04, error=1e-3).epsilon == 0
    found = bound_from_event(event, epsilon=1, delta=0.01, error=1e-3)
    assert found.epsilon > 2
    assert 0.01 < found.delta < 0.03


def test_scores_find_what_they_are_made_for():
    """Correlated, independent and rare differences, and outputs that are hidden."""
    rng = np.random.default_rng(3)
    shared = rng.laplace(size=(2, 3000, 1)) * 100
    one, two = shared[0] + [[5, 9]], shared[1] + [[5, 10]]
    assert lower_bound(one, two, epsilon=1, delta=0, error=1e-3).event.score == "linear"

    hidden = np.where(rng.random((2, 3000, 2)) < 0.5, np.nan, 1.0)
    hidden[0, :, 0] = np.nan
    for learner in (linear, output_by_output, as_a_whole):
        score = learner(*hidden)
        assert score(hidden[0]).mean() > score(hidden[1]).mean()
    assert as_a_whole(*rng.normal(size=(2, 3000, 2))) is None


def test_many_small_shifts_are_found_with_few_runs():
    """Ten outputs that say a tenth each; the usual scores learn too much of each to see it."""
    rng = np.random.default_rng(5)
    one, two = (laplace(rng, shift, 5.0, 4_000, 10) for shift in (0, 1))
    claim = {"epsilon": 2, "delta": 0, "error": 1e-3}
    found = lower_bound(one, two, learners=MANY_OUTPUTS, **claim)

    assert found.event.score == "shifts"
    assert lower_bound(one, two, **claim).epsilon < found.epsilon < 2


def test_what_is_shown_again_counts_once():
    """A repeated output, hidden at times, and one that never shows, leave the score as it is."""
    rng = np.random.default_rng(6)
    one, two = (laplace(rng, shift, 3.0, 500, 2) for shift in (0, 2))
    one[::7, 1] = two[::5, 1] = np.nan
    never = np.full((500, 1), np.nan)
    again = [np.concatenate([rows, rows[:, ::-1], never], axis=1) for rows in (one, two)]

    np.testing.assert_allclose(shifts(one, two)(one), shifts(*again)(again[0]))
    assert np.isfinite(shifts(*again)(again[1])).all()


def test_a_number_without_noise_decides():
    """The difference of two releases under one noise is exact in both worlds."""
    score = shifts(np.zeros((50, 1)), np.ones((50, 1)))

    assert score(np.zeros((1, 1)))[0] > 1e6
    assert score(np.ones((1, 1)))[0] < -1e6
