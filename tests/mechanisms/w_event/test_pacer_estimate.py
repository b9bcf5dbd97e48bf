"""The published number: strong bins as believed, weak bins by their shared prior."""

import numpy as np

from dpstream.mechanisms.w_event.pacer_models import estimate, flat_prior


def published(mean, variance, gamma=0.5, rounds=1):
    prior = flat_prior()
    for _ in range(rounds):
        values, prior, _ = estimate(np.array(mean), np.array(variance), prior, gamma=gamma)
    return values


def test_strong_bins_are_published_as_believed():
    """Far above its uncertainty a count is what the filter says, to the nearest whole number."""
    assert published([1000.3, 52.0], [4.0, 1.0]).tolist() == [1000, 52]


def test_a_large_but_uncertain_bin_is_not_cut_short():
    """A bin twenty typical deviations up, itself less certain, keeps its size."""
    mean = np.r_[np.zeros(50), 200.0]
    variance = np.r_[np.full(50, 100.0), 1600.0]

    assert published(mean, variance)[-1] > 180


def test_mostly_empty_bins_become_zero():
    """Forty bins around zero and two clear ones: the prior learns which is which."""
    rng = np.random.default_rng(6)
    mean = np.r_[rng.normal(0, 10, 40), 70.0, 75.0]
    values = published(mean, np.full(42, 100.0), rounds=3)

    assert (values[:40] == 0).mean() > 0.9
    assert (np.abs(values[40:] - mean[40:]) < 15).all()


def test_a_heavier_weight_on_relative_error_publishes_less():
    """Gamma pulls downward, and never below zero."""
    for mean in (-30.0, 5.0, 20.0, 60.0):
        absolute, half, relative = (
            published([mean], [100.0], gamma=gamma)[0] for gamma in (0.0, 0.5, 1.0)
        )
        assert absolute >= half >= relative >= 0


def test_the_estimate_grows_with_the_belief():
    """One bin: more believed, more published."""
    values = [published([mean], [100.0])[0] for mean in range(-20, 140, 10)]

    assert values == sorted(values)


def test_shrinkage_is_the_expected_squared_error_over_the_variance():
    """A strong bin has that of its belief; one among empty ones far less; a tilted one more."""
    mean, variance = np.r_[np.zeros(40), 900.0], np.full(41, 100.0)
    prior = flat_prior()
    for _ in range(3):
        _, prior, shrunk = estimate(mean, variance, prior, gamma=0.5)

    assert 0.99 < shrunk[-1] < 1.01
    assert shrunk[:40].max() < 0.3
    assert estimate(np.array([90.0]), np.array([100.0]), flat_prior(), gamma=1.0)[2][0] > 1
