"""BudgetAbsorption: saved shares, then rest."""

from fractions import Fraction as F

import numpy as np

import dpstream as dps
from dpstream.mechanisms import BudgetAbsorption
from tests.mechanisms.steering import Steering, drive
from tests.support.fixed import RUN, SECRET


def test_the_papers_trace():
    """Figure 5 (w = 3, published at 1, 3, 5): eps/6, 0, eps/3, nullified, eps/6, 0."""
    steering = Steering(publish_at={0, 2, 4})
    drive(BudgetAbsorption(epsilon=1, window=3), np.zeros((6, 1), int), steering)

    assert steering.paid(6) == [F(1, 6), 0, F(1, 3), 0, F(1, 6), 0]


def test_a_resting_step_asks_nothing():
    """While shares are paid back no comparison is made: its answer could not be used."""
    steering = Steering(publish_at={0, 2, 4})
    drive(BudgetAbsorption(epsilon=1, window=3), np.zeros((6, 1), int), steering)

    assert [bool(a) for a in steering.paid(6, "dissimilarity")] == [0, 1, 1, 0, 1, 1]


def test_it_absorbs_at_most_a_window():
    """However long it held, a publication takes the shares of w steps and rests w - 1."""
    steering = Steering(publish_at=range(50, 70))
    drive(BudgetAbsorption(epsilon=1, window=4), np.zeros((70, 1), int), steering)

    assert steering.paid(57)[50:] == [F(1, 2), 0, 0, 0, F(1, 8), F(1, 8), F(1, 8)]


def test_a_wide_stream_is_no_problem():
    """Tens of thousands of columns pass; nothing loops over them in Python."""
    block = np.random.default_rng(1).poisson(3, size=(50, 25_936))
    series = dps.release(BudgetAbsorption(epsilon=1, window=20), block, secret=SECRET, run_id=RUN)

    assert series.values.shape == block.shape
