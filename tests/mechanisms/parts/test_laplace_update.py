"""The closed-form update against numerical integration."""

import math

import numpy as np
import pytest

from dpstream.mechanisms.parts.block_filter import NEGLIGIBLE, laplace_update
from dpstream.mechanisms.w_event.pacer_math import updates

CASES = [
    (100.0, 25.0, 130.0, 10.0),
    (100.0, 25.0, 100.0, 10.0),
    (0.0, 1.0, -3.0, 1.0),
    (50.0, 1e4, 400.0, 20.0),
    (50.0, 1e4, 400.0, 5.0),
    (10.0, 0.04, 500.0, 30.0),
    (0.0, 400.0, 3.0, 0.9),
    (-20.0, 9.0, 60.0, 2.0),
    (1000.0, 1e6, 1010.0, 40.0),
]


@pytest.mark.parametrize(("mean", "variance", "z", "scale"), CASES)
def test_it_agrees_with_quadrature(mean, variance, z, scale):
    """Density of z, mean and variance of x given z."""
    sd = math.sqrt(variance)
    ends = np.array([mean - 14 * sd, mean + 14 * sd, z - 60 * scale, z + 60 * scale])
    x = np.union1d(np.linspace(ends.min(), ends.max(), 400_001), np.linspace(-1, 1, 200_001) + z)
    x = np.union1d(x, np.linspace(mean - 14 * sd, mean + 14 * sd, 400_001))
    log = -0.5 * (x - mean) ** 2 / variance - np.abs(z - x) / scale
    log -= math.log(sd * math.sqrt(2 * math.pi) * 2 * scale)
    top = log.max()
    density = np.exp(log - top)
    mass = np.trapezoid(density, x)
    centre = np.trapezoid(density * x, x) / mass
    spread = np.trapezoid(density * (x - centre) ** 2, x) / mass
    log_density, new_mean, new_variance = laplace_update(mean, variance, z, scale)

    assert log_density == pytest.approx(top + math.log(mass), abs=1e-4)
    assert new_mean == pytest.approx(centre, abs=1e-4 * sd)
    assert new_variance == pytest.approx(spread, rel=1e-3)


def test_a_far_outlier_pulls_no_further():
    """Laplace noise has heavy tails: beyond a point, a farther z says nothing more."""
    near = laplace_update(0.0, 4.0, 100.0, 3.0)
    far = laplace_update(0.0, 4.0, 10_000.0, 3.0)

    assert far[1] == pytest.approx(near[1])
    assert far[2] == pytest.approx(near[2])


def test_small_noise_is_believed():
    """Where the noise is nothing beside the doubt, the belief moves to what was seen."""
    log_density, mean, variance = laplace_update(0.0, 1e12, 5e5, 1.0)

    assert mean == pytest.approx(5e5)
    assert variance == pytest.approx(2.0)
    assert math.isfinite(log_density)


def test_many_at_once_are_as_one_by_one():
    """In the middle, in both tails, and where the noise is a correction."""
    rng, scale, size = np.random.default_rng(2), 7.0, 20_000
    widest = (NEGLIGIBLE * scale) ** 2
    exact = np.empty((5, size))
    exact[0] = rng.standard_normal(size) * np.exp(rng.uniform(-3, 8, size))
    exact[1] = np.exp(rng.uniform(-10, math.log(widest), size))
    updates(exact, size, scale)
    single = np.array([laplace_update(0.0, v, e, scale) for e, v in exact[:2].T]).T

    assert np.allclose(exact[2], single[0], rtol=1e-8)
    assert np.allclose(exact[3], single[1], rtol=1e-4)  # whose erfcx has 8 digits far out
    assert np.allclose(exact[4], single[2], rtol=1e-4)
    near = np.abs(exact[1]) < 25 * scale**2
    assert np.allclose(exact[2:, near], single[:, near], rtol=1e-9)
