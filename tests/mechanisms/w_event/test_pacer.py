"""Pacer: the whole budget in publications, at a pace learned from releases."""

from fractions import Fraction

import numpy as np
import pytest

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.mechanisms import Pacer
from dpstream.privacy.state import pack
from tests.mechanisms.steering import Steering, drive
from tests.support.fixed import RUN, SECRET


def streams(steps):
    """Calm, wild, jumping and mostly empty."""
    rng = np.random.default_rng(11)
    return {
        "calm": np.full((steps, 1), 800),
        "wild": rng.integers(0, 20_000, (steps, 2)),
        "jumps": np.where(np.arange(steps) // 30 % 2, 5000, 3)[:, None],
        "sparse": rng.poisson(0.1, (steps, 40)),
    }


def worst_window(paid, window):
    """The largest sum of `window` successive amounts."""
    sums = [sum(paid[i : i + window], Fraction(0)) for i in range(len(paid))]
    return max(sums)


@pytest.mark.parametrize("window", [1, 7, 33, 120])
@pytest.mark.parametrize("epsilon", [0.1, 3])
def test_no_window_spends_more_than_epsilon(window, epsilon):
    """Sums of exact budgets, on streams of every kind; most of the budget is used."""
    for block in streams(400).values():
        steering = Steering(publish_at=())
        drive(Pacer(epsilon=epsilon, window=window), block, steering)
        worst = worst_window(steering.paid(400), window)

        assert Fraction(9, 10) * Fraction(str(epsilon)) < worst <= Fraction(str(epsilon))


@pytest.mark.parametrize("window", [1, 7, 120])
def test_the_ledger_never_refuses(window):
    """With real noise, every charge is admitted."""
    for block in streams(300).values():
        series = dps.release(Pacer(epsilon=0.7, window=window), block, secret=SECRET, run_id=RUN)
        assert (series.values >= 0).all()
        assert (series.values == np.rint(series.values)).all()
        assert (series.stddev > 0).all()


def test_a_window_of_one_publishes_every_step():
    """With w = 1 there is nothing to save for."""
    block = np.arange(50)[:, None] * 100
    series = dps.release(Pacer(epsilon=1, window=1), block, secret=SECRET, run_id=RUN)

    assert series.paid == [True] * 50
    assert np.abs(series.values - block).mean() < 5


def test_a_still_stream_is_known_better_and_better():
    """The filters average over windows: the error falls below that of one publication."""
    block = np.full((3000, 1), 400)
    series = dps.release(Pacer(epsilon=0.5, window=30), block, secret=SECRET, run_id=RUN)

    assert np.abs(series.values - block)[1000:].mean() < 1 / 0.5
    assert sum(series.paid) < 3000 / 5


def test_it_keeps_up_with_a_restless_stream():
    """Where every step is news, nearly every step is published."""
    block = np.random.default_rng(2).integers(0, 10**6, (300, 1))
    series = dps.release(Pacer(epsilon=1, window=20), block, secret=SECRET, run_id=RUN)

    assert sum(series.paid[60:]) > 0.9 * 240
    assert np.abs(series.values - block)[60:].mean() < 50


def test_empty_bins_are_published_as_zero():
    """Noise on bins without events does not become counts."""
    block = np.zeros((200, 50), int)
    block[:, 0] = 1000
    series = dps.release(Pacer(epsilon=1, window=20), block, secret=SECRET, run_id=RUN)

    assert (series.values[50:, 1:] == 0).mean() > 0.95
    assert np.abs(series.values[50:, 0] - 1000).mean() < 30


def test_the_error_bar_covers_most_errors():
    """On streams like those that the models describe, two deviations hold about 95%."""
    rng = np.random.default_rng(4)
    block = np.maximum(0, np.rint(5000 + rng.normal(0, 30, (600, 8)).cumsum(axis=0))).astype(int)
    series = dps.release(Pacer(epsilon=1, window=40), block, secret=SECRET, run_id=RUN)
    covered = np.abs(series.values - block)[100:] <= 2 * series.stddev[100:]

    assert 0.85 < covered.mean() < 0.999


def test_decisions_follow_from_releases_alone():
    """The same noisy answers over other data give the same steps, budgets and releases."""

    class Scripted(Steering):
        def laplace(self, value, *, epsilon, purpose, **asked):
            super().laplace(value, epsilon=epsilon, purpose=purpose, **asked)
            noise = np.random.default_rng(self.step).integers(0, 4000, np.shape(value))
            return noise.astype(np.int64)

    one, two = Scripted(publish_at=()), Scripted(publish_at=())
    first = drive(Pacer(epsilon=1, window=12), np.zeros((80, 3), int), one)
    second = drive(Pacer(epsilon=1, window=12), np.full((80, 3), 999), two)

    assert one.charges == two.charges
    for a, b in zip(first, second, strict=True):
        assert (a.values == b.values).all()
        assert (a.stddev == b.stddev).all()


def test_many_bins_pass():
    """Beyond a few hundred bins the grid of models is thinner; the state is as documented."""
    block = np.random.default_rng(5).poisson(20, (25, 3000))
    mechanism, steering = Pacer(epsilon=1, window=50), Steering(publish_at=())
    state = mechanism.start()
    for step, row in enumerate(block):
        steering.step = step
        state, _ = mechanism.step(state, row, steering)

    assert len(pack(state, kind="mechanism state")) < 1500 * 3000


def test_gamma_is_checked():
    """The exponent of the error's weight lies between 0 and 1."""
    with pytest.raises(InvalidParameter, match="gamma"):
        Pacer(epsilon=1, window=5, gamma=2)
