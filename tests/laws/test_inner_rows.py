"""The inner rows of a unit depend on that unit's rows alone (docs/soundness/unit_rows.md).

That is all that the bounds of a query with a subquery per unit rest on: delete one unit, and all
other inner rows are what they were. What they are is also computed here in another way.
"""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.group_by.inner_rows import Figure, InnerRows
from dpstream.privacy.state import Secret
from dpstream.query.per_unit import NoRows
from dpstream.rows.row_batch import rows_by_window
from dpstream.rows.row_reader import RowReader
from dpstream.sql_compiler import sql
from tests.support.fixed import SECRET

HOUR = 3600
WINDOW = "TUMBLE(s, DESCRIPTOR(ts), INTERVAL '1' DAY)"
QUERIES = {
    "figures": (
        "n, a, b, c, d, e, f, g, h, i FROM (SELECT user, window_start, COUNT(*) AS n, "
        "COUNT(v) AS a, SUM(v) AS b, AVG(v) AS c, MIN(v) AS d, MAX(k) AS e, "
        "COUNT(DISTINCT k) AS f, FIRST(k) AS g, LAST(v) AS h, "
        "TIMESTAMP_DIFF(MAX(ts), MIN(ts), SECOND) AS i "
        f"FROM {WINDOW} GROUP BY user, window_start) GROUP BY window_start, ALL"
    ),
    "own keys": (
        "k, n FROM (SELECT user, window_start, k, COUNTIF(v > 1) AS n "
        f"FROM {WINDOW} WHERE v >= 0 GROUP BY user, window_start, k HAVING COUNT(*) > 1) "
        "GROUP BY window_start, ALL"
    ),
    "sessions": (
        "n, m, b, e FROM TUMBLE((SELECT user, session_start, COUNT(*) AS n, SUM(v) AS m, "
        "TIMESTAMP_DIFF(session_start, TIMESTAMP '1970-01-01', SECOND) AS b, "
        "TIMESTAMP_DIFF(session_end, session_start, SECOND) AS e FROM SESSION(s, DESCRIPTOR(ts), "
        "INTERVAL '2' HOUR) GROUP BY user, session_start), DESCRIPTOR(session_start), "
        "INTERVAL '1' DAY) GROUP BY window_start, ALL"
    ),
    "first rows": (
        f"k, v FROM (SELECT user, window_start, k, v FROM {WINDOW} QUALIFY ROW_NUMBER() OVER "
        "(PARTITION BY user, window_start ORDER BY v DESC, ts) <= 2) GROUP BY window_start, ALL"
    ),
    "first rows of sessions": (
        "k, v FROM TUMBLE((SELECT user, session_start, k, v FROM SESSION(s, DESCRIPTOR(ts), "
        "INTERVAL '2' HOUR) QUALIFY ROW_NUMBER() OVER (PARTITION BY user, session_start ORDER BY "
        "ts) = 1), DESCRIPTOR(session_start), INTERVAL '1' DAY) GROUP BY window_start, ALL"
    ),
}
rows_of = st.lists(
    st.tuples(
        st.sampled_from(["1", "2", "2.0", "x"]),
        st.integers(0, 60),
        st.sampled_from(["a", "b", None]),
        st.sampled_from([0.1, 0.2, 2.5, -1.0, None]),
    ),
    max_size=14,
)


@cache
def query_of(name):
    columns, _, rest = QUERIES[name].partition(" FROM ")
    grouped = rest.replace("window_start, ALL", f"window_start, {columns}")
    return sql(
        "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9, privacy_unit_column "
        "= user, privacy_unit_period = INTERVAL '1' DAY, max_groups_contributed = 2, "
        "max_rows_per_group = 1, time_unit = 's', start = TIMESTAMP '1970-01-01', "
        f"end = TIMESTAMP '1970-01-04') {columns}, window_start, COUNT(*) AS rows_ FROM {grouped}"
    )


def stream(rows):
    """Hours become seconds, each row with one of its own."""
    listed = [(u, h * HOUR + at, k, v) for at, (u, h, k, v) in enumerate(rows)]
    columns = [*zip(*listed, strict=True)] or [()] * 4
    kinds = {"user": pa.string(), "ts": pa.int64(), "k": pa.string(), "v": pa.float64()}
    return pa.table({n: pa.array(c, t) for (n, t), c in zip(kinds.items(), columns, strict=True)})


def inner_rows(name, rows, look=lambda held: held):
    """The inner rows of each unit in a period, in any order: what their outer keys are."""
    query = query_of(name)
    reader = RowReader(query, Secret(SECRET), bytes(16))
    table = stream(rows)
    reader.learn({field.name: field.type for field in table.schema})
    read, rejects = reader.read(table.select(query.source_columns), "a test")
    assert not rejects.rejected
    found = defaultdict(Counter)
    for window, _, held in rows_by_window([(read, a, b) for *_, a, b in read.runs]):
        made, rejects = reader.inner_rows(look(held), "a test")
        assert not rejects.rejected
        for unit, row in zip(made.units, made.keys.to_pylist(), strict=True):
            found[unit.tobytes()][(window, *row.values())] += 1
    return dict(found)


def units(rows):
    """The units of a stream: 2 and 2.0 are one."""
    return {user.removesuffix(".0") for user, *_ in rows}


def without(rows, unit):
    return [row for row in rows if row[0].removesuffix(".0") != unit]


@pytest.mark.parametrize("name", QUERIES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows_of)
def test_without_a_unit_all_other_inner_rows_are_what_they_were(name, rows):
    """So neighbouring streams have neighbouring inner rows."""
    together = inner_rows(name, rows)
    mine = {unit: inner_rows(name, [r for r in rows if r not in without(rows, unit)])
            for unit in units(rows)}  # fmt: skip
    for unit, own in mine.items():
        rest = {u: found for u, found in together.items() if u not in own}
        others = inner_rows(name, moved(rows, without(rows, unit)))
        assert others == rest


def moved(rows, kept):
    """The same rows without their times being numbered anew: a deleted row leaves its second."""
    return [row if row in kept else ("nobody", 100, None, 0.0) for row in rows]


@pytest.mark.parametrize("name", QUERIES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(rows_of, st.randoms(use_true_random=False))
def test_the_order_in_which_rows_come_changes_nothing(name, rows, dice):
    """To the last bit of a sum."""

    def shuffled(held):
        order = list(range(len(held)))
        dice.shuffle(order)
        columns = {n: getattr(held, n)[order] for n in ("units", "groups", "digests", "values")}
        return replace(held, **columns, keys=held.keys.take(pa.array(order, pa.int64())))

    assert inner_rows(name, rows, shuffled) == inner_rows(name, rows)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows_of)
def test_figures_are_those_of_each_unit_and_day(rows):
    """Computed again, row by row."""
    expected = Counter()
    for mine in by_unit_and_day(rows).values():
        values = [v for _, _, v in mine if v is not None]
        keys = [k for _, k, _ in mine if k is not None]
        expected[
            len(mine), len(values), rounded(sum(values)) if values else None,
            rounded(sum(values) / len(values)) if values else None, min(values, default=None),
            max(keys, default=None), len(set(keys)), mine[0][1], mine[-1][2],
            mine[-1][0] - mine[0][0],
        ] += 1  # fmt: skip
    assert all_of(inner_rows("figures", rows)) == expected


@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows_of)
def test_sessions_end_after_a_gap_and_with_the_day(rows):
    """Rows at most two hours apart are of one session, which no midnight is within."""
    expected = Counter()
    for session in sessions_of(rows):
        values = [v for _, _, v in session if v is not None]
        total = rounded(sum(values)) if values else None
        first, last = session[0][0], session[-1][0]
        expected[len(session), total, first, last - first] += 1
    assert all_of(inner_rows("sessions", rows)) == expected


@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows_of)
def test_rows_are_numbered_within_each_session(rows):
    """Not within the unit: each session has a first row."""
    expected = Counter((session[0][1], session[0][2]) for session in sessions_of(rows))
    assert all_of(inner_rows("first rows of sessions", rows)) == expected


def test_each_of_three_sessions_has_a_first_row():
    """Two users, two rows in each session."""
    rows = [(user, hour + at, "a", 0.1) for user in "12" for hour in (0, 8, 16) for at in (0, 1)]
    assert all_of(inner_rows("first rows of sessions", rows)) == {("a", 0.1): 6}


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64()])
def test_whole_numbers_beyond_those_of_floats_are_added_up(kind):
    """Exactly, to 2^62; beyond, a sum is NULL and a mean is a float. None ends the query."""
    odd, large = 2**53 + 1, 2**62
    units = {1: [odd, 1], 2: [large - 2**20, -1], 3: [large], 4: [-odd, -1], 5: [2**63 - 1, 1]}
    if not pa.types.is_signed_integer(kind):
        units = {unit: [abs(x) for x in values] for unit, values in units.items()}
        units[6] = [2**64 - 1]
    rows = [(unit, value) for unit, values in units.items() for value in values]
    ids = np.array([[unit, unit] for unit, _ in rows], np.uint64)
    held = NoRows(
        keys=pa.table({"x": pa.array([value for _, value in rows], kind)}),
        units=ids, groups=np.zeros_like(ids), values=np.zeros((len(rows), 1), np.int64),
        digests=np.arange(2 * len(rows), dtype=np.uint64).reshape(-1, 2),
    )  # fmt: skip
    both = [Figure(name=name, kind=name, column="x") for name in ("sum", "avg")]
    of, made = InnerRows(figures=tuple(both))(held, (None, None))
    assert of[:, 0].tolist() == [*units]
    for found, values in zip(made.to_pylist(), units.values(), strict=True):
        assert found["sum"] == (sum(values) if abs(sum(values)) < large else None)
        assert found["avg"] == pytest.approx(sum(values) / len(values), rel=1e-15)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows_of)
def test_rows_are_numbered_within_each_unit_and_day(rows):
    """NULL comes last where the order is descending."""
    expected, found = Counter(), all_of(inner_rows("first rows", rows))
    for mine in by_unit_and_day(rows).values():
        ordered = sorted(mine, key=lambda row: (row[2] is None, -(row[2] or 0), row[0]))
        expected.update((k, v) for _, k, v in ordered[:2])
    assert found == expected


def sessions_of(rows):
    """The rows of each session, in the order of time."""
    sessions = []
    for mine in by_unit_and_day(rows).values():
        for before, row in zip([None, *mine], mine, strict=False):
            if before is None or row[0] - before[0] > 2 * HOUR:
                sessions.append([])
            sessions[-1].append(row)
    return sessions


def by_unit_and_day(rows):
    """(second, k, v) of each unit and day, in the order of time."""
    days = defaultdict(list)
    for at, (user, hour, k, v) in enumerate(rows):
        second = hour * HOUR + at
        days[user.removesuffix(".0"), second // (24 * HOUR)].append((second, k, v))
    return {place: sorted(mine, key=lambda row: row[0]) for place, mine in days.items()}


def all_of(found):
    """The inner rows of all units, without their windows."""
    total = Counter()
    for rows in found.values():
        for (_, *row), count in rows.items():
            total[tuple(map(rounded, row))] += count
    return total


def rounded(value):
    return round(value, 9) if isinstance(value, float) else value


def test_a_figure_of_others_would_be_found():
    """The control of the law: ranks over all units change with each of them."""
    rows = [("1", 1, "a", 2.5), ("x", 2, "b", 0.1), ("2", 3, "b", 0.2)]

    def of_one_unit(held):
        return replace(held, units=np.broadcast_to(held.units[0], held.units.shape).copy())

    together = inner_rows("figures", rows, of_one_unit)
    fewer = inner_rows("figures", moved(rows, without(rows, "1")), of_one_unit)
    assert all_of(together) != all_of(fewer)
