"""Uniform: an equal share at every step."""

from fractions import Fraction

import numpy as np

import dpstream as dps
from dpstream.mechanisms import Uniform
from tests.support.fixed import RUN, SECRET


def test_every_step_pays_its_share():
    """Each step costs epsilon / w, and a full window costs epsilon."""
    runner = dps.Runner(Uniform(epsilon=1, window=4), secret=SECRET, run_id=RUN)
    left = []
    for _ in range(6):
        runner.step([9])
        left.append(runner.left)

    assert left == [Fraction(3, 4), Fraction(1, 2), Fraction(1, 4), 0, 0, 0]


def test_the_noise_grows_with_the_window():
    """Stddev is that of discrete Laplace at scale w / epsilon."""
    series = dps.release(Uniform(epsilon=1, window=100), np.zeros((3, 2)), secret=SECRET)

    assert np.allclose(series.stddev, np.sqrt(2) * 100, rtol=1e-4)
