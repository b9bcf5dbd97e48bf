"""`output="upsert"`: a table that holds the newest release of each window."""

import json
import re
import signal
import sqlite3
from collections import defaultdict
from contextlib import closing

import duckdb
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.cli import main
from dpstream.connectors.database import DatabaseSink
from dpstream.connectors.registry import open_sink
from dpstream.connectors.testing import UpsertSinkSuite
from dpstream.errors import InvalidInput, InvalidParameter, StateError
from dpstream.session.pipeline import load_pipeline
from tests.support import pipelines, runs
from tests.support.processes import kill_this_process, run_in_new_process

RARE = dps.sql(
    """SELECT WITH DIFFERENTIAL_PRIVACY
         OPTIONS (epsilon = 20, delta = 1e-5, privacy_unit_column = user, time_unit = 's',
                  arrival_column = came, start = '1970-01-01', end = '1970-01-01T06:00',
                  allowed_lateness = INTERVAL '1' HOUR, max_groups_contributed = 3,
                  max_rows_per_group = 2)
         page, window_start, COUNT(*) AS clicks
       FROM TUMBLE(log, DESCRIPTOR(at), INTERVAL '3' HOUR) GROUP BY page, window_start
       HAVING clicks < 35
       EMIT EVERY INTERVAL '1' HOUR""",
    name="rare",
)
"""Pages go when they have been read often."""


class TestSqliteUpserts(UpsertSinkSuite):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.place = tmp_path / "out.sqlite"

    def open(self):
        return open_sink(self.place)

    def visible_rows(self, query):
        return sorted(sqlite3.connect(self.place).execute(f'SELECT page, count FROM "{query}"'))


class TestDuckdbUpserts(TestSqliteUpserts):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.place = tmp_path / "out.duckdb"

    def visible_rows(self, query):
        with duckdb.connect(self.place) as connection:
            return sorted(connection.execute(f'SELECT page, count FROM "{query}"').fetchall())


def sinks(place):
    return [f"jsonl:{place / 'out'}/", f"upsert:{place / 'out.sqlite'}"]


def start_killed(place):
    """A run that is killed with the rows of its fifth release in the table, not yet committed."""
    mark, calls = DatabaseSink.mark_done, []

    def counted(self, *release):
        calls.append(release)
        (kill_this_process if len(calls) == 5 else mark)(self, *release)

    DatabaseSink.mark_done = counted
    runs.start(place, RARE, sink=sinks(place)).finish()


def every_release(place):
    """The rows of each release, by window and trigger."""
    found = {}
    for path in (place / "out").glob("*.jsonl"):
        window, trigger = map(int, re.search(r"w(\d+)-t(\d+)", path.name).groups())
        found[window, trigger] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def newest(place):
    """(window, page, clicks) of each window's newest release."""
    last = {}
    for (window, _), rows in sorted(every_release(place).items()):
        last[window] = sorted((window, row["page"], row["clicks"]) for row in rows)
    return sorted(row for rows in last.values() for row in rows)


def table(place):
    with sqlite3.connect(place / "out.sqlite") as db:
        return sorted(db.execute('SELECT "window", page, clicks FROM rare'))


def test_the_table_of_a_run_that_was_killed(tmp_path):
    """It is that of an unbroken run, and holds the newest release of each window alone."""
    for name in ("whole", "killed"):
        runs.write(tmp_path / name, runs.table())
    runs.start(tmp_path / "whole", RARE, sink=sinks(tmp_path / "whole")).finish()
    assert run_in_new_process(start_killed, tmp_path / "killed") == -signal.SIGKILL
    before = table(tmp_path / "killed")
    assert before != newest(tmp_path / "killed")  # its file is there, its rows are not
    runs.start(tmp_path / "killed", RARE, sink=sinks(tmp_path / "killed")).finish()

    assert table(tmp_path / "killed") == table(tmp_path / "whole") == newest(tmp_path / "whole")
    shown = defaultdict(set)
    for (window, _), rows in every_release(tmp_path / "whole").items():
        shown[window] |= {row["page"] for row in rows}
    assert sum(map(len, shown.values())) > len(table(tmp_path / "whole"))  # some went again


def test_two_queries_of_a_pipeline(tmp_path):
    """`output` in the file; each query has a table of its own, with its last releases."""
    lines = pipelines.rows(users=300)
    text = pipelines.PIPELINE.replace('to = ["out/"]', 'to = ["out.sqlite"]\noutput = "upsert"')
    path = pipelines.write(tmp_path, lines, text)
    assert load_pipeline(path).sinks == (f"upsert:{tmp_path / 'out.sqlite'}",)
    with pytest.raises(SystemExit) as left:
        main(["run", str(path)])
    assert left.value.code == 0

    with sqlite3.connect(tmp_path / "out.sqlite") as db:
        found = db.execute('SELECT "window", count(DISTINCT release) FROM pages GROUP BY 1')
        assert sorted(found) == [(0, 1), (1, 1)]
        assert db.execute("SELECT count(*), count(DISTINCT upsert_key) FROM changed").fetchone()[0]
    path.write_text(text.replace('"upsert"', '"update"'))
    with pytest.raises(InvalidInput, match="output must be one of append, upsert; got 'update'"):
        load_pipeline(path)


@pytest.mark.parametrize("public", [None, ["/1", "/2"]])
def test_rows_of_several_sets_of_keys(tmp_path, public):
    """Those of a set and its rest, or of two sets, may have the same keys: none is lost."""
    query = runs.query(
        name="sets", keys=["page"], grouping_sets=[["page"], []], public_groups=public, delta=1e-5
    )
    runs.write(tmp_path, runs.table())
    runs.start(tmp_path, query, sink=sinks(tmp_path)).finish()
    last = {window: rows for (window, _), rows in sorted(every_release(tmp_path).items())}
    with sqlite3.connect(tmp_path / "out.sqlite") as db:
        (kept,) = db.execute("SELECT count(*) FROM sets").fetchone()
    assert kept == sum(map(len, last.values()))


def test_rows_with_the_same_keys_are_refused(tmp_path):
    """One of them would be lost."""
    with closing(open_sink(f"upsert:{tmp_path / 'out.sqlite'}")) as sink:
        sink.tell_keys("a", ["page"])
        with pytest.raises(InvalidInput, match="1 of window 0 have the keys of others"):
            sink.write("a", 0, 1, pa.table({"page": ["x", "y", "x"], "count": [1, 2, 3]}))


def test_what_cannot_be_upserted_is_refused(tmp_path):
    """Before a row is read: files, a query whose rows have no key, a table of every release."""
    runs.write(tmp_path, runs.table(rows=60))
    with pytest.raises(InvalidParameter, match="cannot replace releases"):
        runs.start(tmp_path, RARE, output="upsert")
    with pytest.raises(InvalidParameter, match="output must be one of append, upsert"):
        runs.start(tmp_path, RARE, output="update")
    with pytest.raises(InvalidParameter, match="there is no sink"):
        runs.start(tmp_path, RARE, output="upsert", sink=None)
    file = tmp_path / "out.sqlite"
    first = iter(runs.start(tmp_path, RARE, sink=file))
    next(first)
    first.close()
    for state, words in (
        ("state", r"has the columns .* release has .*upsert_key"),
        ("other", "another run"),
    ):
        again = {"sink": file, "output": "upsert", "state": tmp_path / state}
        with pytest.raises(StateError, match=words):
            runs.start(tmp_path, RARE, **again).finish()
