"""CompOrder and BucOrder: what they ask, and what they make of the answers."""

from fractions import Fraction

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.replay import record, replay
from dpstream.errors import InvalidParameter
from dpstream.mechanisms import BucOrder, CompOrder, Naive
from dpstream.mechanisms.delayed.buc_order import BucketPrior
from dpstream.mechanisms.delayed.comp_order import CELLS, cell_median, log_chances
from dpstream.privacy.sensitivity import comparison_change

SECRET, RUN = bytes(range(32)), bytes(16)
RANGE = {"lo": 0, "hi": 100}


def test_a_value_is_in_two_delays_of_comparisons():
    """With the answers frozen, a value moves all differences by 2 w Delta, and no more."""
    mechanism = CompOrder(epsilon=1, delay=4, **RANGE)
    block = np.zeros((20, 1), np.int64)
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)
    other = block.copy()
    other[10] = 100
    result = replay(mechanism, other, calls, original=block)
    asked = [c for c in calls if c.purpose == "comparison"]

    assert result.violations == []
    assert [c.value.size for c in asked[:6]] == [1, 2, 3, 4, 4, 4]
    assert asked[0].sensitivity == comparison_change(Fraction(100), delay=4) == 800


def test_comparisons_pull_a_value_only_as_far_as_they_can_be_believed():
    """All neighbours are said to be smaller: with sharp answers it is above, with dull ones not."""
    above, none = np.zeros(CELLS, np.int64), np.zeros(CELLS, np.int64)
    above[CELLS // 2] = 8

    sharp = cell_median(0.3, 0.5, above, none, log_chances(0.01))
    dull = cell_median(0.3, 0.5, above, none, log_chances(1e4))
    alone = cell_median(0.3, 0.5, none, none, log_chances(0.01))

    assert sharp > 0.5
    assert dull == pytest.approx(alone, abs=0.01)


def test_alignment_is_the_median_of_the_density():
    """Against a fine sum over the same density."""
    rng = np.random.default_rng(3)
    chances = log_chances(0.3)
    for _ in range(10):
        above, below = rng.integers(0, 3, CELLS), rng.integers(0, 3, CELLS)
        z, scale = rng.uniform(-1, 2), rng.uniform(0.02, 3)
        x = (np.arange(48 * 500) + 0.5) / (48 * 500)
        log = chances[(x * CELLS).astype(int)] @ above + chances.T[(x * CELLS).astype(int)] @ below
        log -= np.abs(x - z) / scale
        total = np.cumsum(np.exp(log - log.max()))
        median = x[np.searchsorted(total, total[-1] / 2)]

        assert cell_median(z, scale, above, below, chances) == pytest.approx(median, abs=2e-4)


def test_order_flags_follow_the_text():
    """Without shrink, a noisy value on the wrong side of its neighbours goes between them."""
    data = np.array([50, 20, 80, 35, 65])
    exact = CompOrder(epsilon=10**7, delay=5, shrink=False, quantum="1/1000", **RANGE)

    released = dps.release(exact, data, secret=SECRET, run_id=RUN).values[:, 0]

    assert np.abs(released - data).max() < 0.1


def test_compared_values_are_no_worse_than_noisy_ones_in_the_range():
    """Comparisons cost a fifth of epsilon, and do no other harm."""
    data = np.random.default_rng(0).integers(0, 101, 4000)
    naive = dps.release(Naive(epsilon="4/5", **RANGE), data, secret=SECRET, run_id=RUN).values[:, 0]
    order = dps.release(
        CompOrder(epsilon=1, delay=10, **RANGE), data, secret=SECRET, run_id=RUN
    ).values[:, 0]

    assert np.abs(order - data).mean() < np.abs(np.clip(naive, 0, 100) - data).mean()


def test_noise_is_as_wide_as_a_bucket():
    """Values are clipped to the bucket that they named, so its width is all that they can move."""
    mechanism = BucOrder(epsilon=1, delay=5, bucket=10, **RANGE)
    block = np.random.default_rng(0).integers(0, 101, (40, 1))
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)
    sums = [c for c in calls if c.purpose == "publish"]

    assert {c.sensitivity for c in sums} == {10}
    assert {c.cells.last - c.cells.first for c in sums} == {4}


def test_unclipped_sums_are_seen_by_the_replay():
    """Control: the published form's sums, with a bucket's noise, move by more than declared."""

    class Unclipped(BucOrder, identity="test unclipped"):
        @property
        def edges(self):
            return Wide(super().edges)

    class Wide:
        """Edges that clip nothing."""

        def __init__(self, edges):
            self.all = edges

        def __getitem__(self, at):
            if isinstance(at, np.ndarray):
                return np.where(at > 0, 10**6, -(10**6)) if at.min() > 0 else self.all[at] - 10**6
            return self.all[at]

        def astype(self, kind):
            return self.all.astype(kind)

    mechanism = Unclipped(epsilon=1, delay=5, bucket=10, shrink=False, **RANGE)
    block = np.zeros((5, 1), np.int64)
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)
    other = block.copy()
    other[2] = 100

    assert replay(mechanism, other, calls, original=block).violations != []


@pytest.mark.parametrize(
    ("options", "count", "last"),
    [({"bucket": 30}, 4, 100), ({"bucket": 100}, 1, 100), ({"bucket": 500}, 1, 100),
     ({"bucket": 1}, 100, 100), ({}, 1, 100), ({"epsilon": 10}, 12, 100)],
)  # fmt: skip
def test_buckets_cover_the_range(options, count, last):
    """The last one may be narrower; without a width, epsilon decides how many."""
    mechanism = BucOrder(**({"epsilon": 1, "delay": 5, **RANGE} | options))

    assert (mechanism.buckets, mechanism.edges[0], mechanism.edges[-1]) == (count, 0, last)
    assert len(mechanism.edges) == count + 1


def test_too_many_buckets_are_refused():
    """With their number."""
    with pytest.raises(InvalidParameter, match="makes 1000000 buckets"):
        BucOrder(epsilon=1, delay=5, lo=0, hi=10**6, bucket=1)


@pytest.mark.parametrize("shrink", [True, False])
def test_published_values_stay_in_their_buckets(shrink):
    """Without shrink each value is within the bucket that it named; with it, in the range."""
    mechanism = BucOrder(epsilon=40, delay=5, bucket=10, shrink=shrink, **RANGE)
    data = np.random.default_rng(2).integers(0, 101, 200)
    values = dps.release(mechanism, data, secret=SECRET, run_id=RUN).values[:, 0]

    assert np.abs(values - data).max() <= 10  # e^20 to 1 that every bucket is the true one


def test_the_prior_learns_where_answers_are():
    """From answers that are right two times in three; a flat stream leaves it flat."""
    rng = np.random.default_rng(0)
    prior = BucketPrior.flat(1, 5)
    odds = 8.0
    for _ in range(200):
        true = rng.choice(5, 50, p=[0.05, 0.05, 0.6, 0.25, 0.05])
        lie = rng.random(50) < 4 / (odds + 4)
        said = np.where(lie, (true + rng.integers(1, 5, 50)) % 5, true)
        prior = prior.learn(said[:, None], odds)

    assert np.abs(prior.weight[0] - [0.05, 0.05, 0.6, 0.25, 0.05]).max() < 0.05
    assert prior.weight.sum() == pytest.approx(1)


def test_a_doubtful_answer_is_not_believed():
    """With odds near 1 the median of the prior is published, with large odds the bucket's mean."""
    prior = BucketPrior.flat(1, 4)
    labels, values, edges = np.array([[0], [3]]), np.array([[5.0], [95.0]]), np.arange(5) * 25.0

    assert prior.settle(labels, values, edges, 1.0)[:, 0].tolist() == [50.0, 50.0]
    assert prior.settle(labels, values, edges, 1e6)[:, 0].tolist() == [5.0, 95.0]
