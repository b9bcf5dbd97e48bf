"""Paces, and budgets with which a pace can be kept."""

import numpy as np
import pytest

from dpstream.mechanisms.w_event.pacer import SHARES, counts, interval, log_errors, sustainable
from dpstream.mechanisms.w_event.pacer_models import models

NONE = np.zeros(0, np.int64)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 33, 120, 1000])
def test_counts_and_intervals_fit_each_other(window):
    """Publications every `interval` steps are `count` in any window, never more."""
    assert counts(window)[-1] == window
    for count in counts(window):
        every = interval(window, count)
        assert len(range(0, window, every)) == count


def test_a_fresh_window_allows_the_fair_share():
    """With nothing spent, k publications get a k-th each."""
    assert sustainable(NONE, NONE, 0, 120, 24, 5) == SHARES // 24


@pytest.mark.parametrize("count", [1, 2, 3, 5, 12])
def test_what_is_sustainable_can_be_sustained(count):
    """Starting from any past, the same shares at every interval never pass the budget."""
    rng, window = np.random.default_rng(count), 12
    every = interval(window, count)
    for _ in range(50):
        steps = np.flatnonzero(rng.random(window) < 0.4)
        shares = np.zeros(0, np.int64)
        if len(steps):
            shares = (rng.dirichlet(np.ones(len(steps))) * SHARES * rng.random()).astype(np.int64)
        now = window + int(rng.integers(0, 3))
        amount = sustainable(steps, shares, now, window, count, every)
        spent = np.zeros(now + 5 * window, dtype=np.int64)
        spent[steps] = shares
        spent[now::every] += amount
        sums = np.convolve(spent.astype(object), np.ones(window, dtype=object))

        assert amount >= 0
        assert max(sums) <= SHARES


def test_the_grid_is_public():
    """Models and errors depend on epsilon and w alone; the faster the drift, the more looks."""
    grid = models(0.5, 120, thin=False)
    best = log_errors(0.5, 120, grid).argmin(axis=1)
    quiet = best[grid.white == 0]

    assert len(grid.drift) == 135
    assert len(models(0.5, 120, thin=True).drift) < 60
    assert (np.diff(quiet) >= 0).all()
    assert quiet[0] == 0
    assert quiet[-1] == len(counts(120)) - 1
