"""PegasusW: every step pays the same, groups grow until a test fails, and are smoothed."""

from fractions import Fraction as F

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.replay import record
from dpstream.errors import InvalidParameter
from dpstream.mechanisms import PegasusW, Uniform
from tests.mechanisms.steering import Steering, drive
from tests.support.fixed import RUN, SECRET


def values(mechanism, stream, fails_at=()):
    steering = Steering(publish_at=fails_at, looks=("test",))
    releases = drive(mechanism, np.array(stream)[:, None], steering)
    return [float(r.values[0]) for r in releases], steering


def test_each_step_spends_its_share_exactly():
    """4/5 and 1/5 of epsilon / window, whatever the tests say: a window costs epsilon."""
    _, steering = values(PegasusW(epsilon=1, window=5), [3] * 8, fails_at={2, 3, 6})

    assert steering.paid(8) == [F(4, 25)] * 8
    assert steering.paid(8, "group") == [F(1, 25)] * 8
    assert len(steering.charges) == 16


def test_medians_of_the_groups():
    """Without noise: the running median of each group; a failing value stands for itself."""
    stream = [10, 20, 60, 5, 7, 9, 1]
    found, _ = values(PegasusW(epsilon=1, window=9), stream, fails_at={3})

    assert found == [10, 15, 20, 5, 7, 8, 7]


@pytest.mark.parametrize(
    ("smoother", "expected"),
    [("mean", [10, 15, 30]), ("james_stein", [10, 17.5, 40])],
)
def test_other_smoothers(smoother, expected):
    """(20 - 15) / 2 + 15 and (60 - 30) / 3 + 30."""
    found, _ = values(PegasusW(epsilon=1, window=9, smoother=smoother), [10, 20, 60])

    assert found == expected


def test_groups_are_at_most_a_window_long():
    """With w = 3 the fourth value starts a new group without a test."""
    found, _ = values(PegasusW(epsilon=1, window=3, smoother="mean"), [1, 2, 3, 100, 102])

    assert found == [1, 1.5, 2, 100, 101]


def test_noise_scales_and_threshold():
    """eps_g = 1/25 a step: rho 4/eps_g, nu 8/eps_g, theta 5/eps_g, on a grid of 1/1024."""
    mechanism = PegasusW(epsilon=1, window=5)
    calls, _ = record(mechanism, np.full((9, 2), 7), secret=SECRET, run=RUN)
    scales = {c.purpose: c.sensitivity / c.amount for c in calls if c.kind == "laplace"}

    assert scales == {"publish": F(25, 4), "threshold": 4 * 25 * 1024, "test": 8 * 25 * 1024}
    assert mechanism.theta.tolist() == [5 * 25 * 1024]


def test_bins_have_groups_of_their_own():
    """A jump in one bin closes its group and leaves the other's alone."""
    block = np.full((40, 2), 1000)
    block[20:, 1] += 10**6
    series = dps.release(PegasusW(epsilon=40, window=40), block, secret=SECRET, run_id=RUN)

    assert np.abs(series.values - block).max() < 60
    assert np.abs(series.values[-1, 0] - 1000) < 5


def test_it_smooths_what_rests():
    """On a resting stream its error is below that of noise with the whole budget, unsmoothed."""
    block = np.full((400, 5), 300)
    ours, plain = (
        np.abs(dps.release(m, block, secret=SECRET, run_id=RUN).values - block).mean()
        for m in (PegasusW(epsilon=8, window=40), Uniform(epsilon=8, window=40))
    )

    assert ours < 0.9 * plain


def test_parameters_are_checked():
    """Smoothers by name; a window of one step works, each value being its own group."""
    with pytest.raises(InvalidParameter, match="smoother must be one of"):
        PegasusW(epsilon=1, window=5, smoother="average")
    found, _ = values(PegasusW(epsilon=1, window=1), [4, 9, 2])

    assert found == [4, 9, 2]
