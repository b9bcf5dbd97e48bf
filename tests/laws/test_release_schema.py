"""The schema of a query's releases is fixed before the first one, and told beforehand."""

import json
import sqlite3
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import InvalidInput, StateError
from dpstream.group_by.release_table import ReleaseTables
from dpstream.rows.column_values import types_of
from tests.laws.queries import HOUR, LATE, OTHERS, busy, query_of
from tests.sql_compiler.test_accepted import ACCEPTED, compiled
from tests.support.live_runs import ScriptedClock

SECRET, FIXED = bytes(range(32)), EngineOptions(buckets=2, threads=1, run_id=bytes(16))
DATE = pa.date32()
QUERIES = OTHERS | {
    "late": LATE,
    "once": query_of(),
    "thinned": query_of(every="2 hours", min_change=2.0),
    "public": query_of(every="6 hours", public_groups=["k1", "k2"], nonnegative=True),
    "total": query_of(every="6 hours", keys=(), public_groups=None),
    "debias with bars": query_of(
        every="2 hours", debias="global", confidence=0.9, nonnegative=True,
        aggregates=(dps.Count("n"), dps.CountUnits("u"),
                    dps.Sum("s", column="x", contribution_bounds_per_row=(0, 9))),
    ),
}  # fmt: skip


def told(schema):
    """As `explain` tells it."""
    return [(field.name, str(field.type)) for field in schema]


@pytest.mark.parametrize("rows", ["busy", "none"])
@pytest.mark.parametrize("name", QUERIES)
def test_every_release_has_the_schema_that_was_told(name, rows):
    """With many rows and with none, from the first table to the last."""
    query, source = QUERIES[name], busy() if rows == "busy" else busy().slice(0, 0)
    run = dps.run(query, source=source, secret=SECRET, options=FIXED)
    before = run.schema
    tables = list(run)

    assert tables
    assert {str(table.schema.remove_metadata()) for table in tables} == {str(before)}
    assert [(one["name"], one["type"]) for one in dps.explain(query).schema] == told(before)


def some_rows(query):
    """A thousand rows of every column that a query reads; times within its range."""
    rng = np.random.default_rng(1)
    columns = {name: rng.integers(0, 3, 1000) for name in query.source_columns}
    columns[query.privacy_unit_column] = np.arange(1000)
    columns |= {name: ["2024-05-01"] * 1000 for name, k in query.declared.items() if k == DATE}
    for number, name in enumerate(query.keys):
        listed = [row[number] for row in query.public_groups or ()]
        if name in columns and any(isinstance(item, str) for item in listed):
            columns[name] = ["a"] * 1000
    for name in (query.time_column, query.arrival_column):
        if name is not None and query.time_unit is None:
            first = query.start or 0
            instants = first + rng.integers(0, min((query.end or first) - first, 10**9) or 1, 1000)
            columns[name] = pa.array(instants).cast(pa.timestamp("us", "UTC"))
    return pa.table(columns)


def takes_numbers(rows):
    """Can its expressions be computed of numbers?"""
    try:
        return bool(types_of(rows, {one.name: one.type for one in some_rows(rows).schema}))
    except InvalidInput:
        return False


def runnable():
    """The accepted queries of the SQL suite that can be run over numbers."""
    for text, facts in ACCEPTED:
        query = compiled(text, facts).query
        if query.time_column is not None and query.end is None:
            day = {"start": "2024-05-01", "end": "2024-05-03"}
            try:
                query = replace(query, **day)
            except dps.InvalidParameter:
                continue
        if (query.schedule.steps or 0) <= 200 and takes_numbers(query):
            yield pytest.param(query, id=" ".join(text.split())[-60:])


def test_most_queries_of_the_suite_are_run():
    """The law below means something."""
    assert len(list(runnable())) >= 15


@pytest.mark.parametrize("query", list(runnable()))
def test_sql_says_the_schema_of_its_releases(query):
    """Every expression of keys and of noisy columns has its type before a row is read."""
    run = dps.run(query, source=some_rows(query), secret=SECRET, options=FIXED, anyway=True)
    before = run.schema
    found = {str(table.schema.remove_metadata()) for table, _ in zip(run, range(30), strict=False)}
    run.close()

    assert found == {str(before)}
    assert [one["name"] for one in dps.explain(query).schema] == before.names


def test_counts_that_are_made_up_for_are_reals_in_every_release(tmp_path):
    """Also while the share of rows kept drowns in noise: a database goes on after every restart."""
    place = {"sink": str(tmp_path / "out.sqlite"), "state": tmp_path / "state"}
    asked = query_of(
        every="2 hours", debias="global", epsilon=16, max_groups_contributed=1,
        weights={"bias": 10},
    )  # fmt: skip
    rows = busy(size=20_000, users=2_000)
    early = (rows["ts"].to_numpy() < 4 * HOUR) & (np.arange(len(rows)) > 40)
    source = rows.filter(pa.array(~early))
    shares, schemas = [], set()
    options = replace(FIXED, snapshot_every=1)
    for _ in range(6):
        run = dps.run(asked, source=source, secret=SECRET, options=options, **place)
        for table, _ in zip(run, range(3), strict=False):  # then it stops, and goes on
            shares.append(json.loads(table.schema.metadata[b"dpstream"])["kept_share"])
            schemas.add(str(table.schema.remove_metadata()))
        run.close()

    assert None in shares
    assert min(share for share in shares if share is not None) < 1.0
    (schema,) = schemas
    assert "count: double" in schema
    rows = sqlite3.connect(tmp_path / "out.sqlite").execute("SELECT typeof(count) FROM query")
    assert {kind for (kind,) in rows} == {"real"}


LIVE = {
    "name": "live",
    "privacy_unit_column": "user",
    "keys": ("page",),
    "epsilon": 8,
    "delta": 0.1,
    "time_column": "at",
    "time_unit": "us",
    "start": "1970-01-01",
    "end": "1970-01-01T06:00",
    "every": "1 hour",
    "max_groups_contributed": 2,
}


@pytest.mark.parametrize("kinds", [{}, {"page": "INT64"}], ids=["first schema", "declared"])
def test_a_live_query_that_begins_without_rows_keeps_its_schema(tmp_path, kinds):
    """Its first tables are empty; a file that comes later does not change what they are."""
    folder, micros = tmp_path / "in", HOUR * 1_000_000
    folder.mkdir()

    def arrive():
        pages = pa.array([7] * 60 + [8] * 60)
        rows = pa.table({"user": range(120), "page": pages, "at": [2 * micros] * 120})
        pq.write_table(rows, folder / ".new")
        (folder / ".new").rename(folder / "rows.parquet")

    clock = ScriptedClock(events=[(5 * micros // 2, arrive)])
    sinks = [str(tmp_path / "out.sqlite"), str(tmp_path / "out")]
    settings = {"source": str(folder), "live": True, "clock": clock, "sink": sinks}
    run = dps.run(dps.Query(**LIVE, column_types=kinds), **settings, secret=SECRET, options=FIXED)
    before = run.schema
    tables = list(run)

    assert [len(table) > 0 for table in tables] == [False, False, True, True, True, True]
    assert {str(table.schema.remove_metadata()) for table in tables} == {str(before)}
    shown = [7, 8] if kinds else ["7", "8"]
    assert sorted(tables[-1]["page"].to_pylist()) == shown


def test_a_run_keeps_the_types_it_began_with(tmp_path):
    """A restart finds them in the state, whatever the first file says by then."""
    source = tmp_path / "rows.parquet"
    pq.write_table(busy(), source)
    place = {"state": tmp_path / "state", "secret": SECRET, "options": FIXED}
    asked = query_of(every="6 hours")
    run = iter(dps.run(asked, source=str(source), **place))
    first = next(run)
    run.close()
    other = busy()
    other = other.set_column(
        other.column_names.index("key"), "key", other["key"].cast("large_string")
    )
    pq.write_table(other, source)
    rest = list(dps.run(asked, source=str(source), **place))

    assert {str(t.schema.remove_metadata()) for t in rest} == {str(first.schema.remove_metadata())}


def test_a_table_of_another_schema_is_never_published(monkeypatch):
    """The control: were a release to differ, it would stop here and not in a sink."""
    real = ReleaseTables._columns

    def broken(self, sums, *args, **named):
        made = real(self, sums, *args, **named)
        return made if not len(sums) else made.append_column("more", pa.nulls(len(made)))

    monkeypatch.setattr(ReleaseTables, "_columns", broken)
    with pytest.raises(StateError, match=r"have the columns.*and this one has.*not published"):
        dps.run(query_of(), source=busy(), secret=SECRET, options=FIXED).finish()
