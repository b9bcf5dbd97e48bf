"""AdaPub: bins grouped by the last release, each grouped in time, thresholds from releases."""

from fractions import Fraction as F

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.replay import record, replay
from dpstream.errors import InvalidParameter
from dpstream.mechanisms import AdaPub
from dpstream.mechanisms.parts.grouping import GRID
from dpstream.mechanisms.w_event.adapub import alike, thresholds
from tests.mechanisms.steering import Steering, drive
from tests.support.fixed import RUN, SECRET

ALWAYS = range(1000)


def test_each_step_spends_its_share_exactly():
    """4/5 and 1/5 of epsilon / window, with bins grouped or not."""
    steering = Steering(publish_at={2, 3}, looks=("test",))
    drive(AdaPub(epsilon=2, window=5, pivots=2), np.arange(32).reshape(8, 4), steering)

    assert steering.paid(8) == [F(8, 25)] * 8
    assert steering.paid(8, "group") == [F(2, 25)] * 8
    assert len(steering.charges) == 16


def test_bins_share_the_mean_of_those_that_looked_like_them():
    """Step 0 publishes each bin alone; then (1, 2) and (50, 60) are summed and divided by 2."""
    steering = Steering(publish_at=ALWAYS, looks=("test",))  # no groups in time
    block = [[1, 50, 2, 60], [3, 40, 5, 44]]
    releases = drive(AdaPub(epsilon=1, window=9, pivots=2), block, steering)

    assert releases[0].values.tolist() == [1, 50, 2, 60]
    assert releases[1].values.tolist() == [4, 42, 4, 42]


def test_bins_part_again_once_in_a_window():
    """Bins with one release would stay together: every w steps each is published alone."""
    steering = Steering(publish_at=ALWAYS, looks=("test",))
    releases = drive(AdaPub(epsilon=1, window=3, pivots=1), [[0, 10]] * 7, steering)

    assert [r.values.tolist() for r in releases] == [[0, 10], [5, 5], [5, 5]] * 2 + [[0, 10]]


def test_few_bins_stay_alone():
    """With no more bins than pivots there is nothing to share."""
    steering = Steering(publish_at=ALWAYS, looks=("test",))
    releases = drive(AdaPub(epsilon=1, window=9, pivots=3), [[4, 4, 90]] * 3, steering)

    assert releases[2].values.tolist() == [4, 4, 90]


def test_groups_in_time_release_their_median():
    """Tests that never fail: running medians."""
    steering = Steering(publish_at=(), looks=("test",))
    releases = drive(AdaPub(epsilon=1, window=9), [[10], [20], [60], [5]], steering)

    assert [float(r.values[0]) for r in releases] == [10, 15, 20, 15]


def test_pivots_are_at_evenly_spaced_ranks():
    """Of 8 sorted bins and 2 pivots those at ranks 2 and 6; bins go to the nearer one."""
    last = np.array([0.0, 1, 2, 3, 4, 5, 100, 200])

    assert alike(last, 2).tolist() == [0] * 6 + [1] * 2
    assert alike(last[::-1].copy(), 2).tolist() == [1] * 2 + [0] * 6
    assert alike(np.full(30, 7.0), 5).tolist() == [0] * 30


def test_thresholds_follow_the_relative_change():
    """E = |10 - 4| / 4 = 1.5, mean of (0.5, 1.5) = 1, delta = 1.45, theta = 1.45^2 / eps."""
    changes = np.zeros((1, 5))
    changes[0, 0] = 0.5
    now, theta = thresholds(changes, 1, np.array([10.0]), np.array([4.0]), 0.1)

    assert now[0].tolist() == [0.5, 1.5, 0, 0, 0]
    assert changes[0, 1] == 0
    assert theta[0] == pytest.approx(GRID * 1.45**2 / 0.1, abs=1)
    assert thresholds(changes, 1, np.array([5.0]), np.array([5.0]), 10.0)[1].tolist() == [GRID]
    assert thresholds(changes, 7, np.array([5.0]), np.array([5.0]), 10.0)[0][0, 2] == 0


def test_an_extreme_change_keeps_the_threshold_within_integers():
    """Released values may be anything; the threshold stays far from the ends of int64."""
    _, theta = thresholds(np.zeros((1, 5)), 0, np.array([1e18]), np.array([-1e18]), 1e-9)

    assert theta.tolist() == [1024 << 50]


def test_one_event_moves_one_of_many_sums():
    """The replay law with more bins than pivots, at levels that do form groups."""
    mechanism = AdaPub(epsilon=30, window=4, pivots=3)
    rng = np.random.default_rng(6)
    block = rng.poisson(np.repeat([5, 50, 500], 5), size=(30, 15))
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)
    assert {c.value.size for c in calls if c.purpose == "publish"} == {3, 15}
    for _ in range(40):
        other = block.copy()
        start = int(rng.integers(0, 26))
        other[np.arange(start, start + 4), rng.integers(0, 15, 4)] += 1
        result = replay(mechanism, other, calls)

        assert result.violations == []
        assert result.loss == 30


def test_many_equal_bins_profit_from_each_other():
    """200 bins at one level: the shared mean has a fraction of the noise of a single bin."""
    block = np.full((80, 200), 40)
    series = dps.release(AdaPub(epsilon=1, window=40, pivots=4), block, secret=SECRET, run_id=RUN)
    errors = np.abs(series.values - block).mean(axis=1)

    assert errors[60:].mean() < 0.5 * errors[0]


def test_parameters_are_checked():
    """At least one pivot."""
    with pytest.raises(InvalidParameter, match="pivots must be a whole number of at least 1"):
        AdaPub(epsilon=1, window=5, pivots=0)
