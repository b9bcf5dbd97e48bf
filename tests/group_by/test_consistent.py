"""Levels of a release: least squares against the dense solution, and rows for what is not shown."""

from itertools import product

import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import InvalidParameter
from dpstream.group_by.consistent import make_consistent
from dpstream.query.grouping_sets import GROUPING_ID, grouping_id

KEYS = ("a", "b", "c")
ALL = list(product("xyz", "pq", [1, 2]))
SOME = ALL[:7] + ALL[9:]
ONE = list(product("xyz", "p", [1, 2]))
ROLLUP = (KEYS, ("a", "b"), ("a",), ())
SETS = {
    "rollup": (ROLLUP, ALL),
    "rollup, not all combinations": (ROLLUP, SOME),
    "a chain without total": ((KEYS, ("a",)), SOME),
    "a chain without parts": ((("a", "b"), ("b",), ()), SOME),
    "all sets": (tuple(n for n in product(*((k, "") for k in KEYS))), ALL),
    "some sets": ((("a", "b"), ("c",), ("b", "c")), ALL),
    "single keys": ((("a",), ("b",), ("c",)), ALL),
    "a key of one value": ((("a",), ("b",), ("c",)), ONE),
    "all keys but one of one value": ((("a", "c"), ("b",), ("c",)), ONE),
    "all keys behind them": ((("a", "c"), KEYS, ("b",), ("a", "b")), ONE),
}


def query_of(sets, public, **more):
    facts = {"epsilon": 1, "delta": 1e-9, "max_groups_contributed": 3}
    sets = [[name for name in names if name] for names in sets]
    return dps.Query(
        privacy_unit_column="u",
        keys=sorted({name for names in sets for name in names}),
        public_groups=public,
        grouping_sets=sets,
        **facts | more,
    )


def rows_of(query, public):
    """Every group of every set, in no order: (set, values of the keys)."""
    keys = query.keys
    cells = dict.fromkeys(
        (names, tuple(row[n] if key in names else None for n, key in enumerate(keys)))
        for names in query.grouping_sets
        for row in public
    )
    order = np.random.default_rng(1).permutation(len(cells))
    return [[*cells][at] for at in order]


def table_of(query, rows):
    columns = {k: [values[n] for _, values in rows] for n, k in enumerate(query.keys)}
    numbers = [grouping_id(query.keys, names) for names, _ in rows]
    return pa.table(columns | {GROUPING_ID: pa.array(numbers, pa.int64())})


@pytest.mark.parametrize("name", SETS)
def test_levels_are_the_least_squares_estimate(name):
    """Figures and standard deviations of the dense solution, for every measure by itself."""
    sets, public = SETS[name]
    width = len({key for names in sets for key in names if key})
    public = list(dict.fromkeys(row[:width] for row in public))
    query = query_of(sets, public)
    rows, rng = rows_of(query, public), np.random.default_rng(2)
    keys, measures = table_of(query, rows), len(query.measures)
    of_set = {names: 1 + 5 * rng.random(measures) for names in query.grouping_sets}
    stddevs = np.array([of_set[names] for names, _ in rows])
    sums = rng.integers(-50, 1000, (len(rows), measures))

    made = make_consistent(query, sums, stddevs, keys)

    holds = [
        [all(row[n] == v for n, v in enumerate(values) if query.keys[n] in names) for row in public]
        for names, values in rows
    ]
    matrix = np.array(holds, float)
    for number in range(measures):
        weights = np.diag(stddevs[:, number] ** -2)
        cover = matrix @ np.linalg.pinv(matrix.T @ weights @ matrix) @ matrix.T
        np.testing.assert_allclose(
            made.sums[:, number], cover @ weights @ sums[:, number], atol=1e-3
        )
        np.testing.assert_allclose(made.stddevs[:, number] ** 2, np.diag(cover), rtol=1e-9)
    assert (made.stddevs <= stddevs * (1 + 1e-9)).all()


def test_a_total_is_the_sum_of_its_parts():
    """To the last bit, and however the rows are ordered."""
    query = query_of(ROLLUP, ALL)
    rows = rows_of(query, ALL)
    sums = np.random.default_rng(3).integers(0, 10**9, (len(rows), len(query.measures)))
    made = make_consistent(query, sums, np.ones(sums.shape), table_of(query, rows)).sums[:, 0]
    by_set = {names: made[[n == names for n, _ in rows]].sum() for names in query.grouping_sets}

    assert len(set(by_set.values())) == 1
    for at, (names, values) in enumerate(rows):
        parts = [
            n
            for n, (m, v) in enumerate(rows)
            if m == KEYS and v[: len(names)] == values[: len(names)]
        ]
        assert made[at] == made[parts].sum()


@pytest.fixture(scope="module")
def log():
    """Every unit has one row, so that nothing is dropped and a count is what it is."""
    rng, size = np.random.default_rng(4), 3000
    places = np.minimum(rng.geometric(0.35, size) - 1, len(ALL) - 1)
    columns = {key: [ALL[at][n] for at in places] for n, key in enumerate(KEYS)}
    return pa.table({"u": np.arange(size), **columns, "v": rng.integers(0, 9, size)})


def truths(log, table):
    """The exact count of each row of a release."""
    wanted = table.select(KEYS).to_pylist()
    have = log.select(KEYS).to_pylist()
    numbers = table[GROUPING_ID].to_pylist()
    return np.array(
        [
            sum(
                all(row[k] == one[k] for n, k in enumerate(KEYS) if not number >> (2 - n) & 1)
                for row in have
            )
            for one, number in zip(wanted, numbers, strict=True)
        ]
    )


@pytest.mark.parametrize("name", ["rollup", "all sets"])
def test_error_bars_of_adjusted_figures_are_honest(log, name):
    """Over many runs the scatter of each figure is its error bar; the bar of one set alone is not.

    240 runs of 18 figures or more, which are not independent; the mean square of figures in
    deviations has a standard error of at most sqrt(2 / 240) = 0.09 for any of them.
    """
    query = query_of(SETS[name][0], ALL, max_groups_contributed=1)
    squares, spreads = [], []
    for number in range(240):
        options = EngineOptions(run_id=number.to_bytes(16, "big"), buckets=1, threads=1)
        (table,) = dps.run(query, source=log, secret=bytes(32), options=options)
        if not number:
            order = truths(log, table)
        spread = table["count_stddev"].to_numpy()
        squares.append(((table["count"].to_numpy() - order) / spread) ** 2)
        spreads.append(spread)
    mean = np.mean(squares, axis=0)
    alone = dps.explain(query).columns[0]["last"]

    assert np.abs(mean - 1).max() < 5.2 * (2 / 240) ** 0.5
    assert np.ptp(spreads, axis=0).max() == 0
    assert (mean * (np.mean(spreads, axis=0) / alone) ** 2).min() < 1 - 5.2 * (2 / 240) ** 0.5


def test_rows_for_what_is_not_shown(log):
    """Shown parts and the rest add up to the total, for every group that is shown."""
    query = query_of(ROLLUP, None, epsilon=3, delta=1e-3, max_groups_contributed=2)
    (table,) = dps.run(query, source=log, secret=bytes(32), ledger=dps.Ledger())
    rows = table.to_pylist()
    shown = [row for row in rows if not row["not_shown"]]
    rest = [row for row in rows if row["not_shown"]]
    assert len([row for row in shown if row[GROUPING_ID] == 0]) not in (0, len(ALL))
    assert len(rest) == len([row for row in shown if row[GROUPING_ID] != 0])
    for number, names in ((1, "ab"), (3, "a"), (7, "")):
        below = {1: 0, 3: 1, 7: 3}[number]
        for whole in (row for row in shown if row[GROUPING_ID] == number):
            parts = [
                r for r in rows if r[GROUPING_ID] == below and all(r[k] == whole[k] for k in names)
            ]
            assert sum(part["not_shown"] for part in parts) == 1
            assert sum(part["count"] for part in parts) == whole["count"]
            of_rest = next(part for part in parts if part["not_shown"])
            others = [part for part in parts if not part["not_shown"]]
            square = sum(part["count_stddev"] ** 2 for part in [whole, *others])
            assert of_rest["count_stddev"] ** 2 == pytest.approx(square)


REFUSED = {
    "grouping_sets must be made of the keys": {"grouping_sets": [("a",), ("z",)]},
    "different sets of keys": {"grouping_sets": [KEYS, ("c", "b", "a")]},
    "is in none": {"grouping_sets": [("a",), ("b",)]},
    "a number for each of the 2 grouping sets": {
        "grouping_sets": [KEYS, ()],
        "grouping_set_weights": [1],
    },
    "the weight of \\(\\) must be": {"grouping_sets": [KEYS, ()], "grouping_set_weights": [1, 0]},
    "nonnegative is not for": {"grouping_sets": [KEYS, ()], "nonnegative": True},
    "min_change is not for": {"grouping_sets": [KEYS, ()], "min_change": 1},
    "all combinations": {"grouping_sets": [("a", "b"), ("c",)], "public_groups": SOME},
    "does not go with GROUPING SETS": {
        "grouping_sets": [KEYS, ()],
        "aggregates": [dps.Quantile("q", column="v", q=0.5, contribution_bounds_per_row=(0, 9))],
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_with_sets_is_refused(words):
    """With the words that say what to do."""
    facts = {"epsilon": 1, "delta": 1e-9, "max_groups_contributed": 3, "keys": KEYS}
    with pytest.raises(InvalidParameter, match=words):
        dps.Query(privacy_unit_column="u", **facts | REFUSED[words])


def test_shares_of_sets_are_those_that_were_asked_for():
    """mu^2 of the sets stands as their weights do, and together they are the query's."""
    query = query_of(ROLLUP, ALL, grouping_set_weights=(4, 3, 2, 1))
    plan = dps.explain(query)
    shares = [
        float(line["share"].rstrip("%")) for line in plan.measures if " by " in line["measure"]
    ]

    assert shares == pytest.approx([39.2, 29.4, 19.6, 9.8], abs=0.6)
    assert (
        dps.explain(query_of(ROLLUP, ALL)).budget["words"].startswith("epsilon = 1, delta = 1e-09")
    )
