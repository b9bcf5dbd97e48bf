"""FUNNEL and RETENTION: what they make of a unit's rows depends on that unit's rows alone.

So all that bounds and budgets rest on is the same as for subqueries per unit
(docs/soundness/unit_rows.md). What they make is also computed here in another way.
"""

from collections import Counter, defaultdict
from functools import cache
from itertools import combinations, pairwise, permutations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpstream.group_by.flow import Flow
from dpstream.group_by.funnel import FunnelRows
from dpstream.privacy.state import Secret
from dpstream.query.noise_plan import plan_query
from dpstream.query.per_unit import NoRows
from dpstream.rows.row_reader import RowReader
from dpstream.sql_compiler import sql
from tests.support.fixed import SECRET

HOUR, DAYS, LAGS, WITHIN = 3600, 5, 2, 8
STEPS = "steps => (k = 'a' AS one, k IN ('b', 'c') AS two, k = 'a' AS three)"
MATCHES = ("a", "bc", "a")
TABLES = {
    "funnel": f"FUNNEL(TUMBLE(s, DESCRIPTOR(ts), INTERVAL '1' DAY), {STEPS}, within => INTERVAL "
    f"'{WITHIN}' HOUR)",
    "funnel by key": f"FUNNEL(TUMBLE(s, DESCRIPTOR(ts), INTERVAL '1' DAY), by => (v), {STEPS})",
    "strict": f"FUNNEL(TUMBLE(s, DESCRIPTOR(ts), INTERVAL '1' DAY), {STEPS}, strict => TRUE)",
    "retention": "RETENTION(s, DESCRIPTOR(ts), first => k = 'a', again => k <> 'c', "
    f"period => INTERVAL '1' DAY, lags => {LAGS}, by => v)",
}
KEYS = {"funnel": "step", "funnel by key": "v, step", "strict": "step", "retention": "v, lag"}
rows_of = st.lists(
    st.tuples(
        st.sampled_from(["1", "2", "x"]),
        st.integers(0, 24 * DAYS - 1),
        st.sampled_from(["a", "a", "b", "c", None]),
        st.sampled_from(["m", "w"]),
        st.integers(0, 30),
    ),
    max_size=18,
)
"""Unit, hour, kind, key, hours until it came."""


@cache
def query_of(name):
    period = "'forever'" if name == "retention" else "INTERVAL '1' DAY"
    emit = "EMIT EVERY INTERVAL '6' HOUR" if name.startswith("funnel") else ""
    return sql(
        f"""SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9,
              privacy_unit_column = user, privacy_unit_period = {period}, time_unit = 's',
              max_groups_contributed = 3, arrival_column = came, allowed_lateness =
              INTERVAL '12' HOUR, start = TIMESTAMP '1970-01-01',
              end = TIMESTAMP '1970-01-0{DAYS + 1}')
            {KEYS[name]}, window_start, COUNT(*) AS n
            FROM {TABLES[name]} GROUP BY window_start, {KEYS[name]} {emit}"""
    )


def stream(rows):
    """Hours become seconds, each row with one of its own."""
    listed = [(u, h * HOUR + n, k, v, (h + c) * HOUR) for n, (u, h, k, v, c) in enumerate(rows)]
    columns = [*zip(*listed, strict=True)] or [()] * 5
    kinds = {"user": pa.string(), "ts": pa.int64(), "k": pa.string(), "v": pa.string()}
    kinds["came"] = pa.int64()
    return pa.table({n: pa.array(c, t) for (n, t), c in zip(kinds.items(), columns, strict=True)})


def inner_rows(name, rows):
    """By unit, when each inner row comes: Counter of (step, window, keys)."""
    query = query_of(name)
    reader = RowReader(query, Secret(SECRET), bytes(16))
    table = stream(rows)
    reader.learn({field.name: field.type for field in table.schema})
    read, rejects = reader.read(table.select(query.source_columns), "a test")
    assert not rejects.rejected
    flow, found = Flow(plan_query(query), reader, buckets=2, threads=1), defaultdict(Counter)
    for step in range(query.schedule.steps):
        slices = [(read, a, b) for at, _, _, a, b in read.runs if at == step]
        for window, _, made in flow.rows_of_step(step, slices):
            assert set(made.steps.tolist()) == {step}
            for unit, row in zip(made.units, made.keys.to_pylist(), strict=True):
                found[unit.tobytes()][(step, window, *row.values())] += 1
    return dict(found)


def gone(rows, unit):
    """The same rows without a unit's, at the same seconds."""
    return [("nobody", 0, None, "m", 0) if row[0] == unit else row for row in rows]


@pytest.mark.parametrize("name", TABLES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows_of)
def test_without_a_unit_all_other_inner_rows_are_what_they_were(name, rows):
    """And come at the same steps."""
    together, units = inner_rows(name, rows), {row[0] for row in rows}
    for unit in units:
        mine = rows
        for other in units - {unit}:
            mine = gone(mine, other)
        alone = inner_rows(name, mine)
        others = {u: made for u, made in together.items() if u not in alone}
        assert others == inner_rows(name, gone(rows, unit))


def arrived(name, rows):
    """By unit and day, what came in time: (second, kind, key, the step at which it came)."""
    schedule, days = query_of(name).schedule, defaultdict(list)
    for (user, hour, k, v, _), second, came in zip(
        rows, stream(rows)["ts"].to_pylist(), stream(rows)["came"].to_pylist(), strict=True
    ):
        step = int(schedule.step_of(pa.array([came * 10**6]).to_numpy())[0])
        if step <= schedule.last_step(hour // 24):
            days[user, hour // 24].append((second, k, v, step))
    return days


def level(rows, within, *, strict=False):
    """The step that rows reach, by trying all of their ways."""
    ordered, best = sorted(rows), 0
    for size in range(1, len(MATCHES) + 1):
        for way in combinations(range(len(ordered)), size):
            some = [ordered[at] for at in way]
            kinds = zip(some, MATCHES, strict=False)
            fits = all(row[1] in ([*known] if row[1] else []) for row, known in kinds)
            near = within is None or some[-1][0] - some[0][0] <= within * HOUR
            close = not strict or all(b - a == 1 for a, b in pairwise(way))
            if fits and near and close:
                best = max(best, size)
    return best


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows_of)
def test_a_step_comes_when_it_is_reached(rows):
    """At the first trigger at which the rows that have come lead there; late rows too."""
    expected = Counter()
    for (_, day), mine in arrived("funnel", rows).items():
        reached = 0
        for step in sorted({row[3] for row in mine}):
            now = level([row for row in mine if row[3] <= step], WITHIN)
            expected.update((step, day, number) for number in range(reached + 1, now + 1))
            reached = now
    assert sum(inner_rows("funnel", rows).values(), Counter()) == expected


@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows_of)
def test_funnels_are_of_each_key(rows):
    """A unit's rows of another key take it nowhere."""
    expected = Counter()
    for (_, day), mine in arrived("funnel by key", rows).items():
        for key in "mw":
            of_key = [row for row in mine if row[2] == key]
            expected.update((day, key, n + 1) for n in range(level(of_key, None)))
    found = Counter()
    for made in inner_rows("funnel by key", rows).values():
        found.update({row[1:]: 0 for row in made})
        for (_, *row), times in made.items():
            found[tuple(row)] += times
    assert found == expected


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows_of)
def test_a_strict_funnel_has_no_row_in_between(rows):
    """It is told once, when the window is over."""
    expected, schedule = Counter(), query_of("strict").schedule
    for (_, day), mine in arrived("strict", rows).items():
        reached = range(1, level(mine, None, strict=True) + 1)
        expected.update((schedule.last_step(day), day, number) for number in reached)
    assert sum(inner_rows("strict", rows).values(), Counter()) == expected


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows_of)
@example([("1", 1, "b", "w", 0), ("1", 2, "a", "m", 0), ("1", 30, "b", "w", 0)])
def test_a_unit_has_one_cohort_for_ever(rows):
    """Its first day with an `a`, and the key of that row; then the days on which it is back."""
    expected, days = Counter(), defaultdict(dict)
    for (user, day), mine in arrived("retention", rows).items():
        days[user][day] = sorted(mine)
    for there in days.values():
        firsts = [(day, row[2]) for day in sorted(there) for row in there[day] if row[1] == "a"]
        if not firsts:
            continue
        cohort, key = firsts[0]
        for day, mine in there.items():
            lag, kinds = day - cohort, {row[1] for row in mine}
            if lag == 0 or (lag in range(1, LAGS + 1) and kinds & {"a", "b"}):
                expected[day, key, lag] += 1
    found = Counter()
    for made in inner_rows("retention", rows).values():
        assert sum(made.values()) <= LAGS + 1
        for (_, *row), times in made.items():
            found[tuple(row)] += times
    assert found == expected


def test_rows_of_one_time_are_taken_in_the_order_of_steps():
    """In whatever order they come."""
    held = FunnelRows(steps=("one", "two", "three"), column="k")
    for order in permutations(range(3)):
        rows = NoRows(
            keys=pa.table({"k": [1 << at for at in order]}), units=np.zeros((3, 2), np.uint64),
            groups=np.zeros((3, 2), np.uint64), digests=np.zeros((3, 2), np.uint64),
            values=np.zeros((3, 1), np.int64), steps=np.zeros(3, np.int64),
        )  # fmt: skip
        assert held(rows, (None, None))[1]["step"].to_pylist() == [1, 2, 3]
