"""Iceberg tables: releases go into them, and rows come from them."""

import os
import signal
import sys
from threading import Lock, Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.types import DoubleType

import dpstream as dps
from dpstream.connectors.iceberg import sink as iceberg_sink
from dpstream.connectors.registry import open_sink, open_source
from dpstream.connectors.testing import SinkSuite, SourceSuite, UpsertSinkSuite
from dpstream.connectors.testing.suites import release, rows_seen
from dpstream.errors import InvalidInput, InvalidParameter, MissingDependency, RowsLost, StateError
from tests.connectors.test_sinks import RELEASE
from tests.servers.test_delta_source import QUERY, clicks, rows_of
from tests.support.processes import kill_this_process, run_in_new_process

pytestmark = pytest.mark.servers

SCHEMA = pa.schema([("user", pa.string()), ("page", pa.string())])


def catalog_in(place):
    return load_catalog(
        "local", uri=f"sqlite:///{place}/catalog.db", warehouse=f"{place}/warehouse"
    )


def uri(place, path):
    mark = "&" if "?" in path else "?"
    return (
        f"iceberg://local/{path}{mark}uri=sqlite:///{place}/catalog.db&warehouse={place}/warehouse"
    )


def put(place, rows):
    catalog = catalog_in(place)
    catalog.create_namespace_if_not_exists("logs")
    table = catalog.create_table_if_not_exists("logs.clicks", SCHEMA)
    table.append(pa.Table.from_pylist(rows, schema=SCHEMA))
    catalog.close()


def published(place, query):
    table = catalog_in(place).load_table(f"out.{query}").scan().to_arrow()
    return sorted((row["page"], row["count"]) for row in table.to_pylist())


def change(place, work):
    work(catalog_in(place).load_table("logs.clicks"))


class TestIcebergSink(SinkSuite):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.place = tmp_path

    def open(self):
        return open_sink(uri(self.place, "out"))

    def visible_rows(self, query):
        return published(self.place, query)


class TestIcebergUpserts(UpsertSinkSuite):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.place = tmp_path

    def open(self):
        return open_sink(uri(self.place, "out"))

    def visible_rows(self, query):
        return published(self.place, query)


class TestIcebergSource(SourceSuite):
    growing = True

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.place = tmp_path

    def open(self):
        catalog = catalog_in(self.place)
        catalog.create_namespace_if_not_exists("logs")
        catalog.create_table_if_not_exists("logs.clicks", SCHEMA)
        return open_source(uri(self.place, "logs/clicks"))

    def put(self, rows):
        put(self.place, rows)

    def foreign_positions(self):
        return [17, "x", [1, 2], ["a", "b", "c", "d"], ["another table", 0, 1, 5], {"next": 3}]


@pytest.fixture
def place(tmp_path):
    """A table with two snapshots of two rows each."""
    put(tmp_path, clicks(0, 2))
    put(tmp_path, clicks(2, 2))
    return tmp_path


def read_all(source, position=None):
    """Every row from a position on, and where that ends."""
    (name,) = source.partitions()
    seen, done = [], False
    while not done:
        batch = source.read(name, position)
        position, seen, done = batch.position, [*seen, *rows_of(batch)], batch.done
    return seen, position


def break_off(place):
    """Write a release; killed when the catalog has it and its files are not synced."""
    iceberg_sink._sync = kill_this_process
    open_sink(uri(place, "out")).write("a", 0, 2, release("a", 0, 2))


def test_killed_beside_the_commit(tmp_path):
    """The next run finds the release; it is there once."""
    sink = open_sink(uri(tmp_path, "out"))
    sink.write("a", 0, 1, release("a", 0, 1))
    assert run_in_new_process(break_off, tmp_path) == -signal.SIGKILL
    assert published(tmp_path, "a") == rows_seen(release("a", 0, 1), release("a", 0, 2))
    sink.write("a", 0, 2, release("a", 0, 2))

    assert published(tmp_path, "a") == rows_seen(release("a", 0, 1), release("a", 0, 2))


def test_two_writers_of_one_release(tmp_path):
    """Of two processes that commit at once one is refused; nothing is there twice."""
    open_sink(uri(tmp_path, "out")).write("a", 0, 0, release("a", 0, 0))
    refused = []

    def write():
        sink = open_sink(uri(tmp_path, "out"))
        sink._lock = Lock()  # as in another process
        for trigger in range(1, 6):
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

    assert published(tmp_path, "a") == rows_seen(*(release("a", 0, t) for t in range(6)))


def test_columns_that_iceberg_lacks_are_widened(tmp_path):
    """As in Delta tables; every commit says in the table which release it is."""
    sink = open_sink(uri(tmp_path, "out"))
    sink.check("my clicks", RELEASE.schema)
    sink.write("my clicks", 3, 17, RELEASE)
    table = catalog_in(tmp_path).load_table("out.my@20clicks")

    found = table.scan().to_arrow()
    assert found.column_names == ["window", "release", *RELEASE.column_names]
    assert sorted(map(str, found["big"].to_pylist())) == sorted(["0", "None", str(2**64 - 1)])
    assert table.properties["dpstream release 3"] == "17"


def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch):
    """Other columns, another output, another run, and a package that is not there."""
    sink = open_sink(uri(tmp_path, "out"))
    sink.write("a", 0, 1, release("a", 0, 1))
    with pytest.raises(StateError, match=r"has the columns .* nothing is lost"):
        sink.write("a", 0, 2, release("a", 0, 2).drop_columns(["page"]))
    with pytest.raises(StateError, match="was written with output = 'append'"):
        sink.upsert("a", 0, 2, release("a", 0, 2), ["1", "2", "3"])
    with pytest.raises(StateError, match="another run"):
        sink.fence("a", "another run")
    assert published(tmp_path, "a") == rows_seen(release("a", 0, 1))
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    with pytest.raises(MissingDependency, match=r"pip install 'dpstream\[iceberg\]'"):
        open_sink(uri(tmp_path, "out"))


def test_columns_that_are_added_are_null_before(place):
    """Types are those of the newest version."""
    source = open_source(uri(place, "logs/clicks"))
    first = source.read("clicks", None)

    def add(table):
        with table.update_schema() as schema:
            schema.add_column("price", DoubleType())

    change(place, add)
    row = pa.table({"user": ["u9"], "page": ["home"], "price": [1.5]})
    change(place, lambda table: table.append(row))
    second = source.read("clicks", first.position)
    third = source.read("clicks", second.position)

    assert source.columns("clicks")["price"] == pa.float64()
    assert second.table["price"].to_pylist() == [None, None]
    assert third.table["price"].to_pylist() == [1.5]


@pytest.mark.parametrize(
    ("start", "users"), [("earliest", 4), ("latest", 0), ("1", 4), ("2", 2), ("3", 0)]
)
def test_where_it_starts(place, start, users):
    """At the table's first version, behind its last one, or at one that is named."""
    source = open_source(uri(place, f"logs/clicks?start={start}"))
    seen, position = read_all(source)

    assert len(seen) == users
    put(place, clicks(10, 1))
    assert read_all(source, position)[0] == [("u10", "home")]


@pytest.mark.parametrize("what", ["delete", "overwrite"])
def test_a_version_that_changes_rows(place, what):
    """It stops the run, with the option that goes on; others are read."""
    if what == "delete":
        change(place, lambda table: table.delete("user == 'u1'"))
    else:
        rows = pa.Table.from_pylist(clicks(1, 1, page="news"), schema=SCHEMA)
        change(place, lambda table: table.overwrite(rows, "user == 'u1'"))
    put(place, clicks(7, 1))
    source = open_source(uri(place, "logs/clicks"))
    before = source.read("clicks", source.read("clicks", None).position)
    with pytest.raises(InvalidInput, match=r"version 3 .* (deletes|changes) .*changes=inserts"):
        source.read("clicks", before.position)

    passing = open_source(uri(place, "logs/clicks?changes=inserts"))
    seen, _ = read_all(passing, before.position)
    assert ("u7", "home") in seen
    assert ("u0", "home") not in seen  # a file that was written anew holds old rows, too


def test_rows_that_are_gone_are_an_error(place):
    """Data that was removed, snapshots that expired, a table that was rolled back or made anew."""
    source = open_source(uri(place, "logs/clicks"))
    first = source.read("clicks", None).position
    _, last = read_all(source)
    put(place, clicks(4, 1))
    snapshots = catalog_in(place).load_table("logs.clicks").snapshots()
    change(
        place,
        lambda t: t.manage_snapshots().rollback_to_snapshot(snapshots[0].snapshot_id).commit(),
    )
    with pytest.raises(RowsLost, match="ends at version 1 now, and was read up to 2"):
        source.read("clicks", last)
    put(place, clicks(5, 1))
    with pytest.raises(RowsLost, match="has no version 2 any more"):
        source.read("clicks", last)
    assert read_all(source, first)[0] == [("u5", "home")]

    put(place, clicks(6, 1))
    change(
        place, lambda t: t.maintenance.expire_snapshots().by_id(snapshots[0].snapshot_id).commit()
    )
    with pytest.raises(RowsLost, match="has dropped the versions 1 to"):
        source.read("clicks", None)
    catalog_in(place).drop_table("logs.clicks")
    with pytest.raises(RowsLost, match="is gone"):
        source.read("clicks", last)
    put(place, clicks(0, 2))
    with pytest.raises(RowsLost, match="another table"):
        source.read("clicks", last)


def test_data_that_was_removed_is_an_error(place):
    """A snapshot whose file is not there any more."""
    source = open_source(uri(place, "logs/clicks"))
    for file in (place / "warehouse").rglob("*.parquet"):
        if pq.read_table(file)["user"].to_pylist() == ["u2", "u3"]:
            os.remove(file)
    first = source.read("clicks", None).position
    with pytest.raises(RowsLost, match=r"version 2 .* cannot be read"):
        source.read("clicks", first)


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("logs/clicks?start=now", InvalidParameter, "start must be earliest, latest or the number"),
        ("logs/clicks?until=x", InvalidParameter, "until must be the number of a version"),
        ("logs/clicks?until=9", InvalidInput, "ends at version 2, before until=9"),
        ("logs/clicks?untill=1", InvalidParameter, "did you mean 'until'"),
        ("logs", InvalidParameter, "must be like iceberg://CATALOG/NAMESPACE/TABLE"),
        ("logs/nothing", InvalidInput, "is no table that can be read"),
    ],
)
def test_options_that_cannot_be(place, path, error, words):
    """Each is refused with what it should be."""
    with pytest.raises(error, match=words):
        open_source(uri(place, path))


def test_catalogs_that_cannot_be():
    """One that nobody has configured, and one whose password stands in the address."""
    with pytest.raises(InvalidParameter, match="there is no such catalog"):
        open_source("iceberg://nobody/logs/clicks")
    with pytest.raises(InvalidParameter, match="must not hold a password"):
        open_source("iceberg://local/logs/clicks?uri=postgresql://ana:secret@127.0.0.1/lake")


def publish(place, killed=False):
    """Releases of the table's two versions; killed when the release is committed."""
    if killed:
        iceberg_sink._sync = kill_this_process
    list(
        dps.run(
            dps.sql(QUERY, name="pages"),
            source=uri(place, "logs/clicks?until=2"),
            sink=uri(place, "out"),
            state=f"{place}/state",
        )
    )


def test_from_table_to_table_through_a_kill(tmp_path):
    """Killed when a release was committed and not acknowledged: it is there once, and the same."""
    put(tmp_path, clicks(0, 400))
    put(tmp_path, clicks(400, 300, page="news"))
    assert run_in_new_process(publish, tmp_path, True) == -signal.SIGKILL
    before = catalog_in(tmp_path).load_table("out.pages").scan().to_arrow().sort_by("page")
    publish(tmp_path)

    after = catalog_in(tmp_path).load_table("out.pages")
    assert len(after.snapshots()) == 1
    assert after.scan().to_arrow().sort_by("page") == before
    assert before["page"].to_pylist() == ["home", "news"]
    assert abs(before["visitors"][0].as_py() - 400) < 60  # 8 deviations and more
