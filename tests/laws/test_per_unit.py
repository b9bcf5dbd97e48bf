"""What is bounded for each unit and group: how far one unit moves it, by exact sums and matrices.

Noise is left out: the exact sums of two neighbours are read at every release, and what the counter
measures of their difference is compared with the noise that the plan gives the column.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from dpstream.audit.controls.broken_engine import NetClamp
from dpstream.audit.query_samplers import run_plan
from dpstream.counting.buffered import BufferedLinearToeplitz, LastTwice, encoder_weights
from dpstream.errors import InvalidParameter
from dpstream.group_by.flow import Flow
from dpstream.query.aggregates import (
    ApproxCountDistinct,
    Avg,
    Count,
    CountDistinct,
    CountUnits,
    Measure,
    Sum,
    Variance,
)
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.windows import Tumble
from dpstream.rows.row_batch import id_pairs
from tests.support.long import part_of

HOUR = 3600
STEPS = 24
SIGNED = Sum("z", column="x", contribution_bounds_per_group=(-4, 4), quantum=1)
ALL = (
    Sum("s", column="x", contribution_bounds_per_group=(0, 6), quantum=1),
    Sum("least", column="x", contribution_bounds_per_group=(2, 6), quantum=1),
    Sum("below", column="x", contribution_bounds_per_group=(-6, -2), quantum=1),
    Sum("z", column="x", contribution_bounds_per_group=(-2, 5), quantum=1),
    Count("n", contribution_bounds_per_group=(1, 3)),
    CountDistinct("d", column="v", max_values_per_group=2),
)


def query_of(*aggregates, **facts):
    common = {
        "privacy_unit_column": "user",
        "keys": ("key",),
        "public_groups": [0, 1, 2],
        "time_column": "ts",
        "time_unit": "s",
        "start": "1970-01-01",
        "end": "1970-01-02",
        "every": "1 hour",
        "epsilon": 2,
        "delta": 1e-4,
        "max_groups_contributed": 2,
        "buffers": 2,
        "report_bias": False,
    }
    return Query(**common | facts, aggregates=aggregates)


def rows_of(*rows):
    """Rows (user, key, step, x, v)."""
    user, key, step, x, v = zip(*rows, strict=True) if rows else ((),) * 5
    times = pa.array([at * HOUR + 60 for at in step], pa.int64())
    values = {"x": pa.array(x, pa.float64()), "v": pa.array(v, pa.string())}
    users, keys = pa.array(user, pa.string()), pa.array(key, pa.int64())
    return pa.table({"user": users, "key": keys, "ts": times} | values)


def exact_sums(plan, table, flow=Flow, **how):
    """The exact sums of every group, releases x measures, by window and id."""
    sums = {}

    class Watched(flow):
        def perturb(self, due, spend):
            for bucket in self.groups(due.window):
                active = np.arange(len(bucket.active))
                for name, row in zip(bucket.ids(active), bucket.sums(active), strict=True):
                    sums.setdefault((due.window, *name.tolist()), []).append(row.copy())
            return super().perturb(due, spend)

    for _ in run_plan(plan, table, flow=Watched, **how):
        pass
    return {group: np.array(rows) for group, rows in sums.items()}


@cache
def encoder(process):
    """The matrix of what a counter measures, dense."""
    inner = process.process if isinstance(process, LastTwice) else process
    decays = np.array(inner.decays)
    powers = (1 - decays[0::2])[None, :] ** np.arange(process.steps - 1)[:, None]
    column = np.append(1.0, powers @ encoder_weights(decays))
    rows = [np.append(np.zeros(t), column[: process.steps - t]) for t in range(process.steps)]
    dense = np.array(rows).T
    if isinstance(process, LastTwice):
        dense = np.vstack([dense, np.full(process.steps, process.gain)])
    return dense


def losses(plan, one, two, **how):
    """What a column's difference costs, by measure, against what the plan gives it: at most 1."""
    releases = plan.query.schedule.lengths[0]
    window, costs = plan.window(releases), np.zeros(len(plan.query.measures))
    first, other = (exact_sums(plan, rows_of(*rows), **how) for rows in (one, two))
    assert first.keys() == other.keys()
    for group in first:
        moved = np.diff(first[group] - other[group], axis=0, prepend=0)
        measured = encoder(window.process) @ moved
        costs += (measured**2).sum(axis=0) / np.array(window.sigmas) ** 2
    names = [measure.name for measure in plan.query.measures]
    return dict(zip(names, costs / np.array(plan.shares, float), strict=True))


def chain(length):
    """A unit holds the value 0; each of the others brings the last one's value, then a new one."""
    others = [
        (f"w{n}", 0, 2 * n - 1 + more, 0, f"{n - 1 + more}")
        for n in range(1, length // 2)
        for more in (0, 1)
    ]
    return [("u", 0, 0, 0, "0"), *others]


def test_a_unit_never_moves_more_than_its_noise_is_for():
    """Random rows of few units in few groups: whatever comes and goes, no column costs more."""
    rng, plan, worst = np.random.default_rng(5), plan_query(query_of(*ALL)), {}
    for _ in range(part_of(100)):
        size = int(rng.integers(1, 60))
        draws = [rng.integers(0, top, size).tolist() for top in (3, 3, STEPS, 12, 4)]
        rows = [
            (f"u{user}", key, at, x - 6.0, None if v == 3 else f"v{v}")
            for user, key, at, x, v in zip(*draws, strict=True)
        ]
        without = [row for row in rows if row[0] != "u0"]
        for name, cost in losses(plan, rows, without).items():
            worst[name] = max(worst.get(name, 0.0), cost)

    assert max(worst.values()) <= 1


HARD = {
    "up, then down at once": (SIGNED, [("u", 0, 0, 4.0, None), ("u", 0, 9, -4.0, None)]),
    "all at once": (ALL[0], [("u", key, 5, 99.0, None) for key in (0, 1)]),
}


@pytest.mark.parametrize("name", HARD)
def test_bounds_per_group_are_attained(name):
    """The noise is for what a unit can do, and for nothing more than that."""
    aggregate, rows = HARD[name]
    plan = plan_query(query_of(aggregate, last_budget=None))
    worst = max(
        max(losses(plan, [(*r[:2], r[2] + more, *r[3:]) for r in rows], []).values())
        for more in range(2)
    )

    assert 0.4 < worst <= 1


def hard_values(keys=(0, 1), values=2):
    """A unit brings values at first, another unit in each group the same ones much later."""
    mine = [("u", key, 0, 0, f"{key} {n}") for key in keys for n in range(values)]
    later = [(f"w{key}", key, 12, 0, f"{key} {n}") for key in keys for n in range(values)]
    return mine + later, later


def test_distinct_values_need_more_noise_than_what_only_grows(monkeypatch):
    """A value leaves with its unit and comes back with the next: noise of one impulse is short."""
    distinct = CountDistinct("d", column="v", max_values_per_group=2)
    pair = hard_values()
    (cost,) = losses(plan_query(query_of(distinct, last_budget=None)), *pair).values()
    monkeypatch.setattr(Measure, "fall", 0)
    (short,) = losses(plan_query(query_of(distinct, last_budget=None)), *pair).values()

    assert 0.9 < cost <= 1 < 1.2 < short


class UnionAwareValues(Flow):
    """Lets a unit bring values that its group has not got yet, in place of those that it has.

    True: what a unit brings then depends on what others have brought, and one unit less changes
    what all that come after it bring.
    """

    def contributions(self, window, rows, keep_mask):
        """Values that the group has are left out before they are bounded."""
        values = rows.values.copy()
        (bucket,) = self.groups(window)
        for number, measure in enumerate(m for m in self.query.measures if m.kind == "distinct"):
            column = self.query.value_columns[measure]
            ids = np.ascontiguousarray(values[:, column : column + 2]).view(np.uint64)
            known = bucket.values[number]
            pairs = id_pairs(ids ^ rows.groups[:, ::-1])
            there = np.isin(pairs, id_pairs(known.ids[: known.used]))
            values[there, column : column + 2] = 0
        return super().contributions(window, replace(rows, values=values), keep_mask)


def test_bounding_that_looks_at_others_is_caught():
    """One unit less, and all that come after it bring other values: a norm that grows with T."""
    plan = plan_query(query_of(CountDistinct("d", column="v", max_values_per_group=1)))
    with_unit, without = chain(STEPS), chain(STEPS)[1:]
    (sound,) = losses(plan, with_unit, without).values()
    (broken,) = losses(plan, with_unit, without, flow=UnionAwareValues).values()

    assert sound <= 1 < 2 < broken


def test_a_net_clamp_is_caught():
    """It rises and falls by its whole range at every trigger."""
    rows = [
        ("u", key, step, 4.0 if step == 0 else 8.0 * (-1) ** step, None)
        for key in (0, 1)
        for step in range(STEPS)
    ]
    net = NetClamp("z", column="x", contribution_bounds_per_group=(-4, 4), quantum=1)
    (sound,) = losses(plan_query(query_of(SIGNED)), rows, []).values()
    (broken,) = losses(plan_query(query_of(net)), rows, []).values()

    assert sound <= 1 < 10 < broken


def answers(query, rows, buckets=1):
    """The last exact sums of the first public group, in the order of the measures."""
    found = exact_sums(plan_query(query), rows_of(*rows), buckets=buckets)
    return max((sums[-1].tolist() for sums in found.values()), key=lambda row: np.abs(row).sum())


def test_what_is_clamped_of_each_unit():
    """Of all rows of a unit, however many; where it is published once, of their sum."""
    rows = [
        *(("u", 0, step, 3.0, None) for step in range(5)),
        ("u", 0, 6, -20.0, None),
        ("v", 0, 7, 1.0, None),
        ("w", 0, 7, None, None),
    ]
    bounds = {"column": "x", "quantum": 1}
    asked = [
        Sum(f"s{n}", contribution_bounds_per_group=ends, **bounds)
        for n, ends in enumerate([(0, 6), (2, 6), (-6, -2), (-2, 5)])
    ]
    counted = Count("n", contribution_bounds_per_group=(0, 4))

    assert answers(query_of(*asked, counted), rows) == [7, 10, -10, 4, 6]
    assert answers(query_of(*asked, counted, every=None), rows) == [1, 6, -9, -1, 6]


def test_a_mean_of_means_counts_each_unit_once():
    """A unit with many rows weighs as much as one with few; NULL is no row."""
    mean = Avg("m", column="x", contribution_bounds_per_group=(0, 10), quantum=1)
    rows = [*(("u", 0, 1, 9.0, None),) * 9, ("v", 0, 1, 1.0, None), ("v", 0, 2, None, None)]

    assert answers(query_of(mean, every=None), rows) == [4 - 4, 2]
    with pytest.raises(InvalidParameter, match="publish each window once"):
        query_of(mean)


@pytest.mark.parametrize("buckets", [1, 3])
def test_the_first_values_of_a_unit_stay(buckets):
    """Two of each unit, the first to come; a value counts once; NULL is none; all rows count."""
    distinct = CountDistinct("d", column="v", max_values_per_group=2)
    rows = [
        *(("u", 0, step, 0, v) for step, v in enumerate(["a", "a", "b", "c", "d"])),
        *(("w", 0, step, 0, v) for step, v in enumerate(["b", None, "a", "e"])),
        ("x", 0, 9, 0, "e"),
    ]

    assert answers(query_of(distinct, CountUnits("u")), rows, buckets) == [3, 3]


def test_a_sample_of_values_is_chosen_before_they_are_bounded():
    """One value in four is looked at, the same ones for all units; of a unit a fourth of them."""
    sampled = ApproxCountDistinct("d", column="v", max_values_per_group=8, one_in=4)
    plan = plan_query(query_of(sampled, max_groups_contributed=1))
    one = [(f"u{n}", 0, 3, 0, f"v{v}") for n in range(20) for v in range(400)]
    many = [(f"u{n}", 0, 3, 0, f"v{n}") for n in range(400)]
    (few, seen) = (answers(plan.query, rows)[0] for rows in (one, many))

    assert plan.sensitivities == (2,)
    assert few <= 20 * 2  # each unit brings two
    assert abs(seen - 100) < 5.2 * (400 * 3 / 16) ** 0.5  # at one run in 5 million
    (exact, bar) = sampled.answer([(np.array([1600]), np.array([3.0]))], True)
    assert exact == 1600
    assert bar == pytest.approx((9 + 1600 * 3) ** 0.5)


def test_units_do_not_all_bring_the_same_values():
    """Of many values in one step each unit brings some, and together they bring nearly all."""
    distinct = CountDistinct("d", column="v", max_values_per_group=1)
    rows = [(f"u{n}", 0, 3, 0, f"v{v}") for n in range(60) for v in range(12)]

    assert answers(query_of(distinct), rows)[0] >= 10


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Variance("x", column="x", contribution_bounds_per_group=(0, 1)), "per_row"),
        (lambda: CountUnits("x", contribution_bounds_per_group=(0, 1)), "Count, Sum and Avg"),
        (lambda: Sum("x", column="x"), "needs contribution_bounds_per_row"),
        (lambda: Sum("x", column="x", contribution_bounds_per_group=(1, float("inf"))), "finite"),
        (lambda: Sum("x", column="x", contribution_bounds_per_group=(1, float("nan"))), "finite"),
        (lambda: Sum("x", column="x", contribution_bounds_per_group=(2, 1)), "lo < hi"),
        (
            lambda: Sum(
                "x",
                column="x",
                contribution_bounds_per_group=(0, 1),
                contribution_bounds_per_row=(0, 1),
            ),
            "give one of them",
        ),
        (lambda: Count("x", contribution_bounds_per_group=(-1, 1)), "not below 0"),
        (lambda: CountDistinct("x", column="v", max_values_per_group=0), "at least 1"),
        (lambda: CountDistinct("x", column="v", max_values_per_group=2.5), "whole number"),
        (
            lambda: ApproxCountDistinct("x", column="v", max_values_per_group=4, one_in=3),
            "power of 2",
        ),
        (lambda: query_of(ALL[-1], strategy="sqlp"), "use 'latched'"),
    ],
)
def test_refusals_say_what_to_do(make, words):
    """Bounds that cannot be are refused before anything is spent."""
    with pytest.raises(InvalidParameter, match=words):
        make()


def test_the_norm_of_two_impulses_is_that_of_the_matrix():
    """In closed form and by trying every pair of steps, for each length and part."""
    for steps in (1, 2, 3, 8, 24, 60):
        plain = BufferedLinearToeplitz(steps=steps, buffers=2)
        for process in (plain, LastTwice(process=plain, share=plan_share())):
            gram = encoder(process).T @ encoder(process)
            alone = np.diag(gram)
            for fall in (0.25, 1.0):
                pairs = alone[:, None] + fall**2 * alone[None, :] - 2 * fall * gram
                largest = np.sqrt(max(pairs.max(), alone.max()))
                assert process.opposed_norm(fall) == pytest.approx(largest, rel=1e-12)


def plan_share():
    """The part of the budget that measures the last release once more."""
    return query_of(SIGNED).last_budget


def test_longer_streams_have_a_bound_that_is_not_below():
    """Where not all pairs are tried the bound for columns that never overlap holds."""
    norms = [
        BufferedLinearToeplitz(steps=steps, buffers=2).opposed_norm(1.0)
        / BufferedLinearToeplitz(steps=steps, buffers=2).column_norm()
        for steps in (100, 1024, 1 << 18)
    ]

    assert all(one < two for one, two in pairwise(norms))
    assert norms[-1] == pytest.approx(2**0.5)


def test_several_windows_are_bounded_one_by_one():
    """A unit in two windows is in two groups, and begins anew in each."""
    query = query_of(ALL[0], window=Tumble("12 hours"), every="6 hours")
    rows = [("u", 0, step, 4.0, None) for step in range(STEPS)]
    found = exact_sums(plan_query(query), rows_of(*rows))

    assert sorted(int(sums[-1][0]) for sums in found.values()) == [0, 0, 0, 0, 6, 6]
