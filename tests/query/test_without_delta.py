"""Queries without delta: what is refused, what they cost, and the noise that they get."""

import json
import math
from contextlib import closing
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import binom

import dpstream as dps
from dpstream.audit.query_samplers import run_plan
from dpstream.errors import BudgetExceeded, InvalidParameter, LedgerError
from dpstream.privacy.accounting.curves import pure_mu_above
from dpstream.query.noise_plan import laplace_reach, plan_query


def query(**facts):
    common = {
        "privacy_unit_column": "user",
        "keys": ("key",),
        "public_groups": [0, 1, 2],
        "epsilon": 1,
        "max_groups_contributed": 2,
        "report_bias": False,
    }
    return dps.Query(**common | facts)


MEDIAN = dps.Quantile("q", column="x", q=0.5, contribution_bounds_per_row=(0, 8))
DAY = {"time_column": "ts", "start": "1970-01-01", "end": "1970-01-02"}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"public_groups": None}, "keys that are not public are found only with a delta"),
        ({**DAY, "every": "1 hour"}, "published again and again take Gaussian noise"),
        ({"strategy": "sqlp"}, "strategy 'sqlp' takes Gaussian noise"),
        ({"grouping_sets": [["key"], []]}, "several sets of keys"),
        ({"aggregates": [MEDIAN], "confidence": 0.9}, "'q' has no interval without a delta"),
        (
            {"confidence": 0.9, "debias": "global", "report_bias": True},
            "no interval of figures that debias",
        ),
    ],
)
def test_what_needs_a_delta_says_so(facts, words):
    with pytest.raises(InvalidParameter, match=words):
        query(**facts)


def test_sql_asks_for_delta_only_where_it_is_needed():
    text = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, privacy_unit_column = user,
        max_groups_contributed = 2 {}) key, COUNT(*) AS n FROM log GROUP BY key"""
    assert dps.sql(text.format(", public_groups = (1, 2)")).pure
    with pytest.raises(InvalidParameter, match="delta is missing"):
        dps.sql(text.format(""))


def test_it_is_charged_epsilon_or_what_that_is_in_mu_squared():
    """Its own book counts epsilon; one with a delta what pure noise costs there, column by column;
    a query with a delta is refused by a book of epsilon."""
    plan = plan_query(query(aggregates=[dps.Count("n"), MEDIAN]))
    own, shared = plan.terms(), plan.query.promise(epsilon=4, delta=1e-9)
    assert (own.measure, own.total, own.delta_slack, own.rounding_slack) == ("epsilon", 1, 0, 0)
    assert plan.cost(own)["amount"] == 1
    assert sum(plan.shares) <= 1
    as_mu = plan.cost(shared)["amount"]
    assert as_mu == plan.terms(shared).total
    assert pure_mu_above(Fraction(1, 2)) ** 2 < as_mu < pure_mu_above(1) ** 2
    with pytest.raises(LedgerError, match="has a delta, and its book counts epsilon alone"):
        plan_query(query(delta=1e-6)).cost(own)
    weekly = plan.query.promise(epsilon=4, delta=1e-9)
    weekly = type(weekly)(**{**vars(weekly), "period": "7 days"})
    with pytest.raises(LedgerError, match="no delta and periods of forever"):
        plan.cost(weekly)


def test_a_book_with_a_delta_that_is_too_small_says_what_it_would_take(tmp_path):
    """Pure noise costs more there than its epsilon says, which alone would seem to fit."""
    asked, rows = query(epsilon=2, aggregates=[dps.Count("n")]), pa.table({"user": [1], "x": [1.0]})
    with closing(dps.Ledger(tmp_path / "book")) as ledger:
        ledger.open("d", asked.promise(epsilon=6, delta=1e-5))
        words = r"epsilon = 2, delta = 0, which is [1-9]\d\d% of .*mu.* give it a delta"
        with pytest.raises(BudgetExceeded, match=words):
            dps.run(asked, source=rows, ledger=ledger, dataset="d", anyway=True).finish()


def test_parts_of_a_pure_column_cost_no_more_than_the_whole_in_mu_squared():
    """mu(e)^2 / e does not fall on a grid from 2^-20 to 2^9, while mu / e does; so what a unit uses
    up window by window, in any parts, is covered by one charge."""
    grid = [Fraction(2) ** Fraction(n, 4) for n in range(-80, 37)]
    mus = [float(pure_mu_above(e)) for e in grid]
    rates = [mu**2 / e for mu, e in zip(mus, grid, strict=True)]
    assert all(b > a * (1 - 1e-7) for a, b in pairwise(rates))
    assert rates[-1] > 1e5 * rates[0]
    assert mus[-1] / grid[-1] < mus[0] / grid[0] / 5
    for share in (0.5, 0.1, 0.001):
        for whole in (0.01, 1.0, 20.0):
            parts = [whole * share, whole * (1 - share)]
            of_parts = sum(float(pure_mu_above(e)) ** 2 for e in parts)
            assert of_parts <= float(pure_mu_above(whole)) ** 2 * (1 + 1e-9)


def test_runs_share_a_book_with_others(tmp_path):
    """Two runs in one book of epsilon; the third does not fit, and reads nothing."""
    table = pa.table({"user": range(300), "key": [n % 3 for n in range(300)]})
    for number in range(3):
        facts = {"state": tmp_path / str(number), "ledger": tmp_path / "ledger", "dataset": "log"}
        asked = query(name=f"q{number}", epsilon=Fraction(1, 2) if number else 1)
        if number == 0:
            (release,) = dps.run(asked, source=table, **facts)
            assert np.abs(np.array(release["count"]) - 100).max() < 60
            assert (np.array(release["count_stddev"]) == release["count_stddev"][0].as_py()).all()
        else:
            with pytest.raises(dps.errors.BudgetExceeded, match="only 0 is left"):
                dps.run(asked, source=table, **facts)
            assert not (tmp_path / str(number)).exists()


def test_noise_is_laplace_of_the_declared_deviation():
    """20,000 groups: deviation and mean absolute value of Laplace, false alarm 2e-8; 20% more or
    less is seen, and so is a normal's mean."""
    groups = 20_000
    aggregates = [
        dps.Count("n"),
        dps.Sum("s", column="x", contribution_bounds_per_row=(0, 4), quantum=1),
    ]
    asked = query(public_groups=range(groups), aggregates=aggregates, max_rows_per_group=2)
    table = pa.table({"user": range(groups), "key": range(groups), "x": [3] * groups})
    ((_, published),) = run_plan(plan_query(asked), table)
    # four rows of a unit, half of epsilon each: values up to 2 about the middle
    for name, scale in (("n", 4 * 2), ("s", None)):
        noise = published.table[name].to_numpy() - (1 if name == "n" else 3)
        told = published.table[f"{name}_stddev"][0].as_py()
        if scale:
            assert told == pytest.approx(math.sqrt(2) * scale, rel=0.01)
        # the variance of a sample of Laplace noise has 5 times the spread of a normal's / 2
        error = 5.65 * math.sqrt(5 / groups)
        assert abs((noise**2).mean() / told**2 - 1) < error
        assert abs((noise**2).mean() / (1.2 * told) ** 2 - 1) > error
        if scale:
            absolute = np.abs(noise).mean() / told
            assert absolute == pytest.approx(1 / math.sqrt(2), abs=0.03)
            assert absolute < math.sqrt(2 / math.pi) - 0.03


ABOUT = {"column": "x", "contribution_bounds_per_row": (0, 4), "quantum": 1}
KINDS = [
    [dps.Count("a")],
    [dps.Sum("a", **ABOUT)],
    [dps.Avg("a", **ABOUT)],
    [dps.Sum("a", **ABOUT), dps.Count("n")],
    [dps.Variance("a", **ABOUT)],
    [dps.Stddev("a", **ABOUT)],
    [dps.CountDistinct("a", column="x", max_values_per_group=1)],
]


@pytest.mark.parametrize("epsilon", [Fraction(1, 2), 1, Fraction(5, 2), 8])
@pytest.mark.parametrize(
    "aggregates", KINDS, ids=lambda kind: f"{type(kind[0]).__name__}{len(kind)}"
)
def test_intervals_hold_the_truth(aggregates, epsilon):
    """4,000 groups of two rows, 95%: at least so many hold it, false alarm 1e-6; of a count exactly
    as many as discrete Laplace noise leaves there, and 1.96 deviations, or as for continuous
    noise, hold too few at epsilon 2.5."""
    groups = 4000
    asked = query(
        aggregates=aggregates,
        public_groups=range(groups),
        epsilon=epsilon,
        max_groups_contributed=1,
        confidence=0.95,
    )
    x = np.tile([1, 4], groups)
    table = pa.table({"user": range(2 * groups), "key": np.repeat(range(groups), 2), "x": x})
    ((_, published),) = run_plan(plan_query(asked), table)
    truths = {"Count": 2, "Sum": 5, "Avg": 2.5, "Variance": 2.25, "Stddev": 1.5, "CountDistinct": 2}
    truth = truths[type(aggregates[0]).__name__]
    low, high, found, told = (
        published.table[f"a{end}"].to_numpy() for end in ("_low", "_high", "", "_stddev")
    )
    held = int(((low <= truth + 1e-9) & (truth - 1e-9 <= high)).sum())
    assert binom.cdf(held, groups, 0.95) > 1e-6
    assert (low <= found.clip(0) + 1e-9).all()
    assert (found <= high + 1e-9)[found >= 0].all()
    if isinstance(aggregates[0], dps.Count) and len(aggregates) == 1:
        (scale,) = plan_query(asked).window(1).scales
        reach = laplace_reach(scale, 0.05)
        ratio = math.exp(-1 / scale)
        passed = 2 * ratio ** (reach + 1) / (1 + ratio)
        assert passed <= 0.05
        assert 1e-6 < binom.cdf(held, groups, 1 - passed) < 1 - 1e-6 or passed < 1e-3
        if epsilon == Fraction(5, 2) and type(aggregates[0]) is dps.Count:
            for width in (1.96, math.log(20) / math.sqrt(2)):
                narrow = (np.abs(found - truth) <= width * told).sum()
                assert binom.cdf(narrow, groups, 0.95) < 1e-6


def test_the_interval_of_a_kept_share_holds_it():
    """150 windows of 20 kept and 20 dropped rows: 95% at least hold one half."""
    days = 150
    asked = query(
        public_groups=None,
        keys=(),
        report_bias=True,
        max_groups_contributed=1,
        max_rows_per_group=1,
        max_dropped_rows=1,
        epsilon=8,
        time_column="ts",
        time_unit="s",
        start="1970-01-01",
        end="1970-05-31",
        window=dps.Tumble("1 day"),
        privacy_unit_period="1 day",
    )
    day = np.repeat(np.arange(days), 40)
    user = np.tile(np.repeat(np.arange(20), 2), days)
    table = pa.table({"user": user, "ts": day * 86_400 + 60})
    held = []
    for _, published in run_plan(plan_query(asked), table):
        told = json.loads(published.table.schema.metadata[b"dpstream"])["bias"]
        held.append(told["low"] <= 0.5 <= told["high"])
    assert len(held) == days
    assert binom.cdf(sum(held), days, 0.95) > 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_a_unit_moves_columns_by_no_more_than_is_charged(seed):
    """All that a unit's rows change, added up over groups, over each column's scale: at most its
    epsilon, and in all at most the query's."""
    rng = np.random.default_rng(seed)
    aggregates = [
        dps.Count("n"),
        dps.CountUnits("u"),
        dps.Sum("s", column="x", contribution_bounds_per_row=(-1, 4), quantum=1),
        dps.Histogram("h", column="x", edges=[-1, 1, 2, 4]),
    ]
    asked = query(
        aggregates=aggregates, max_rows_per_group=3, max_rows_contributed=int(rng.integers(1, 7))
    )
    plan = plan_query(asked)
    scales = plan.window(1).scales
    bounds = plan.query.bounds
    rows = [(group, rng.choice([-1, 4, 2])) for group in range(2) for _ in range(3)]
    rows = [rows[n] for n in rng.permutation(6)[: bounds.rows]]
    spent = 0.0
    for column, scale in zip(plan.columns, scales, strict=True):
        moved = len(rows)
        if column.kind == "units":
            moved = len({group for group, _ in rows})
        elif column.kind == "value":
            values = np.array([float(value) for _, value in rows])
            groups = np.array([group for group, _ in rows])
            steps = column.on_grid(values)
            moved = sum(abs(int(steps[groups == group].sum())) for group in range(2))
        spent += moved / float(scale)
    assert spent <= float(plan.query.epsilon) * (1 + 1e-9)
