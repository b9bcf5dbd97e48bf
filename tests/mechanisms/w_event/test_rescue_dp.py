"""RescueDP: its groups, its budgets, its schedule; and what a schedule per bin would spend."""

from fractions import Fraction

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.controls.published_mechanisms import ColumnsApart
from dpstream.audit.replay import record
from dpstream.errors import BudgetExceeded
from dpstream.mechanisms import RescueDp
from dpstream.mechanisms.w_event.rescue_dp import small_bins_together
from tests.support.fixed import RUN, SECRET


def samples(epsilon, window, block):
    """(step, amount, values read) of every sample."""
    calls, _ = record(RescueDp(epsilon=epsilon, window=window), block, secret=SECRET, run=RUN)
    return [(call.step, call.amount, call.value) for call in calls]


@pytest.mark.parametrize("window", [1, 7, 40])
def test_every_window_is_within_epsilon(window):
    """On calm and on wild streams, by sums of its own charges."""
    rng = np.random.default_rng(1)
    for block in (np.full((120, 3), 40), rng.integers(0, 500, (120, 3))):
        paid = np.zeros(120)
        for step, amount, _ in samples(1, window, block):
            paid[step] += float(amount)
        sums = np.convolve(paid, np.ones(window))[: len(paid)]
        assert 0 < sums.max() <= 1 + 1e-12


def test_small_bins_share_a_sum_and_large_ones_do_not():
    """After the first sample: two bins of hundreds, and twenty of one event."""
    block = np.tile([800, 300, *[1] * 20], (30, 1))
    first, *later = samples(1, 10, block)

    assert len(first[2]) == 22
    assert all(3 <= len(read) < 22 for _, _, read in later)
    assert all(read.sum() == block[0].sum() for _, _, read in later)
    assert sorted(later[-1][2])[-2:] == [300, 800]


def test_every_bin_is_in_one_group_and_groups_add_up_to_enough():
    """All but the last group of small bins."""
    rng = np.random.default_rng(2)
    for _ in range(50):
        predicted = rng.exponential(5, rng.integers(1, 30))
        groups = small_bins_together(predicted, len(predicted), 12.0)
        sums = np.bincount(groups, weights=predicted)
        assert sorted(set(groups)) == list(range(len(sums)))
        small = [s for g, s in enumerate(sums) if predicted[groups == g].max() < 12.0]
        assert all(total >= 12.0 for total in small[:-1])


def test_intervals_grow_on_a_calm_stream_and_shrink_when_it_moves():
    """A level that shifts at step 100 is sampled more often afterwards than before."""
    calm = np.full((100, 1), 5_000)
    wild = 5_000 + 3_000 * (np.arange(60)[:, None] % 2)
    steps = np.array([step for step, _, _ in samples(4, 20, np.concatenate([calm, wild]))])
    before, after = np.diff(steps[(steps > 40) & (steps < 100)]), np.diff(steps[steps > 110])

    assert before.mean() > 2 * after.mean()


def test_it_follows_a_level():
    """The error on large, steady counts is far below the noise of publishing every step."""
    block = np.full((200, 3), 4_000)
    series = dps.release(RescueDp(epsilon=1, window=20), block, secret=SECRET, run_id=RUN)
    errors = np.abs(series.values[40:] - 4_000)

    assert errors.mean() < 20
    assert np.isnan(series.stddev).all()


def test_a_schedule_per_bin_is_refused():
    """Control: as published, each bin with a PID and a budget of its own."""
    rng = np.random.default_rng(4)
    block = rng.poisson(np.linspace(10, 900, 6), (80, 6))
    with pytest.raises(BudgetExceeded):
        dps.release(ColumnsApart(epsilon=1, window=10, scheme=RescueDp), block, secret=SECRET)
    dps.release(RescueDp(epsilon=1, window=10), block, secret=SECRET)
    assert RescueDp(epsilon=Fraction(1), window=10) == RescueDp(epsilon=1, window=10)
