"""Published mechanisms with a delay: drawn as printed, and each caught where it overspends."""

from fractions import Fraction

import numpy as np
import pytest

import dpstream as dps
from benchmarks import delayed_published
from benchmarks.delayed_published import (
    BucOrderPublished,
    CompOrderPublished,
    ContinGroupPublished,
    DiscontinGroupPublished,
    PegasusPublished,
)
from dpstream.audit.replay import record
from dpstream.errors import BudgetExceeded
from dpstream.mechanisms.parts.grouping import GRID
from dpstream.privacy.ledger.charges import Terms
from tests.support.fixed import RUN, SECRET

DATA = np.array([0, 3, 100, 40, 41, 40, 7, 90, 90, 12])[:, None]
RANGE = {"epsilon": 1, "lo": 0, "hi": 100}


def roomy(build, **options):
    """The form, with a promise that leaves room for what it truly spends."""

    class Roomy(build, identity="test roomy"):
        def terms(self):
            return Terms(unit="event", total=10 * self.budget, change=super().terms().change)

    return Roomy(**RANGE, **options)


def scales(mechanism, data=DATA):
    """Scale of every kind of noise, as drawn."""
    calls, releases = record(mechanism, data, secret=SECRET, run=RUN)
    assert [release.step for release in releases] == list(range(len(data)))
    return {
        call.purpose: call.sensitivity / call.amount for call in calls if call.kind == "laplace"
    }


def test_contin_group_draws_as_printed():
    """2 Delta / eps_g, 4 Delta / eps_g, Delta / eps_p, with eps_g a fifth."""
    expected = {"threshold": 1_000, "test": 2_000, "publish": 125}

    assert scales(roomy(ContinGroupPublished, delay=5)) == expected
    pegasus = scales(roomy(PegasusPublished))
    assert pegasus.pop("publish") == expected.pop("publish")
    assert {name: scale / GRID for name, scale in pegasus.items()} == expected


def test_discontin_group_draws_as_printed():
    """2 (2w - 1) Delta / eps_g per group and 4 (2w - 1) Delta / eps_g per test."""
    assert scales(roomy(DiscontinGroupPublished, delay=5)) == {
        "threshold": 9_000, "test": 18_000, "publish": 125,
    }  # fmt: skip


def test_orders_draw_as_printed():
    """8 w Delta / eps_g and one rho of 4 Delta / eps_g; Delta / eps_p for unclipped buckets."""
    third = Fraction(400, 3)

    assert scales(roomy(CompOrderPublished, delay=5)) == {
        "rho": 1_600, "compare": 16_000, "publish": third,
    }  # fmt: skip
    assert scales(roomy(BucOrderPublished, delay=5, width=10)) == {"publish": third}


def test_truncation_draws_as_printed():
    """Lap(1 / eps_s) on scores of 1, half of eps_p each; then noise as wide as tau - lo."""
    drawn = scales(roomy(ContinGroupPublished, delay=5, noise="pp", truncate_every=2))

    assert drawn["truncate"] == Fraction(1 << 20) / Fraction(2, 5)
    tau = drawn["test"] / 20  # of the last batch, which did not choose: scale 4 tau / eps_g
    assert 0 < tau <= 100
    assert drawn["publish"] == tau / Fraction(4, 5)


@pytest.mark.parametrize(
    ("build", "options"), [(ContinGroupPublished, {"delay": 5}), (PegasusPublished, {})]
)
def test_the_ledger_refuses_what_overspends(build, options):
    """Their tests cost up to twice eps_g."""
    with pytest.raises(BudgetExceeded):
        dps.release(build(**RANGE, **options), DATA, secret=SECRET, run_id=RUN)


@pytest.mark.parametrize(
    ("build", "options"),
    [(DiscontinGroupPublished, {}), (CompOrderPublished, {}), (BucOrderPublished, {"width": 10})],
)
def test_the_ledger_has_room_for_what_is_only_wasteful(build, options):
    """Sound, with more noise than needed."""
    series = dps.release(build(**RANGE, delay=5, **options), DATA, secret=SECRET, run_id=RUN)

    assert series.values.shape == DATA.shape


def test_groups_without_noise():
    """Successive: a value that fails stands alone; anywhere: the first group that takes it."""
    block = np.array([5, 6, 50, 5, 51, 52])[:, None]
    none = np.zeros((15, 1), np.int64)

    successive = delayed_published._successive(block, none, none, 3.0)
    anywhere = delayed_published._anywhere(block, none, none, 3.0)

    assert successive[:, 0].tolist() == [0, 0, 1, 2, 3, 4]
    assert anywhere[:, 0].tolist() == [0, 0, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("noisy", "low", "high", "crossing", "expected"),
    [
        (5.0, -np.inf, np.inf, False, 5.0),  # between 2 and 8
        (9.0, -np.inf, np.inf, False, 5.0),  # above 8: the middle
        (9.0, -np.inf, np.inf, True, 9.0),  # the bounds do not cross
    ],
)
def test_alignment(noisy, low, high, crossing, expected):
    """A value outside its bounds becomes their middle."""
    published, greater = np.array([[8.0], [2.0]]), np.array([[True], [False]])

    aligned = delayed_published._aligned(np.array([noisy]), published, greater, low, high, crossing)

    assert aligned[0] == expected


def test_crossing_bounds_are_replaced_whatever_the_value():
    """The public code's reading: 8 should be below, 2 above."""
    published, greater = np.array([[8.0], [2.0]]), np.array([[False], [True]])

    aligned = delayed_published._aligned(np.array([1e6]), published, greater, 0.0, np.inf, True)

    assert aligned[0] == 5


def test_bucket_means_stay_in_their_buckets():
    """With a large epsilon the labels are right, and the mean is near the values."""
    buckets = BucOrderPublished(epsilon=200, lo=0, hi=100, delay=5, width=10)

    series = dps.release(buckets, DATA, secret=SECRET, run_id=RUN)

    edges = np.minimum(DATA // 10 * 10, 90)
    assert ((edges <= series.values) & (series.values <= edges + 10)).all()
