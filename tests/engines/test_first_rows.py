"""Before a run is charged: rows that are all useless and sinks that would refuse stop it."""

from datetime import UTC, datetime, timedelta

import duckdb
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.connectors.testing import ListSource
from dpstream.engines.clock import SystemClock
from dpstream.errors import InvalidInput, InvalidParameter, StateError
from dpstream.records import Batch
from dpstream.session.first_rows import sample_rows
from tests.support.live_runs import HOUR, ScriptedClock

START = datetime(2024, 5, 1, tzinfo=UTC)
TIMES = [START + timedelta(minutes=4 * n) for n in range(300)]
SQL = """SELECT WITH DIFFERENTIAL_PRIVACY
OPTIONS (epsilon = 5, delta = 1e-6, privacy_unit_column = user, max_groups_contributed = 1,
         start = '2024-05-01', end = '2024-05-02'{})
page, window_start, {} FROM TUMBLE(t, DESCRIPTOR(at), INTERVAL '1' DAY) GROUP BY page, window_start
"""
COUNT = "COUNT(*) AS visits"


def rows(at, **more):
    """300 rows of 100 users within a day, with times as `at` writes them."""
    columns = {
        "user": [f"u{n % 100}" for n in range(300)],
        "page": ["home"] * 300,
        "at": [at(time) for time in TIMES],
        "day": [str(time.date()) for time in TIMES],
    }
    return pa.table(columns | more)


def written(folder, table):
    """A CSV file: all its columns are text."""
    path = folder / "clicks.csv"
    lines = [",".join(map(str, row.values())) for row in table.to_pylist()]
    path.write_text("\n".join([",".join(table.column_names), *lines, ""]))
    return path


def seconds(time):
    return int(time.timestamp())


MISTAKES = {
    "milliseconds as seconds": (
        lambda t: seconds(t) * 1000,
        ", time_unit = 's'",
        "time_unit = 'ms'",
    ),
    "seconds as milliseconds": (seconds, ", time_unit = 'ms'", "time_unit = 's'"),
    "nanoseconds": (lambda t: seconds(t) * 10**9, ", time_unit = 'us'", "look like nanoseconds"),
    "numbers without a unit": (seconds, "", "time_unit = 's'"),
    "another format": (lambda t: t.strftime("%d/%m/%Y %H:%M"), "", "look like '99/99/9999 99:99'"),
    "texts with a unit": (lambda t: t.isoformat(), ", time_unit = 's'", "leave time_unit out"),
    "another year": (lambda t: t.replace(year=2023).isoformat(), "", "set start and end"),
    "another zone": (
        lambda t: (START + timedelta(hours=24) + (t - START) / 4).isoformat(),
        "",
        "another time_zone",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_with_times_are_refused_and_cost_nothing(tmp_path, name):
    """Each published empty tables and spent all of epsilon; now the fix is named before that."""
    at, options, fix = MISTAKES[name]
    path, book = written(tmp_path, rows(at)), dps.Ledger()
    query = dps.sql(SQL.format(options, COUNT))
    place = {"source": path, "ledger": book, "state": tmp_path / "state"}
    with pytest.raises(InvalidInput) as refused:
        dps.run(query, **place)

    assert fix in str(refused.value)
    assert "nothing was charged" in str(refused.value)
    assert not book.report()
    assert not (tmp_path / "state").exists()


def test_the_sum_of_a_date_is_refused(tmp_path):
    path = written(tmp_path, rows(datetime.isoformat))
    total = "SUM(day, contribution_bounds_per_row => (0, 10)) AS days"
    with pytest.raises(InvalidInput, match=r"'day' must hold numbers.*dates"):
        dps.run(dps.sql(SQL.format("", total)), source=path, ledger=dps.Ledger())


def test_anyway_runs_it(tmp_path):
    """It publishes an empty table and is charged: what is public is the same with any rows."""
    path, book = written(tmp_path, rows(seconds)), dps.Ledger()
    query = dps.sql(SQL.format("", COUNT))
    tables = list(dps.run(query, source=path, ledger=book, anyway=True))

    assert [len(table) for table in tables] == [0]
    assert len(book.report()[0]["spent_on"]) == 1


def test_one_row_that_can_be_used_is_enough(tmp_path):
    """Over files every row is looked at before they stop anything."""
    good = rows(datetime.isoformat).slice(0, 1)
    bad = pa.concat_tables([rows(lambda time: "?")] * 5)
    path = written(tmp_path, pa.concat_tables([bad, good]))
    tables = list(dps.run(dps.sql(SQL.format("", COUNT)), source=path, ledger=dps.Ledger()))

    assert len(tables) == 1


def test_a_run_that_is_charged_is_not_looked_at(tmp_path):
    """The file has changed since: what that means is not for this check to say."""
    query = dps.sql(SQL.format("", COUNT))
    place = {"source": tmp_path / "clicks.csv", "state": tmp_path / "state"}
    place |= {"ledger": tmp_path / "book"}
    written(tmp_path, rows(datetime.isoformat))
    dps.run(query, **place).finish()
    written(tmp_path, rows(lambda time: "?"))

    assert list(dps.run(query, **place)) == []
    with pytest.raises(InvalidInput, match="would spend its budget for nothing"):
        dps.run(query, **place | {"state": tmp_path / "other", "ledger": dps.Ledger()})


def test_of_several_none_begins(tmp_path):
    """A query that would be for nothing is found before another one is charged."""
    path, book = written(tmp_path, rows(datetime.isoformat)), dps.Ledger()
    good = dps.sql(SQL.format("", COUNT), name="good")
    bad = dps.sql(
        SQL.format("", "SUM(day, contribution_bounds_per_row => (0, 10)) AS days"), name="bad"
    )
    book.open("stream", good.promise(epsilon=20, delta=1e-5))
    with pytest.raises(InvalidInput, match="the query 'bad' would spend its budget for nothing"):
        dps.run_all([good, bad], source=path, ledger=book)

    assert not book.report()[0]["spent_on"]
    runs = dps.run_all([good, bad], source=path, ledger=book, anyway=["bad"])
    assert {name: len(tables) for name, tables in runs.collect().items()} == {"good": 1, "bad": 1}


class Live(ListSource):
    """What is there by now, of a source that goes on."""

    bounded = False


def live_sample(table, count, **options):
    asked = {
        "privacy_unit_column": "user",
        "epsilon": 1,
        "delta": 1e-6,
        "window": dps.Tumble("1 hour"),
    }
    asked |= {"time_column": "at", "max_groups_contributed": 1}
    query = dps.Query(**asked | options).starting(SystemClock().now())
    source = Live([Batch(table=table.slice(0, count), position=None, done=False)])
    now = SystemClock().now()
    return sample_rows(query, source, now=now, most=1000, live=True)


@pytest.mark.parametrize(
    ("at", "count", "options", "useless"),
    [
        (datetime.isoformat, 300, {}, False),  # older rows of a topic
        (seconds, 300, {"time_unit": "ms"}, True),
        (lambda time: "?", 300, {}, True),
        (lambda time: "?", 9, {}, False),  # a client or two must not stop a run
        (lambda time: seconds(time) * 1000, 300, {"time_unit": "s"}, True),
    ],
)
def test_rows_of_a_live_source(at, count, options, useless):
    """Old rows are no mistake there, and a few bad ones prove none."""
    assert live_sample(rows(at), count, **options).useless == useless


def test_no_rows_are_no_mistake(tmp_path):
    empty = rows(datetime.isoformat).slice(0, 0)
    query = dps.sql(SQL.format("", COUNT))

    assert len(list(dps.run(query, source=empty, ledger=dps.Ledger()))) == 1


def test_a_sink_that_would_refuse_is_tried_before_the_charge(tmp_path):
    """A table that is not the sink's, and a name that it keeps for itself."""
    place = tmp_path / "out.duckdb"
    with duckdb.connect(str(place)) as database:
        database.execute("CREATE TABLE visits (x INTEGER)")
    for name, kind, words in (
        ("visits", StateError, "already exists"),
        ("dpstream_x", InvalidParameter, "sink's own"),
    ):
        book, query = dps.Ledger(), dps.sql(SQL.format("", COUNT), name=name)
        with pytest.raises(kind, match=words):
            dps.run(query, source=rows(lambda t: t), sink=place, ledger=book)
        assert not book.report()
    query = dps.sql(SQL.format("", COUNT), name="fine")
    dps.run(query, source=rows(lambda t: t), sink=place, ledger=dps.Ledger()).finish()
    with duckdb.connect(str(place)) as database:
        names = {row[0] for row in database.execute("SHOW TABLES").fetchall()}
    assert names == {"visits", "fine", "dpstream_queries", "dpstream_releases"}


def test_a_live_directory_whose_files_all_lack_a_column_costs_nothing(tmp_path):
    """Its next files would lack it, too; of files that are damaged the next one may be whole."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.csv", "b.csv"):
        written(folder, rows(lambda t: t.isoformat())).rename(folder / name)
    query = dps.sql(SQL.format("", COUNT).replace("page", "pge"))
    book = tmp_path / "book"
    with pytest.raises(InvalidInput, match="has no column 'pge'"):
        dps.run(query, source=folder, live=True, state=tmp_path / "s", ledger=book).open()
    assert not book.exists() or dps.Ledger(book).report()[0]["spent_on"] == []


def over(source, **more):
    """A live query of one day of 2024, which was over long ago."""
    query = dps.sql(SQL.format("", COUNT))
    return dps.run(query, source=source, live=True, **more)


def test_a_live_query_that_was_over_before_it_began_is_refused(tmp_path):
    """All its windows would be empty, and charged; what has begun goes on."""
    (tmp_path / "in").mkdir()
    written(tmp_path / "in", rows(datetime.isoformat))
    book = dps.Ledger()
    with pytest.raises(InvalidInput, match=r"2024-05-02.*without live.*nothing was charged"):
        over(tmp_path / "in", ledger=book, state=tmp_path / "state")

    assert not book.report()
    assert not (tmp_path / "state").exists()
    assert [len(t) for t in over(tmp_path / "in", ledger=book, anyway=True)] == [0]


def test_a_live_run_that_has_begun_ends_after_its_range(tmp_path):
    """Broken off within its range, and started again when that is over: it was charged before."""
    (tmp_path / "in").mkdir()
    how = {"ledger": dps.Ledger(), "state": tmp_path / "state", "secret": b"s" * 32}
    noon = ScriptedClock(int(START.timestamp() * 1e6) + 12 * HOUR)
    begun = over(tmp_path / "in", clock=noon, **how)
    begun.open()
    begun.stop()
    assert list(begun) == []
    assert len(how["ledger"].report()[0]["spent_on"]) == 1
    written(tmp_path / "in", rows(datetime.isoformat))
    tables = list(over(tmp_path / "in", clock=ScriptedClock(noon.time + 24 * HOUR), **how))

    assert len(tables) == 1
    assert len(how["ledger"].report()[0]["spent_on"]) == 1


def test_history_counts_in_a_range_that_is_over(tmp_path):
    """Its rows go by event time, whatever the clock says."""
    (tmp_path / "in").mkdir()
    history = written(tmp_path, rows(datetime.isoformat))
    tables = list(over(tmp_path / "in", history=history, ledger=dps.Ledger()))

    assert [len(table) for table in tables] == [1]
