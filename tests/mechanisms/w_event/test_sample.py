"""Sample: all of the budget once per window."""

import numpy as np

import dpstream as dps
from dpstream.mechanisms import Sample
from tests.support.fixed import RUN, SECRET


def test_it_pays_once_per_window_and_holds():
    """Steps 0, w, 2w pay; the others repeat."""
    series = dps.release(Sample(epsilon=1, window=3), np.arange(8), secret=SECRET, run_id=RUN)

    assert series.paid == [True, False, False] * 2 + [True, False]
    assert series.held == [not paid for paid in series.paid]
    assert (series.values[:3] == series.values[0]).all()


def test_equal_inputs_get_different_noise():
    """Noise shared between bins would reveal their difference exactly."""
    series = dps.release(Sample(epsilon=0.1, window=3), [[5, 5]], secret=SECRET, run_id=RUN)

    assert series.values[0, 0] != series.values[0, 1]


def test_the_error_bar_is_the_noise():
    """Over many bins the noise spreads as stddev says (1e-6: five standard errors)."""
    bins = 40_000
    series = dps.release(Sample(epsilon=0.5, window=3), np.zeros((1, bins)), secret=SECRET)
    stddev = series.stddev[0, 0]
    spread = np.sqrt((series.values[0] ** 2).mean())

    assert abs(spread / stddev - 1) < 5 * np.sqrt(5 / bins) / 2
    assert not abs(spread / (1.2 * stddev) - 1) < 5 * np.sqrt(5 / bins) / 2
