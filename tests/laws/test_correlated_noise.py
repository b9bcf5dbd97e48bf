"""Noise that public groups share: what a unit costs, what is drawn, and what is refused."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest

from dpstream.audit.controls.broken_engine import SharedByAllGroups
from dpstream.audit.query_samplers import run_plan
from dpstream.errors import InvalidParameter, LedgerError
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.sensitivity import correlated_noise
from dpstream.query.aggregates import Avg, Count, CountUnits, Sum
from dpstream.query.noise_plan import plan_query
from dpstream.query.windows import Hop, Tumble
from tests.laws.queries import query_of

KEYS = tuple(f"k{n}" for n in range(6))


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
        ({"every": "1 hour"}, "published once"),
        ({"privacy_unit_period": "forever"}, "one window for all rows"),
        ({"privacy_unit_period": "12 hours"}, "one window for all rows"),
        ({"window": Hop("6 hours", slide="2 hours")}, "one window for all rows"),
        ({"delta": 0}, "takes a delta"),
        ({"grouping_sets": [["key"], []]}, "one set of keys"),
    ):
        with pytest.raises(InvalidParameter, match=word):
            asked(**wrong)
    ledger = Ledger()
    other = asked(privacy_unit_period="12 hours", correlated_noise=False)
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
