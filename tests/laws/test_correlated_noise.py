"""Noise that public groups share: what a unit costs, what is drawn, and what is refused."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.audit.controls.broken_engine import SharedByAllGroups
from dpstream.audit.query_samplers import run_plan
from dpstream.errors import InvalidParameter, LedgerError
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.sensitivity import correlated_noise
from dpstream.privacy.state import MemoryWindowKeys
from dpstream.query.aggregates import Avg, Count, CountUnits, Sum
from dpstream.query.noise_plan import plan_query
from dpstream.query.windows import Hop, Tumble
from tests.laws.queries import query_of

KEYS = tuple(f"k{n}" for n in range(6))


THREE_HOURS = {
    "window": Tumble("3 hours"),
    "privacy_unit_period": "3 hours",
    "correlated_noise": False,
}


def asked(**facts):
    usual = {
        "public_groups": KEYS,
        "correlated_noise": True,
        "max_groups_contributed": 6,
        "window": Tumble("6 hours"),
        "privacy_unit_period": "6 hours",
        "aggregates": (Count("n"),),
        "epsilon": 2,
        "delta": 1e-3,
    }
    return query_of(**usual | facts)


def cost(noise, known, change):
    """x^T (a I + b 11^T)^-1 x, with the dense matrix."""
    own, shared = float(noise.own) ** 2, float(noise.shared) ** 2
    covariance = own * np.eye(known) + shared * np.ones((known, known))
    return float(change @ np.linalg.solve(covariance, change))


BOUNDS = [(4, 4, 1, 4), (5, 9, 3, 5), (5, 5, 2, 4), (6, 6, 2, 3), (3, 3, 1, 3), (4, 7, 2, 4)]


@pytest.mark.parametrize(("known", "rows", "per_group", "groups"), BOUNDS)
def test_no_unit_costs_more_than_one(known, rows, per_group, groups):
    """Every way to spread rows over groups, each worth 0 to 3: at most 1, and one costs it."""
    facts = {"known": known, "rows": rows, "per_group": per_group, "groups": groups}
    noise = correlated_noise(**facts, largest=Fraction(3))
    assert noise is not None  # each of these bounds gains something
    worst = 0.0
    for spread in itertools.product(range(per_group + 1), repeat=known):
        if sum(spread) <= rows and np.count_nonzero(spread) <= groups:
            worst = max(worst, cost(noise, known, 3.0 * np.array(spread)))
    rng = np.random.default_rng(1)
    for _ in range(2000):
        spread = rng.uniform(0, 3 * per_group, known)
        spread *= rng.random(known) < 0.8
        spread[rng.permutation(known)[groups:]] = 0
        spread *= min(1.0, 3 * rows / max(spread.sum(), 1e-9))
        assert cost(noise, known, spread) <= worst + 1e-9

    assert 0.999 < worst <= 1 + 1e-12
    alone = 3 * math.sqrt(rows // per_group * per_group**2 + (rows % per_group) ** 2)
    assert noise.stddev <= 0.98 * alone


def test_the_gain_is_the_closed_form():
    """With all groups within the bounds (sqrt(d) + 1)/2 of noise, or slightly less."""
    for known in (3, 8, 24, 100):
        facts = {"known": known, "rows": known, "per_group": 1, "groups": known}
        noise = correlated_noise(**facts, largest=Fraction(1))
        assert noise.stddev <= (math.sqrt(known) + 1) / 2 + 1e-3
        assert noise.stddev >= 0.98 * (math.sqrt(known) + 1) / 2


def noises(query, runs=60, buckets=1):
    """What is published where nobody has a row: runs x windows x groups."""
    plan = plan_query(query)
    nothing = pa.table({"user": ["nobody"], "key": ["none"], "ts": [60], "x": [1]})
    found = []
    for run in range(runs):
        secret = run.to_bytes(32, "big")
        tables = [p.table for _, p in run_plan(plan, nothing, secret=secret, buckets=buckets)]
        for table in tables:
            order = np.argsort(table["key"].to_pylist())
            found.append(table["n"].to_numpy()[order].astype(float))
    return plan, np.array(found)


def test_the_noise_has_the_covariance_that_is_paid():
    """Two-sided: own and shared variance as planned; a fifth more or less of either fails.

    1,600 windows of 6 groups, at 5.4 standard deviations (a false-alarm rate of 1e-7).
    """
    plan, seen = noises(asked(), runs=400)
    window = plan.window(1)
    own, shared = window.sigmas[0] ** 2 + 1 / 12, window.shared[0] ** 2
    between = seen - seen.mean(axis=1, keepdims=True)
    count, groups = seen.shape
    own_seen = (between**2).sum() / (count * (groups - 1))
    mean_seen = (seen.mean(axis=1) ** 2).mean()
    of_mean = shared + own / groups

    assert abs(own_seen / own - 1) < 5.4 * math.sqrt(2 / (count * (groups - 1))) < 0.2
    assert abs(mean_seen / of_mean - 1) < 5.4 * math.sqrt(2 / count) < 0.2
    assert window.stddevs[0, 0] == pytest.approx(math.sqrt(own + shared))
    alone = plan_query(asked(correlated_noise=False)).window(1)
    assert window.stddevs[0, 0] < 0.75 * alone.stddevs[0, 0]


def test_buckets_share_one_draw():
    """However groups are divided, all have the same noise alike: the same releases."""
    one, several = noises(asked(), runs=3)[1], noises(asked(), runs=3, buckets=4)[1]

    assert (one == several).all()


def test_only_what_is_added_is_correlated():
    """Counts and sums from 0 on; sums of both signs and about a middle are as they were."""
    aggregates = (
        Count("n"),
        CountUnits("units"),
        Sum("up", column="x", contribution_bounds_per_row=(0, 5), quantum=1),
        Sum("both", column="x", contribution_bounds_per_row=(-3, 5), quantum=1),
        Avg("mean", column="x", contribution_bounds_per_row=(0, 4)),
    )
    plan = plan_query(asked(aggregates=aggregates, max_rows_per_group=2))
    for column, noise in zip(plan.columns, plan.correlated(1), strict=True):
        added = column.kind in ("rows", "units") or (column.lo >= 0 and not column.middle)
        assert (noise is not None) == (added and column not in plan.query.totals), column
    assert any(plan.correlated(1))
    assert not all(plan.correlated(1)[: len(plan.query.measures)])


def test_what_is_refused():
    """Where a unit may come to its groups in several tables, nothing would be gained, or lost."""
    for wrong, word in (
        ({"public_groups": None}, "public_groups"),
        ({"every": "1 hour", "last_budget": None}, "needs last_budget"),
        ({"max_rows_per_group": "auto"}, "rows and clamps that are given"),
        ({"privacy_unit_period": "forever"}, "one window for all rows"),
        ({"privacy_unit_period": "12 hours"}, "one window for all rows"),
        ({"window": Hop("6 hours", slide="2 hours")}, "one window for all rows"),
        ({"delta": 0}, "takes a delta"),
        ({"grouping_sets": [["key"], []]}, "one set of keys"),
    ):
        with pytest.raises(InvalidParameter, match=word):
            asked(**wrong)
    ledger = Ledger()
    other = asked(**THREE_HOURS)
    ledger.admit("book", plan_query(other).terms(), "another")
    with pytest.raises(LedgerError, match="noise that groups share"):
        plan_query(asked()).terms(ledger.terms("book"))


def test_it_is_another_query():
    """Its facts say so; without it nothing is other than before."""
    assert "correlated_noise" in asked().facts()
    assert "correlated_noise" not in replace(asked(), correlated_noise=False).facts()


@pytest.mark.parametrize("spread", [(2, 2, 1, 1), (1,) * 6])
def test_groups_one_after_another_cost_more(spread):
    """The control: noise for one table, and a unit that comes to its groups in several. Each table
    has a shared part of its own, so the cross terms are lost; that is why it is refused."""
    noise, groups = plan_query(asked()).correlated(1)[0], len(KEYS)
    apart = sum(cost(noise, groups, np.eye(groups)[:many].sum(axis=0)) for many in spread)

    assert cost(noise, groups, np.ones(groups)) <= 1 + 1e-12
    assert apart > 1.5


def test_noise_made_for_a_unit_in_all_groups_is_found_out():
    """The audit's control: half of the groups cost several times what all of them do."""
    noise = SharedByAllGroups(asked()).correlated(1)[0]

    assert cost(noise, 6, np.ones(6)) <= 1 + 1e-9
    assert cost(noise, 6, np.repeat([1.0, 0.0], 3)) > 5


# The last release of windows that are published again and again.

LAST = {"every": "1 hour", "buffers": 2}


@cache
def encoder(process, steps):
    """C of a counter as a dense matrix: B^-1 A, from its noise under one normal at a time."""
    decoder = np.zeros((steps, steps))
    for at in range(steps):
        state = np.zeros((1, process.width))
        for step in range(1, steps + 1):
            z = np.array([float(step - 1 == at)])
            decoder[step - 1, at] = process.advance(state, step, z)[0]
    return np.linalg.solve(decoder, np.tril(np.ones((steps, steps))))


def cost_of_both(plan, last, changes):
    """What changes, units x groups x steps, cost of the first column, over what they may, mu^2."""
    releases, known = changes.shape[2], changes.shape[1]
    sigma = plan.window(releases).sigmas[0]
    streamed = changes @ encoder(last.process, releases).T / sigma
    own, alike = (sigma * each for each in (last.own, last.alike))
    covariance = own**2 * np.eye(known) + alike**2 * np.ones((known, known))
    totals = changes.sum(axis=2)
    of_totals = (totals @ np.linalg.inv(covariance) * totals).sum(axis=1)
    return ((streamed**2).sum(axis=(1, 2)) + of_totals) / float(plan.shares[0])


@pytest.mark.parametrize(
    ("groups", "per_group", "rows"), [(6, 1, None), (4, 1, None), (6, 2, None), (6, 2, 9)]
)
def test_the_last_release_and_those_before_it_cost_no_more_together(groups, per_group, rows):
    """Thousands of units, whose rows come at any steps: none costs more than it may, and the
    plan's numbers are not larger than they must be: one comes within 1 percent."""
    bounds = {"max_groups_contributed": groups, "max_rows_per_group": per_group}
    aggregates = (Sum("s", column="x", contribution_bounds_per_row=(0, 3), quantum=1),)
    plan = plan_query(asked(**LAST, **bounds, max_rows_contributed=rows, aggregates=aggregates))
    last, rng = plan.window(6).last_rows[0], np.random.default_rng(2)
    changes = np.zeros((400, 6, 6))
    for trial, change in enumerate(changes):
        left = plan.query.bounds.rows
        for group in rng.permutation(6)[: rng.integers(1, groups + 1)]:
            here = min(per_group if trial % 2 else rng.integers(1, per_group + 1), left)
            steps = [0] * here if trial % 3 else rng.integers(0, 6, here)
            np.add.at(change[group], steps, 3 if trial % 4 else rng.uniform(0, 3))
            left -= here
    costs = cost_of_both(plan, last, changes)

    assert plan.query.shares_noise
    assert 0.99 < costs.max() <= 1 + 1e-9
    if groups == 6 and rows is None:  # a calibration for a unit in all groups alone is found out
        for_all = replace(last, own=last.own / 1.6, alike=last.alike * 3)
        assert cost_of_both(plan, for_all, changes).max() > 1.05


def test_the_last_release_has_the_covariance_that_is_paid():
    """Two-sided, own and shared variance of the last release and its covariance with the one
    before it; three tenths more or less of any fails (5.4 standard deviations, 1e-7)."""
    query = asked(**LAST | {"every": "2 hours"})
    plan, seen = noises(query, runs=200)
    window = plan.window(3)
    paths = seen.reshape(200 * 4, 3, len(KEYS))  # runs and windows x releases x groups
    last, sigma = window.last_rows[0], window.sigmas[0]
    first = last.weights[0]
    own, alike = (sigma * last.row_norm(3)) ** 2 + 1 / 12, (sigma * last.shared) ** 2
    between = paths - paths.mean(axis=2, keepdims=True)
    count, groups = len(paths), len(KEYS)
    own_seen = (between[:, 2] ** 2).sum() / (count * (groups - 1))
    mean_seen = (paths[:, 2].mean(axis=1) ** 2).mean()
    decoder = np.tril(np.ones((3, 3))) @ np.linalg.inv(encoder(last.process, 3))
    together = first * sigma**2 * decoder[1] @ decoder[2]
    products = (paths[:, 1] * paths[:, 2]).mean(axis=1)

    assert abs(own_seen / own - 1) < 5.4 * math.sqrt(2 / (count * (groups - 1))) < 0.2
    assert abs(mean_seen / (alike + own / groups) - 1) < 5.4 * math.sqrt(2 / count) < 0.28
    assert abs(products.mean() / together - 1) < 5.4 * products.std() / math.sqrt(count) / together
    assert window.stddevs[0, 2] == pytest.approx(math.sqrt(own + alike))
    alone = plan_query(replace(query, correlated_noise=False)).window(3)
    assert window.stddevs[0, :2] == pytest.approx(alone.stddevs[0, :2], rel=1e-4)
    assert window.stddevs[0, 2] < 0.75 * alone.stddevs[0, 2]


def test_buckets_share_the_last_draw():
    """However groups are divided, the last release has the same noise alike."""
    one, several = (noises(asked(**LAST), runs=2, buckets=b)[1] for b in (1, 4))

    assert (one == several).all()


def test_it_applies_by_itself_where_it_is_less():
    """Where groups are public and many are reached, and nothing is computed from them."""
    by_itself = {"correlated_noise": None}
    assert asked(**by_itself).shares_noise
    assert asked(**LAST, **by_itself).shares_noise
    for other in (
        {"max_groups_contributed": 1},
        {"max_groups_contributed": 3},  # 0.94 of the noise: it may be asked for
        {"public_groups": None},
        {"privacy_unit_period": "12 hours"},
        {"delta": 0},
        {"strategy": "sqlp"},
        {"grouping_sets": [["key"], []]},
        {"max_rows_per_group": "auto"},
        {"every": "1 hour", "last_budget": None},
    ):
        assert not asked(**by_itself | other).shares_noise, other
    assert asked(max_groups_contributed=3).shares_noise
    assert plan_query(asked(max_groups_contributed=3)).correlated(1)[0].ratio < 0.95
    computed = """
        SELECT WITH DIFFERENTIAL_PRIVACY
               OPTIONS (epsilon = 1, delta = 1e-9, privacy_unit_column = user,
                        max_groups_contributed = 2, public_groups = ('a', 'b'))
               page, {} FROM log GROUP BY page"""
    for text, shares in (("COUNT(*) AS n", True), ("COUNT(*) AS n, 2 * COUNT(*) AS m", False)):
        assert dps.sql(computed.format(text)).shares_noise is shares
    total = f"SELECT SUM(n) AS total FROM ({computed.format('COUNT(*) AS n')})"
    assert not dps.sql(total).shares_noise


def test_floats_that_would_take_much_keep_it_away():
    """With very many groups the whole of them counts in float error; then it is left out."""
    many = {"public_groups": range(600), "max_groups_contributed": 600, "delta": 1e-9}
    for span, shares in (("1 hour", True), ("1 minute", False)):
        facts = {"every": span, "epsilon": 1, "correlated_noise": None}
        query = asked(**many, **facts)
        assert query.shares_noise
        assert plan_query(query).query.shares_noise is shares


def test_books_of_finer_periods_have_noise_of_their_own():
    """By itself it is not drawn there, nor counted; a plan that has it is not charged there."""
    query = asked(correlated_noise=None)
    other = asked(**THREE_HOURS)
    ledger = Ledger()
    ledger.admit("book", plan_query(other).terms(), "another")
    book, plan = ledger.terms("book"), plan_query(query)
    alone = plan_query(replace(query, correlated_noise=False))

    assert not plan.for_book(book).query.shares_noise
    day = asked(privacy_unit_period="1 day", correlated_noise=False)
    days = plan_query(day).terms()
    assert plan.for_book(None) is plan.for_book(plan.terms()) is plan.for_book(days) is plan
    assert plan.cost(days)["amount"] == 4 * plan.total  # four units, each in a window of its own
    for part in ("amount", "error", "delta_slack"):
        assert plan.cost(book)[part] == alone.cost(book)[part]
    assert plan.charges(book) == alone.charges(book)
    keys = MemoryWindowKeys()
    spend = QuerySpend(run=bytes(16), query="q", ledger=ledger, dataset="book", keys=keys)
    with pytest.raises(LedgerError, match="opened meanwhile"):
        plan.pay(spend, "charge")


def test_periods_that_choose_their_groups_share_what_they_gain():
    """Each bound has an a of its own, costs what it may, and float error is counted for all."""
    for more in ({}, LAST):
        query = asked(correlated_noise=None, max_groups_contributed="auto", **more)
        plan, shared = plan_query(query), []
        for groups in query.choices:
            of_period = plan.of_bounds(replace(query.first_bounds, groups=groups))
            noise = of_period.correlated(2 if more else 1)[0]
            shared.append(noise is not None)
            asked_for = plan_query(replace(query, correlated_noise=True))
            same = asked_for.of_bounds(replace(query.first_bounds, groups=groups))
            assert same.correlated(2 if more else 1) == of_period.correlated(2 if more else 1)
            fixed = plan_query(asked(max_groups_contributed=groups, **more))
            assert fixed.error.xi <= plan.error.xi
            if noise is None:
                continue
            assert noise.ratio <= 0.85
            change = np.zeros((len(KEYS), len(KEYS), 6))
            for many in range(groups):
                change[many, : many + 1, 0] = 1
            if more:
                costs = cost_of_both(of_period, of_period.window(6).last_rows[0], change)
            else:
                costs = np.array([cost(noise, len(KEYS), each.sum(axis=1)) for each in change])
            assert 0.99 < costs.max() <= 1 + 1e-9
        assert query.shares_noise
        assert shared[-1]
        assert not shared[0]
