"""The bench of proposed bounds: its truth is that of rows kept one by one, its floor is real."""

import numpy as np
import pytest

from benchmarks import bounds as bench
from benchmarks.bounds import floor, left_out, logs, of_log
from dpstream.bounds_proposal import propose
from tests.bounds_proposal import test_bounds as by_hand


@pytest.fixture(scope="module")
def orders():
    """2,360 customers, asked by week."""
    return list(logs(quick=True))[1]


def test_the_truth_is_that_of_rows_in_random_order(orders):
    """Kept one by one; and a unit with everything kept has lost nothing."""
    weeks = orders.table["ts"].to_numpy() // orders.width
    query = propose._with_bounds(orders.query, 3, 1, {})
    one_by_one = by_hand.left_out(orders.table, "customer", weeks, query)
    lost = left_out(orders)

    assert lost(3, 1).sum() / orders.table.num_rows == pytest.approx(one_by_one, rel=0.02)
    assert np.allclose(lost(10**6, 10**6), 0)


def test_a_sum_at_the_floor_is_off_by_the_floor():
    """The best cut of what units lose, by hand: noise of 50 x 8, nothing beyond."""
    lost = np.full(1_000, 8.0)

    assert floor(lost, rows=20_000, stddev=50.0) == 50 * 8 / 20_000
    assert floor(lost / 1e3, rows=20_000, stddev=50.0) == pytest.approx(8 / 20_000)


def test_what_is_said_wrong_is_not_within(orders, monkeypatch):
    """Without noise nearly right: within a fifth. Twice as much: not."""
    true = propose.from_histograms
    monkeypatch.setattr(bench, "EPSILON", 8)
    assert of_log(orders, runs=1, said=lambda run: None)["within"] == 1

    def doubled(*given, **more):
        told = true(*given, **more)
        return told | {"left_out": 2 * told["left_out"] + 0.1}

    monkeypatch.setattr(propose, "from_histograms", doubled)
    assert of_log(orders, runs=1, said=lambda run: None)["within"] == 0
