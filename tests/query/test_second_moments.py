"""Covariance, correlation and slopes: exact sums, what noise does to them, and their intervals."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

import dpstream as dps
from dpstream.audit.query_samplers import run_plan
from dpstream.errors import InvalidParameter
from dpstream.group_by.release_table import answer_columns
from dpstream.query.noise_plan import plan_query
from dpstream.query.second_moments import Correlation, Covariance, Slope

BOUNDS = ((-10, 50), (0, 10))
MADE = {
    "pop": Covariance("a", columns=("y", "x"), contribution_bounds_per_row=BOUNDS),
    "samp": Covariance("a", columns=("y", "x"), contribution_bounds_per_row=BOUNDS, sample=True),
    "corr": Correlation("a", columns=("y", "x"), contribution_bounds_per_row=BOUNDS),
    "slope": Slope("a", columns=("y", "x"), contribution_bounds_per_row=BOUNDS),
}
PURE = {"strategy": "latched", "max_groups_contributed": 1, "report_bias": False}


def truth(name, y, x):
    """What NumPy says of clamped values."""
    y, x = np.clip(y, *BOUNDS[0]), np.clip(x, *BOUNDS[1])
    both = np.cov(y, x, ddof=name == "samp")
    return {
        "pop": both[0, 1],
        "samp": both[0, 1],
        "corr": both[0, 1] / np.sqrt(both[0, 0] * both[1, 1]),
        "slope": both[0, 1] / both[1, 1],
    }[name]


def sums(made, y, x):
    """The exact sums, in grid steps."""
    return {each: int(each.on_grid(y, x).sum()) for each in made.measures(one_row=False)}


def answered(made, noisy, deviations=None):
    """Its columns."""
    return answer_columns([made], noisy, one_row=False, nonnegative=False, deviations=deviations)


def correlated(size, seed=1):
    """Pairs, some of them beyond the bounds."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 11, size)
    return 3 * x + rng.normal(0, 8, size), x


@pytest.mark.parametrize("name", MADE)
def test_without_noise_they_are_those_of_clamped_values(name):
    """To the grid: a thousand steps of each range."""
    y, x = correlated(5000)
    exact = {each: (np.array([n]), 0.0) for each, n in sums(MADE[name], y, x).items()}
    table = answered(MADE[name], exact, deviations=2.0)
    assert table["a"].to_pylist() == pytest.approx([truth(name, y, x)], rel=2e-3)
    assert table["a_stddev"].to_pylist() == [0.0]
    assert [table["a_low"][0], table["a_high"][0]] == pytest.approx(table["a"].to_pylist() * 2)


@pytest.mark.parametrize("name", MADE)
def test_a_pair_with_a_null_counts_nowhere(name):
    """Whichever of both it is."""
    y, x = correlated(50)
    none = np.full(20, np.nan)
    with_nulls = sums(MADE[name], np.append(y, [none, x[:20]]), np.append(x, [x[:20], none]))
    assert with_nulls == sums(MADE[name], y, x)


reals = st.floats(-1e12, 1e12) | st.just(float("nan"))


@given(reals, reals, st.integers(-40, 40), st.integers(1, 90), st.integers(1, 9))
def test_no_row_adds_more_than_the_sensitivity_says(y, x, lo, wide, narrow):
    """Whatever bounds and values."""
    bounds = ((lo, lo + wide), (f"{lo}.5", lo + narrow))
    made = Correlation("a", columns=("y", "x"), contribution_bounds_per_row=bounds)
    for each in made.measures(one_row=True):
        assert abs(each.on_grid(np.array([y]), np.array([x]))[0]) <= each.largest
        ends = [np.array([float(n)]) for n in (*bounds[0], *bounds[1])]
        at_ends = [abs(each.on_grid(a, b)[0]) for a in ends[:2] for b in ends[2:]]
        assert each.largest - 1 <= max(at_ends) <= each.largest


def noisy_answers(name, size, noise, times=4000):
    """Columns of many groups with the same pairs, under noise of `noise` largest rows."""
    y, x = correlated(size)
    rng = np.random.default_rng(5)
    noisy = {}
    for each, exact in sums(MADE[name], y, x).items():
        stddev = noise * float(each.largest)
        noisy[each] = (np.rint(exact + rng.normal(0, stddev, times)).astype(np.int64), stddev)
    table = answered(MADE[name], noisy, deviations=1.959964)
    return truth(name, y, x), {end: np.array(column, float) for end, column in table.items()}


@pytest.mark.parametrize("name", MADE)
def test_errors_are_as_large_as_they_say(name):
    """To first order, over 4,000 draws: within 8%, seven standard errors of a deviation."""
    true, found = noisy_answers(name, 20_000, 20.0)
    assert found["a"].mean() == pytest.approx(true, abs=found["a_stddev"].mean() / 5)
    assert found["a"].std() == pytest.approx(found["a_stddev"].mean(), rel=0.08)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("size", [60, 400, 2000, 20_000])
def test_intervals_hold_the_truth(name, size):
    """93% at least where 95 are asked for, also where noise is as large as the group."""
    true, found = noisy_answers(name, size, 20.0)
    held = ((found["a_low"] <= true) & (true <= found["a_high"])).mean()
    assert held >= 0.93
    assert size < 20_000 or held <= 0.97


@pytest.mark.parametrize("name", ["corr", "slope"])
def test_nothing_is_said_where_noise_may_have_made_a_variance(name):
    """A correlation of 0 with all of [-1, 1]; a slope that is NULL and may be anything."""
    measures = MADE[name].measures(one_row=True)
    flat = {each: (np.zeros(3, np.int64), 2.0 * float(each.largest)) for each in measures}
    table = answered(MADE[name], flat, deviations=2.0)
    shown = [table[f"a{end}"] for end in ("", "_stddev", "_low", "_high")]
    if name == "corr":
        assert [set(np.array(each)) for each in shown] == [{0.0}, {1.0}, {-1.0}, {1.0}]
        return
    assert [each.null_count for each in shown[:2]] == [3, 3]
    assert [set(each) for each in shown[2:]] == [{-np.inf}, {np.inf}]


@pytest.mark.parametrize("name", MADE)
def test_a_query_without_delta_encloses_them(name):
    """Laplace noise: every sum within its reach, in 300 groups at 95%, false alarm 1e-6."""
    y, x = correlated(300 * 400)
    groups = np.arange(len(y)) % 300
    rows = pa.table({"user": np.arange(len(y)), "k": groups, "y": y, "x": x})
    asked = dps.Query(
        privacy_unit_column="user",
        keys=["k"],
        public_groups=list(range(300)),
        aggregates=[MADE[name]],
        epsilon=20,
        confidence=0.95,
        **PURE,
    )
    ((_, release),) = run_plan(plan_query(asked), rows)
    shown = release.table
    low, high, own = (np.array(shown[f"a{end}"]) for end in ("_low", "_high", ""))
    place = np.array(shown["k"])
    true = np.array([truth(name, y[groups == k], x[groups == k]) for k in place])
    held = ((low - 1e-2 <= true) & (true <= high + 1e-2)).sum()  # the grid
    assert binom.cdf(held, 300, 0.95) > 1e-6
    assert ((low <= own) & (own <= high)).all()
    assert np.median(high - low) < 20 * np.std(own)


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"columns": "y"}, r"columns=\(y, x\)"),
        ({"columns": ("y",)}, r"columns=\(y, x\)"),
        ({"columns": ("y", "x")}, r"\(\(lo, hi\), \(lo, hi\)\)"),
        ({"columns": ("y", "x"), "contribution_bounds_per_row": (0, 1)}, r"\(lo, hi\)\), those of"),
        ({"columns": ("y", "x"), "contribution_bounds_per_row": ((0, 1), (3, 2))}, "lo < hi"),
        (
            {"columns": ("y", "x"), "contribution_bounds_per_row": ((0, 1), (0, float("inf")))},
            "hi must be",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(facts, word):
    """With what to change."""
    with pytest.raises(InvalidParameter, match=word):
        Covariance("a", **facts)


def test_rows_that_hold_no_numbers_are_set_aside():
    """A text, an infinity, a written NaN, in either column: the row is nowhere, and it is said."""
    good = pa.table({"user": [f"{n}" for n in range(300)], "y": ["4"] * 300, "x": ["2"] * 300})
    bad = pa.table(
        {"user": list("abcd"), "y": ["none", "inf", "1", "1"], "x": ["1", "1", "?", "NaN"]}
    )
    asked = dps.Query(privacy_unit_column="user", epsilon=1, aggregates=[MADE["pop"]], **PURE)
    run = dps.run(asked, source=pa.concat_tables([good, bad]), ledger=dps.Ledger()).finish()
    assert run.operator.rejected_rows == 4
    assert sum("number" in str(each.reason) for each in run.operator.latest) == 4
