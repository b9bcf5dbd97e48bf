"""BudgetDistribution: half of what is left, each time."""

from fractions import Fraction as F

import numpy as np

import dpstream as dps
from dpstream.mechanisms import BudgetDistribution
from tests.mechanisms.steering import Steering, drive
from tests.support.fixed import RUN, SECRET


def test_the_papers_trace():
    """Figure 3 (w = 3, published at steps 1, 3, 4): eps/4, 0, eps/8, 3 eps/16, 0, 0."""
    steering = Steering(publish_at={0, 2, 3})
    drive(BudgetDistribution(epsilon=1, window=3), np.zeros((6, 1), int), steering)

    assert steering.paid(6) == [F(1, 4), 0, F(1, 8), F(3, 16), 0, 0]
    assert steering.paid(6, "dissimilarity")[1:] == [F(1, 6)] * 5


def test_many_columns_shift_budget_to_publications():
    """With d >= 2 w a comparison costs eps/d, and publications share the rest."""
    steering = Steering(publish_at={1})
    drive(BudgetDistribution(epsilon=1, window=3), np.zeros((2, 60), int), steering)

    assert steering.paid(2, "dissimilarity") == [0, F(1, 60)]
    assert steering.paid(2) == [(1 - F(3, 60)) / 2, (1 - F(3, 60)) / 4]


def test_budgets_stay_small_fractions_for_ever():
    """Halving for ever must not make the arithmetic grow: amounts stay on the ledger's grid."""
    steering = Steering(publish_at=range(3000))
    drive(BudgetDistribution(epsilon=1, window=4), np.zeros((3000, 1), int), steering)

    assert max(amount.denominator.bit_length() for _, _, amount in steering.charges) < 256


def test_it_holds_what_does_not_change():
    """A constant stream is published seldom, a jumping one more often."""
    mechanism = BudgetDistribution(epsilon=5, window=10)
    still = np.full((200, 60), 1000)
    jumping = still + 5000 * (np.arange(200) // 10 % 2)[:, None]
    quiet, busy = (
        sum(dps.release(mechanism, block, secret=SECRET, run_id=RUN).paid)
        for block in (still, jumping)
    )

    assert quiet < busy


def test_groups_publish_at_different_steps():
    """Columns that jump are published without disturbing those that stand still."""
    steps, columns = 120, 40
    block = np.full((steps, columns), 300)
    block[:, ::2] += 4000 * (np.arange(steps) // 10 % 2)[:, None]
    grouped = BudgetDistribution(epsilon=5, window=10, groups=2)
    values = dps.release(grouped, block, secret=SECRET, run_id=RUN).values
    changes = (np.diff(values, axis=0) != 0).sum(axis=0)

    assert changes[::2].mean() > 1.15 * changes[1::2].mean()
