"""Releases in Delta Lake tables."""

import json
import os
import signal
import sys
from threading import Lock, Thread

import deltalake
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from dpstream.connectors.delta.sink import DeltaSink
from dpstream.connectors.registry import open_sink
from dpstream.connectors.testing import SinkSuite, UpsertSinkSuite
from dpstream.connectors.testing.suites import release, rows_seen
from dpstream.errors import MissingDependency, StateError
from tests.connectors.test_sinks import RELEASE
from tests.support.processes import kill_this_process, run_in_new_process

pytestmark = pytest.mark.servers


def break_off(place, when):
    """Write a release; killed when it is written and not committed, or committed and not synced."""
    if when == "before the commit":
        deltalake.write_deltalake = kill_this_process
    else:
        DeltaSink._sync = kill_this_process
    open_sink(f"delta:{place}").write("a", 0, 2, release("a", 0, 2))


def rows_of(place, query):
    table = DeltaTable(f"{place}/{query}").to_pyarrow_table()
    return sorted((row["page"], row["count"]) for row in table.to_pylist())


class TestDeltaSink(SinkSuite):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.place = tmp_path / "out"

    def open(self):
        return open_sink(f"delta:{self.place}/")

    def visible_rows(self, query):
        return rows_of(self.place, query)


class TestDeltaUpserts(UpsertSinkSuite):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.place = tmp_path / "out"

    def open(self):
        return open_sink(f"delta:{self.place}/")

    def visible_rows(self, query):
        return rows_of(self.place, query)


def test_columns_and_commits(tmp_path):
    """Types that Delta lacks are widened; each release is one commit that says which it is."""
    sink = open_sink(f"delta:{tmp_path}")
    sink.write("my clicks", 3, 17, RELEASE)
    sink.write("my clicks", 3, 18, RELEASE)
    table = DeltaTable(f"{tmp_path}/my@20clicks")

    found = table.to_pyarrow_table()
    assert found.column_names == ["window", "release", *RELEASE.column_names]
    assert sorted(map(str, found["big"].to_pylist())) == sorted(["0", "None", str(2**64 - 1)] * 2)
    assert found.schema.field("time").type == pa.timestamp("us", "UTC")
    assert table.version() == 1
    assert table.history(1)[0]["window"] == "3"
    assert table.transaction_version("dpstream release 3") == 18


@pytest.mark.parametrize("when", ["before the commit", "after the commit"])
def test_killed_beside_the_commit(tmp_path, when):
    """The next run finds the release or writes it; it is there once."""
    sink = open_sink(f"delta:{tmp_path}")
    sink.write("a", 0, 1, release("a", 0, 1))
    assert run_in_new_process(break_off, tmp_path, when) == -signal.SIGKILL
    there = rows_of(tmp_path, "a") == rows_seen(release("a", 0, 1), release("a", 0, 2))
    assert there == (when == "after the commit")
    sink = open_sink(f"delta:{tmp_path}")
    sink.write("a", 0, 2, release("a", 0, 2))

    assert rows_of(tmp_path, "a") == rows_seen(release("a", 0, 1), release("a", 0, 2))


def test_two_writers_of_one_release(tmp_path):
    """Of two processes that commit at once one is refused; nothing is there twice."""
    open_sink(f"delta:{tmp_path}").write("a", 0, 0, release("a", 0, 0))
    refused = []

    def write():
        sink = DeltaSink(tmp_path)
        sink._lock = Lock()  # as in another process
        for trigger in range(1, 8):
            table = release("a", 0, trigger)
            while True:
                try:
                    sink.write("a", 0, trigger, table)
                    break
                except StateError as problem:
                    refused.append(str(problem))

    writers = [Thread(target=write) for _ in range(2)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()

    assert rows_of(tmp_path, "a") == rows_seen(*(release("a", 0, t) for t in range(8)))


def test_marks_do_not_pile_up(tmp_path):
    """Windows far apart share one; what it cannot tell is refused, not guessed."""
    sink = open_sink(f"delta:{tmp_path}")
    sink.write("a", 7, 1, release("a", 7, 1))
    sink.write("a", 65536 + 7, 1, release("a", 65536 + 7, 1))
    sink.write("a", 65536 + 7, 1, release("a", 65536 + 7, 1, rows=9))

    assert len(rows_of(tmp_path, "a")) == 6
    with pytest.raises(StateError, match="cannot tell whether it has this one"):
        sink.write("a", 7, 2, release("a", 7, 2))


def test_what_cannot_be_written_is_named(tmp_path, monkeypatch):
    """Other columns; a folder that is not a table; the package that is not there."""
    sink = open_sink(f"delta:{tmp_path}")
    sink.write("a", 0, 1, release("a", 0, 1))
    with pytest.raises(StateError, match=r"cannot be written: .*nothing is lost"):
        sink.write("a", 0, 2, release("a", 0, 2).drop_columns(["page"]))
    log = tmp_path / "a" / "_delta_log" / f"{0:020d}.json"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum("add" in line for line in lines) == 1
    os.truncate(log, 20)
    with pytest.raises(StateError, match="cannot be written"):
        open_sink(f"delta:{tmp_path}").write("a", 0, 2, release("a", 0, 2))
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(MissingDependency, match=r"pip install 'dpstream\[delta\]'"):
        open_sink(f"delta:{tmp_path}")
