"""Naive: noise as wide as the public range on every value."""

import numpy as np

import dpstream as dps
from dpstream.mechanisms import Naive
from tests.support.fixed import RUN, SECRET


def test_values_are_clamped_to_the_public_range():
    """What lies outside counts as the nearest bound: the release is the same."""
    naive = Naive(epsilon=1, lo=0, hi=10)
    inside = dps.release(naive, [0, 10, 10], secret=SECRET, run_id=RUN)
    outside = dps.release(naive, [-50, 10, 9e9], secret=SECRET, run_id=RUN)

    assert (inside.values == outside.values).all()


def test_releases_lie_on_the_grid():
    """Values and noise are multiples of the quantum."""
    naive = Naive(epsilon=1, lo=-1, hi=1, quantum=0.25)
    values = dps.release(naive, [[0.3]] * 50, secret=SECRET, run_id=RUN).values

    assert (values * 4 == np.rint(values * 4)).all()
    assert np.isclose(dps.release(naive, [0]).stddev[0, 0], np.sqrt(2) * 2, rtol=1e-2)
