"""Grids, clamps, middles, and how noisy sums become answers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.errors import InvalidParameter
from dpstream.group_by.bias import Bias, KeptShare, kept_share, made_up_powers
from dpstream.group_by.release_table import answer_columns
from dpstream.query.aggregates import (
    Avg,
    Count,
    CountUnits,
    Measure,
    Stddev,
    Sum,
    Variance,
    all_measures,
)

rationals = st.fractions(-1000, 1000, max_denominator=60)


@given(rationals, rationals, st.none() | st.integers(1, 50), st.data())
def test_values_are_clamped_and_rounded_to_the_nearest_grid_point(lo, hi, parts, data):
    """Never further than the sensitivity says, within half a step (and rounding) of the value."""
    lo, hi = sorted((lo, hi))
    if lo == hi:
        hi = lo + 1
    quantum = None
    if parts is not None:
        quantum = Fraction(1, lo.denominator * hi.denominator * parts)
    for kind in (Sum, Avg):
        bounds = {"contribution_bounds_per_row": (lo, hi), "quantum": quantum}
        made = kind("s", column="x", **bounds)
        measure = made.measures(True)[0]
        values = data.draw(st.lists(st.floats(-2000, 2000), min_size=1, max_size=20))
        values += [float(lo), float(hi), float(measure.middle)]
        found = measure.on_grid(np.array(values)).tolist()
        for value, steps in zip(values, found, strict=True):
            clamped = min(max(Fraction(value), lo), hi)
            assert abs(steps) <= measure.largest
            assert abs(steps - (clamped - measure.middle) / made.quantum) <= Fraction(501, 1000)
        assert found[-1] == 0 or kind is Sum


def test_missing_values_add_nothing_and_infinite_ones_stay_in_range():
    """NULL is NaN by now."""
    measure = Sum("s", column="x", contribution_bounds_per_row=(2, 10), quantum=1).measures(True)[0]
    values = np.array([np.nan, np.inf, -np.inf, 1e300, 2.5, 3.5])
    assert measure.on_grid(values).tolist() == [0, 10, 2, 10, 2, 4]


@pytest.mark.parametrize(
    ("lo", "hi", "quantum"),
    [
        (0, 600, "0.1"),
        (0, 1, "0.001"),
        (0, 10_000, "10"),
        (0, 9_999, "1"),
        (-5, 5, "0.001"),
        (0, 86_400, "10"),
        ("0.25", "0.75", "0.0001"),
        (-2_000_000, 10, "10"),
    ],
)
def test_the_default_grid_is_a_power_of_ten(lo, hi, quantum):
    """With a thousand steps or more, and lo and hi on it."""
    made = Sum("s", column="x", contribution_bounds_per_row=(lo, hi))
    steps = max(abs(made.lo), abs(made.hi)) / made.quantum
    assert steps >= 1000
    assert (made.lo / made.quantum).denominator == (made.hi / made.quantum).denominator == 1
    assert not made.chosen
    assert Fraction(quantum) / 10 <= made.quantum <= Fraction(quantum)


@given(rationals, rationals)
def test_every_range_has_a_default_grid(lo, hi):
    """Thirds and sevenths too: between a thousand steps and two billion."""
    lo, hi = sorted((lo, hi))
    if lo == hi:
        hi = lo + Fraction(1, 7)
    made = Sum("s", column="x", contribution_bounds_per_row=(lo, hi))
    steps = max(abs(lo), abs(hi)) / made.quantum
    assert 1000 <= steps <= 2**31
    assert (made.lo / made.quantum).denominator == (made.hi / made.quantum).denominator == 1


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"contribution_bounds_per_row": 5}, r"contribution_bounds_per_row=\(lo, hi\)"),
        ({"contribution_bounds_per_row": (5, 5)}, "lo < hi"),
        ({"contribution_bounds_per_row": (6, 5)}, "lo < hi"),
        ({"contribution_bounds_per_row": (0, 5), "quantum": 2}, "multiples"),
        ({"contribution_bounds_per_row": ("0.5", 5), "quantum": 1}, "multiples"),
        ({"contribution_bounds_per_row": (0, 5), "quantum": "1e-10"}, "coarser"),
        ({"contribution_bounds_per_row": (0, 5), "quantum": 0}, "quantum"),
    ],
)
def test_ranges_that_cannot_be_used_are_refused(facts, word):
    """With what to change."""
    with pytest.raises(InvalidParameter, match=word):
        Sum("s", column="x", **facts)


def test_the_middle_of_an_average_lies_on_its_grid():
    """Half the range costs half the noise of a sum."""
    made = Avg("m", column="x", contribution_bounds_per_row=(10, 21), quantum=1)
    assert made.middle == 15
    assert made.measures(True)[0].largest == 6
    for lo, largest in ((10, 21), (-30, 30)):
        of_sum = Sum("s", column="x", contribution_bounds_per_row=(lo, 21), quantum=1)
        assert of_sum.measures(True)[0].largest == largest


def test_each_column_is_measured_once():
    """Units first where keys are unknown; with one row per group, rows are units."""
    asked = (
        Count("n"),
        CountUnits("u"),
        Sum("s", column="x", contribution_bounds_per_row=(0, 1)),
        Avg("m", column="x", contribution_bounds_per_row=(0, 1)),
    )
    kinds = [m.kind for m in all_measures(asked, one_row=True, finder=Measure(kind="units"))]
    assert kinds == ["units", "value"]  # sum and average share their sums about the middle
    kinds = [m.kind for m in all_measures(asked, one_row=False, finder=Measure(kind="units"))]
    assert kinds == ["units", "rows", "value"]
    kinds = [m.kind for m in all_measures(asked[2:3], one_row=False, finder=None)]
    assert kinds == ["value"]
    kinds = [m.kind for m in all_measures(asked[2:3], one_row=False, finder=Measure(kind="units"))]
    assert kinds == ["units", "value"]
    zero = (
        Sum("a", column="x", contribution_bounds_per_row=(-1, 1)),
        Avg("b", column="x", contribution_bounds_per_row=(-1, 1)),
    )
    assert (
        len(all_measures(zero, one_row=True, finder=Measure(kind="units"))) == 2
    )  # one about 0 serves both


def test_names_of_measures_differ():
    """They are noise addresses: a shared one would be shared noise."""
    measures = [
        Measure(kind="units"),
        Measure(kind="rows"),
        Measure(kind="value", column="units"),
        Measure(kind="value", column="x"),
        Measure(kind="value", column="x", lo=Fraction(-1)),
        Measure(kind="value", column="x", middle=Fraction(1, 2)),
        Measure(kind="value", column="x", quantum=Fraction(1, 2)),
        Measure(kind="value", column="1|x"),
        Measure(kind="value", column="x", hi=Fraction(2)),
        Measure(kind="value", column="x", power=2),
        Measure(kind="round"),
        Measure(kind="offered"),
        Measure(kind="kept"),
    ]
    assert len({measure.name for measure in measures}) == len(measures)


def answered(aggregate, noisy, *, one_row=False, nonnegative=False):
    given_ = dict(zip(aggregate.measures(one_row), noisy, strict=True))
    table = answer_columns([aggregate], given_, one_row=one_row, nonnegative=nonnegative)
    return table[aggregate.name].tolist(), table[f"{aggregate.name}_stddev"].tolist()


def test_counts_and_sums_are_scaled_from_the_grid():
    """Deviations too; clamped at zero only where asked and where no value is below."""
    steps = np.array([-4, 0, 7])
    assert answered(Count("n"), [(steps, 1.5)]) == ([-4, 0, 7], [1.5] * 3)
    assert answered(Count("n"), [(steps, 1.5)], nonnegative=True)[0] == [0, 0, 7]
    quarter = Sum("s", column="x", contribution_bounds_per_row=(0, 1), quantum="0.25")
    assert answered(quarter, [(steps, 2.0)]) == ([-1.0, 0.0, 1.75], [0.5] * 3)
    assert answered(quarter, [(steps, 2.0)], nonnegative=True)[0] == [0.0, 0.0, 1.75]
    signed = Sum("s", column="x", contribution_bounds_per_row=(-1, 1), quantum="0.25")
    assert answered(signed, [(steps, 2.0)], nonnegative=True)[0] == [-1.0, 0.0, 1.75]


def test_counts_are_whole_numbers():
    """A count with decimals would be odd to read."""
    noisy = {Measure(kind="units"): (np.array([3]), 1.0)}
    table = answer_columns([Count("n")], noisy, one_row=True, nonnegative=False)
    assert table["n"].dtype == np.int64


def test_averages_stay_in_range_with_a_deviation_to_first_order():
    """Middle plus sum over rows; the error of a quotient, at most the range."""
    made = Avg("m", column="x", contribution_bounds_per_row=(0, 10), quantum=1)
    sums, rows = np.array([20, -200, 5, 3]), np.array([10, 20, 0, -7])
    values, spread = answered(made, [(sums, 4.0), (rows, 2.0)])
    assert values == [7.0, 0.0, 10.0, 8.0]
    shift = np.array([2.0, -10.0, 5.0, 3.0])
    expected = np.sqrt(4.0**2 + (shift * 2.0) ** 2) / np.array([10, 20, 1, 1])
    assert spread == pytest.approx(np.minimum(expected, 10.0))


@given(st.lists(st.integers(-5, 25) | st.none(), min_size=1, max_size=40))
def test_the_variance_without_noise_is_that_of_clamped_values(values):
    """Squares about the middle, less the square of the mean; NULL counts as the middle."""
    made = Variance("v", column="x", contribution_bounds_per_row=(0, 20), quantum=1)
    read = np.array([np.nan if value is None else value for value in values], float)
    squares, sums, _ = made.measures(one_row=False)
    exact = [squares.on_grid(read).sum(), sums.on_grid(read).sum(), len(values)]
    noisy = [(np.array([number]), 0.0) for number in exact]
    clamped = np.clip(np.where(np.isnan(read), 10, read), 0, 20)

    found, spread = answered(made, noisy)
    assert found == pytest.approx([clamped.var()], abs=5)  # squares lie on a grid of 10
    assert spread == [0.0]
    root, _ = answered(
        Stddev("d", column="x", contribution_bounds_per_row=(0, 20), quantum=1), noisy
    )
    assert root == pytest.approx(np.sqrt(found))


@given(st.floats(-1e9, 1e9) | st.just(float("nan")), rationals, st.integers(1, 60))
def test_squares_stay_within_their_largest_step(value, lo, size):
    """The sensitivity counts on it."""
    made = Variance("v", column="x", contribution_bounds_per_row=(lo, lo + size))
    assert abs(made.squares.on_grid(np.array([value]))[0]) <= made.squares.largest


def test_errors_of_a_variance_are_those_of_its_parts_to_first_order():
    """Against noise drawn many times."""
    made = Variance("v", column="x", contribution_bounds_per_row=(0, 10), quantum="0.01")
    squares, sums, _ = made.measures(one_row=False)
    values = np.random.default_rng(1).uniform(0, 10, 5000)
    exact = np.array([squares.on_grid(values).sum(), sums.on_grid(values).sum(), 5000])
    deviations = np.array([3000.0, 2000.0, 20.0])
    drawn = np.random.default_rng(2).normal(size=(3, 20_000)) * deviations[:, None]
    noisy = [
        (np.rint(number + noise).astype(np.int64), float(deviation))
        for number, noise, deviation in zip(exact, drawn, deviations, strict=True)
    ]
    found, declared = answered(made, noisy)

    assert np.mean(found) == pytest.approx(values.var(), rel=0.01)
    assert np.std(found) == pytest.approx(np.mean(declared), rel=0.05)


def test_the_interval_of_a_standard_deviation_holds_it_where_values_are_alike():
    """20,000 draws of noise: 95% have a standard error of 0.15%. The deviation to both sides of it
    would hold too few."""
    made = Stddev("d", column="x", contribution_bounds_per_row=(0, 10), quantum="0.01")
    squares, sums, _ = made.measures(one_row=False)
    values = np.random.default_rng(1).normal(5, 0.05, 5000)
    exact = [squares.on_grid(values).sum(), sums.on_grid(values).sum(), 5000]
    drawn = np.random.default_rng(2).normal(size=(3, 20_000))
    noisy = {
        measure: (np.rint(number + deviation * noise).astype(np.int64), deviation)
        for measure, number, deviation, noise in zip(
            made.measures(one_row=False), exact, [20_000.0, 4000.0, 20.0], drawn, strict=True
        )
    }
    asked = {"one_row": False, "nonnegative": False, "deviations": 1.96}
    table, truth = answer_columns([made], noisy, **asked), values.std()
    around = np.abs(table["d"] - truth) <= 1.96 * table["d_stddev"]

    assert np.mean((table["d_low"] <= truth) & (truth <= table["d_high"])) > 0.94
    assert np.mean(around) < 0.9


def test_intervals_are_as_wide_as_asked_and_cut_to_what_is_possible():
    """A count is not below 0; a mean lies between its clamps."""
    reading = {"one_row": False, "nonnegative": False, "deviations": 2.0}
    count, mean = Count("n"), Avg("m", column="x", contribution_bounds_per_row=(0, 10), quantum=1)
    table = answer_columns([count], {Measure(kind="rows"): (np.array([100, 3]), 5.0)}, **reading)
    assert table["n_low"].tolist() == [90.0, 0.0]
    assert table["n_high"].tolist() == [110.0, 13.0]
    given_ = dict(
        zip(mean.measures(False), [(np.array([4]), 9.0), (np.array([1]), 1.0)], strict=True)
    )
    table = answer_columns([mean], given_, **reading)
    assert (table["m_low"][0], table["m_high"][0]) == (0.0, 10.0)


def test_dropped_rows_are_made_up_for_in_counts_and_sums_alone():
    """Half of the rows were kept, so counts double, and so do their deviations."""
    share = kept_share((10_000, 200.0), (10_000, 200.0), 2.0)
    bias = Bias(rows=share, groups=share, values={}, beyond=(0.0, 1.0), is_least=False)
    assert (share.share, share.stddev) == pytest.approx((0.5, 0.01 / 2**0.5))
    reading = {"one_row": False, "nonnegative": False, "bias": bias, "debias": "global"}
    count = answer_columns([Count("n")], {Measure(kind="rows"): (np.array([100]), 5.0)}, **reading)
    units = answer_columns(
        [CountUnits("u")], {Measure(kind="units"): (np.array([100]), 5.0)}, **reading
    )
    assert count["n"].tolist() == [200.0]
    assert count["n_stddev"] == pytest.approx([np.hypot(5.0, 200 * 0.01 / 2**0.5) / 0.5])
    assert units["u"].tolist() == [100]
    assert kept_share((5, 10.0), (10, 10.0), 2.0).share is None  # drowned in noise
    assert kept_share((30, 10.0), (40, 10.0), 2.0).divisor is None  # known, and not well enough


def test_groups_that_were_left_out_are_made_up_for_by_how_large_a_key_is():
    """By half at the threshold of 100, in full from 400 on; counts are whole numbers, and the
    deviations are those of many draws, but for rounding (4,000 of them, a tenth: above 8 sigma)."""
    share = kept_share((10_000, 200.0), (10_000, 200.0), 2.0)
    bias = Bias(rows=share, groups=share, values={}, beyond=(0.0, 1.0), is_least=False)
    units = np.repeat([100, 200, 900], 4000) + np.rint(
        np.random.default_rng(7).normal(0, 5, 12_000)
    )
    reading = {"one_row": False, "nonnegative": False, "bias": bias, "debias": "groups"}
    powers = made_up_powers(units, 100.0)
    noisy = {Measure(kind="rows"): (units.astype(np.int64), 5.0)}
    told = answer_columns([Count("n")], noisy, powers=powers, **reading)
    small, middle, large = told["n"].reshape(3, 4000)

    assert told["n"].dtype == np.int64
    assert [small.mean(), middle.mean(), large.mean()] == pytest.approx(
        [100 * 2**0.5, 200 * 2**0.75, 1800], rel=0.02
    )
    drawn = [each.std() for each in (middle, large)]  # the share itself was drawn once
    said = [
        np.sqrt(np.mean(told["n_stddev"][at] ** 2 - (told["n"][at] * power * 0.02 / 2**0.5) ** 2))
        for at, power in ((slice(4000, 8000), 0.75), (slice(8000, None), 1.0))
    ]
    assert drawn == pytest.approx(said, rel=0.1)


def test_the_interval_of_a_share_is_fiellers():
    """Its ends are the shares at which (1 - s) kept - s dropped is so many deviations from 0."""
    share = kept_share((300.0, 40.0), (900.0, 25.0), 1.5)

    assert 0.7 < share.low < share.share == 0.75 < share.high < 0.81
    for end in (share.low, share.high):
        away = (1 - end) * 900 - end * 300
        assert abs(away) == pytest.approx(1.5 * np.hypot((1 - end) * 25, end * 40))
    assert kept_share((-60.0, 40.0), (900.0, 25.0), 1.5).high == 1.0
    assert kept_share((-60.0, 40.0), (900.0, 25.0), 1.5).low == pytest.approx(0.9375, abs=1e-2)


def test_fiellers_interval_holds_the_share_as_often_as_it_says():
    """False alarm below 1e-6: 5 deviations of 4,000 trials. A third too narrow is seen."""
    rng, truth = np.random.default_rng(5), 800 / 1000

    def covered(deviations):
        draws = zip(rng.normal(200, 30, 4000), rng.normal(800, 60, 4000), strict=True)
        shares = [kept_share((d, 30.0), (k, 60.0), deviations) for d, k in draws]
        return np.mean([share.low <= truth <= share.high for share in shares])

    assert covered(1.96) == pytest.approx(0.95, abs=5 * np.sqrt(0.95 * 0.05 / 4000))
    assert covered(1.96 * 2 / 3) < 0.9


def test_how_large_a_figure_of_all_rows_may_be():
    """By the share if a group loses at most three times the mean, by all that was lost if not."""
    sum_ = Sum("s", column="x", contribution_bounds_per_row=(0, 10), quantum=1)
    signed = Sum("d", column="x", contribution_bounds_per_row=(-5, 4), quantum=1)
    mean = Avg("m", column="x", contribution_bounds_per_row=(0, 10), quantum=1)
    high = np.array([100.0, 5000.0])

    def lost(low, dropped, *, is_least=False):
        facts = {"share": low, "stddev": 0.0, "high": 1.0, "dropped": 0.0, "dropped_stddev": 1.0}
        return KeptShare(low=low, dropped_high=dropped, **facts).lost(is_least=is_least)

    assert Count("n").high_all(high, lost(0.9, 50.0)) == pytest.approx([100 / 0.7, 5050])
    assert sum_.high_all(high, lost(0.9, 50.0)) == pytest.approx([100 / 0.7, 5050])
    assert sum_.high_all(high, lost(0.5, 50.0)) == pytest.approx([150, 5050])  # of some all is lost
    assert signed.high_all(high, lost(0.9, 50.0)) == pytest.approx([300, 5200])
    beyond = {"is_least": True}  # some units lost more than counts: only the assumption is left
    assert sum_.high_all(high, lost(0.9, 50.0, **beyond)) == pytest.approx(high / 0.7)
    assert np.isinf(sum_.high_all(high, lost(0.5, 50.0, **beyond))).all()
    assert np.isinf(signed.high_all(high, lost(0.9, 50.0, **beyond))).all()
    assert mean.high_all(np.array([6.0]), lost(0.9, 50.0)) == pytest.approx([0.7 * 6 + 0.3 * 10])
