"""Noisy histograms of few slots: their noise, what a user moves, and what is read off them."""

from fractions import Fraction as F

import numpy as np
import pytest
from scipy.stats import multivariate_normal, truncnorm

import dpstream as dps
from dpstream.audit.replay import Recorder, record, replay, spend_on
from dpstream.errors import InvalidParameter
from dpstream.mechanisms.infinite import noisy_histograms as module
from dpstream.mechanisms.infinite.dpi import Dpi
from dpstream.mechanisms.infinite.noisy_histograms import distribution
from tests.support.fixed import RUN, SECRET

Z = 4.9  # two-sided false-alarm rate below 1e-6
RNG = np.random.default_rng


def skewed(slots, bins=20, rows=20_000):
    shares = 1 / np.arange(1.0, bins + 1)
    return RNG(0).poisson(rows * shares / shares.sum(), (slots, bins))


def bump(slots, bins=50, rows=10_000):
    middle = bins * (0.2 + 0.5 * np.arange(slots)[:, None] / slots)
    weights = np.exp(-0.5 * ((np.arange(bins) - middle) / 4) ** 2)
    return RNG(0).poisson(rows * weights / weights.sum(axis=1, keepdims=True))


def counting(**more):
    return Dpi(**{"epsilon": 2, "rows_per_user": 1, "publish": "histogram"} | more)


def off(series, block):
    """Mean L1 distance from each slot's distribution."""
    return np.abs(series.values - block / block.sum(axis=1, keepdims=True)).sum(axis=1).mean()


@pytest.mark.parametrize(("scale", "passes"), [(1.0, True), (1.2, False), (0.8, False)])
def test_counts_have_noise_of_the_declared_scale(scale, passes):
    """Of 20,000 bins: b rows of a user over the term of the series."""
    dpi = counting(rows_per_user=3, epsilon=2)
    recorder = Recorder(spend_on(dpi.terms(), secret=SECRET, run=RUN))
    recorder.begin(0)
    state, _ = dpi.step(dpi.start(), np.zeros(20_000, np.int64), recorder)
    (call,), noise = recorder.calls, state.histograms[0].astype(float)
    stddev = np.sqrt(2) * float(call.sensitivity / call.amount) * scale
    error = np.sqrt((noise**4).mean() - (noise**2).mean() ** 2) / np.sqrt(len(noise))

    assert call.sensitivity == 3
    assert (abs((noise**2).mean() - stddev**2) < Z * error) == passes


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("allocation", ["adaptive", "sparse"])
def test_a_user_in_every_slot_loses_what_was_charged_at_most(rows, allocation):
    """A recorded path, replayed with `rows_per_user` rows more in each slot."""
    dpi, block = counting(rows_per_user=rows, allocation=allocation, gap=2), skewed(70)
    calls, _ = record(dpi, block, secret=SECRET, run=RUN)
    other = block.copy()
    other[:, 4] += rows
    found = replay(dpi, other, calls, original=block)

    assert not found.violations
    assert len(calls) > 3
    assert found.loss <= float(sum(call.amount for call in calls)) * (1 + 1e-9) <= 2
    assert found.loss > 1.99 * float(sum(call.amount for call in calls)) / 2


def test_more_rows_than_declared_are_found_by_the_replay():
    """Control: a user with two rows where one is paid for."""
    dpi, block = counting(gap=2), skewed(70)
    calls, _ = record(dpi, block, secret=SECRET, run=RUN)
    other = block.copy()
    other[:, 4] += 2

    assert replay(dpi, other, calls, original=block).violations


def test_it_follows_what_moves_far_closer_than_a_pool_does():
    """A moving bump, one row of a user: less than half of the L1 distance of the pool's mean."""
    block = bump(600)
    fixed = {"secret": SECRET, "run_id": RUN}
    pooled = Dpi(epsilon=2, rows_per_user=1, dummy_rows=1000, pool_size=300)
    counted = off(dps.release(counting(dummy_rows=1000), block, **fixed), block)

    assert counted < off(dps.release(pooled, block, **fixed), block) / 2
    assert counted < 0.35


def test_what_is_evenly_scattered_is_published_as_uniform():
    """Noise and a sample's scatter explain such slots, also at an epsilon that shows them well."""
    block = RNG(0).poisson(100, (200, 100))
    for epsilon in (0.1, 2, 100):
        series = dps.release(counting(epsilon=epsilon), block, secret=SECRET, run_id=RUN)
        assert (series.values == series.values[0, 0]).all()


def test_a_steady_level_is_averaged_and_a_new_one_is_taken_up():
    """Eight noisy histograms of one level are nearer to it than the newest; a turn is followed."""
    level = np.array([5000, 3000, 1500, 500] * 5)
    noise = RNG(1).laplace(scale=200, size=(8, 20))
    noisy, scales = np.rint(level + noise).astype(int), np.full(8, 200.0)
    true = level / level.sum()
    alone = np.abs(noisy[-1] / noisy[-1].sum() - true).sum()
    turned = noisy.copy()
    turned[-1] = noisy[-1][::-1]

    assert np.abs(distribution(noisy, scales) - true).sum() < alone / 1.7
    assert np.abs(distribution(turned, scales) - true[::-1]).sum() < 2 * alone


def test_the_filter_has_the_likelihood_of_the_normal_law():
    """Against the density of all shares together, with the covariance written out."""
    shares, noise = RNG(2).normal(size=(4, 3)), np.array([1.0, 2.0, 0.5, 1.5])
    drift, spread = 0.7, 2.0
    at = np.arange(4)
    covariance = spread + drift * np.minimum.outer(at, at) + np.diag(noise)
    exact = sum(multivariate_normal(cov=covariance).logpdf(column) for column in shares.T)
    found, mean, variance = module.follow(
        shares, noise[:, None] + [0, 9], np.array([drift, 9]), np.array([spread, 9])
    )
    weights = np.linalg.solve(covariance, spread + drift * at)

    assert found[0] - 1.5 * 4 * np.log(2 * np.pi) == pytest.approx(exact)
    assert mean[0] == pytest.approx(weights @ shares)
    assert variance[0] == pytest.approx(spread + 3 * drift - weights @ (spread + drift * at))


def test_shares_are_means_of_normals_that_are_positive():
    """As the truncated law has them, down to far below zero."""
    means = np.array([-8.0, -1.0, 0.0, 0.5, 9.0])
    law = truncnorm(-means / 0.5, np.inf, loc=means, scale=0.5)

    assert module._positive_mean(means, 0.25) == pytest.approx(law.mean(), rel=1e-6)


def test_a_restart_goes_on_to_the_last_bit(tmp_path):
    """Noisy histograms are kept; two that are killed in between publish what one does."""
    dpi, block = counting(gap=3), bump(120)
    whole = dps.release(dpi, block, secret=SECRET, run_id=RUN)
    parts, place = [], tmp_path / "run"
    with dps.Runner(dpi, secret=SECRET, run_id=RUN, state=place) as first:
        parts += [release.values for got in first.feed(block[:55]) for release in got]
        first.save()
    with dps.Runner(dpi, secret=SECRET, state=place) as second:
        parts += [release.values for got in second.feed(block[55:]) for release in got]

    assert (np.array(parts) == whole.values).all()
    assert sum(whole.paid) > 4


@pytest.mark.parametrize(
    "more", [{"rows_per_user": None}, {"allocation": "random"}, {"queries": (8, 2)}]
)
def test_what_has_no_such_form_is_refused(more):
    """With what to change."""
    with pytest.raises(InvalidParameter, match="publish='histogram'"):
        counting(**more)


def test_the_ledger_has_one_charge_for_each_histogram():
    """Of the whole term: nothing is chosen beside."""
    book = dps.Ledger()
    series = dps.release(counting(), skewed(300), secret=SECRET, run_id=RUN, ledger=book)
    (line,) = book.report()[0]["spent_on"]

    assert line["charges"] == sum(series.paid)
    assert line["purpose"] == "histogram"
    assert F(line["amount"]) <= 2
