"""Iceberg tables: releases go into them, and rows come from them."""

import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from pyiceberg.catalog import load_catalog
from pyiceberg.types import DoubleType

import dpstream as dps
from dpstream.connectors.iceberg import sink as iceberg_sink
from dpstream.connectors.registry import open_sink, open_source
from dpstream.connectors.testing import ServerSinkSuite, SinkSuite, SourceSuite, UpsertSinkSuite
from dpstream.connectors.testing.suites import release, rows_seen
from dpstream.errors import (
    InvalidInput,
    InvalidParameter,
    MissingDependency,
    RowsLost,
    ServerUnreachable,
    StateError,
)
from tests.connectors.test_sinks import RELEASE
from tests.servers.test_delta_source import QUERY, clicks, rows_of
from tests.support.processes import kill_this_process, run_in_new_process, until

pytestmark = pytest.mark.servers

SCHEMA = pa.schema([("user", pa.string()), ("page", pa.string())])


class Lake(NamedTuple):
    """A catalog, a folder of the test's own, and names of namespaces that no other test has."""

    folder: Path
    given: dict[str, str]
    suffix: str

    def uri(self, path):
        namespace, slash, rest = path.partition("?")[0].partition("/")
        query = path.partition("?")[2]
        where = f"iceberg://local/{self.name(namespace)}{slash}{rest}"
        more = [f"{name}={value}" for name, value in self.given.items()]
        return f"{where}?{'&'.join([query, *more] if query else more)}"

    def name(self, namespace):
        return namespace + self.suffix

    def catalog(self):
        return load_catalog("local", **self.given)

    def table(self, name):
        namespace, _, table = name.partition(".")
        return self.catalog().load_table((self.name(namespace), table))


def sql_lake(folder):
    given = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"{folder}/warehouse"}
    return Lake(folder, given, "")


@pytest.fixture
def served(iceberg, tmp_path):
    """Iceberg's own REST catalog."""
    return Lake(tmp_path, {"uri": iceberg.address}, f"_{tmp_path.name}")


@pytest.fixture(params=["sql", "rest"])
def lake(request, tmp_path):
    """A catalog in SQLite; the REST catalog."""
    return sql_lake(tmp_path) if request.param == "sql" else request.getfixturevalue("served")


def put(lake, rows):
    catalog = lake.catalog()
    catalog.create_namespace_if_not_exists(lake.name("logs"))
    table = catalog.create_table_if_not_exists((lake.name("logs"), "clicks"), SCHEMA)
    table.append(pa.Table.from_pylist(rows, schema=SCHEMA))
    catalog.close()


def published(lake, query):
    table = lake.table(f"out.{query}").scan().to_arrow()
    return sorted((row["page"], row["count"]) for row in table.to_pylist())


def end(*_, **__):
    raise SystemExit


def change(lake, work):
    work(lake.table("logs.clicks"))


class TestIcebergSink(SinkSuite):
    @pytest.fixture(autouse=True)
    def _lake(self, tmp_path):
        self.lake = sql_lake(tmp_path)

    def open(self):
        return open_sink(self.lake.uri("out"))

    def visible_rows(self, query):
        return published(self.lake, query)


class TestIcebergServed(ServerSinkSuite):
    @pytest.fixture(autouse=True)
    def _lake(self, served, iceberg):
        self.lake, self.away = served, iceberg.away

    def away(self):
        raise AssertionError("set by the fixture")

    def open(self):
        return open_sink(self.lake.uri("out"))

    def impatient(self):
        return open_sink(self.lake.uri("out?patience=0.3"))

    def break_off(self, query, window, trigger, table):
        sink = self.open()
        sink._catalog.commit_table = end  # its files are there
        with pytest.raises(SystemExit):
            sink.write(query, window, trigger, table)

    def visible_rows(self, query):
        return published(self.lake, query)


class TestIcebergUpserts(UpsertSinkSuite):
    @pytest.fixture(autouse=True)
    def _lake(self, lake):
        self.lake = lake

    def open(self):
        return open_sink(self.lake.uri("out"))

    def visible_rows(self, query):
        return published(self.lake, query)


class TestIcebergSource(SourceSuite):
    growing = True

    @pytest.fixture(autouse=True)
    def _lake(self, lake):
        self.lake = lake

    def open(self):
        catalog = self.lake.catalog()
        catalog.create_namespace_if_not_exists(self.lake.name("logs"))
        catalog.create_table_if_not_exists((self.lake.name("logs"), "clicks"), SCHEMA)
        return open_source(self.lake.uri("logs/clicks"))

    def put(self, rows):
        put(self.lake, rows)

    def foreign_positions(self):
        return [17, "x", [1, 2], ["a", "b", "c", "d"], ["another table", 0, 1, 5], {"next": 3}]


@pytest.fixture
def filled(lake):
    """A table with two snapshots of two rows each."""
    put(lake, clicks(0, 2))
    put(lake, clicks(2, 2))
    return lake


def read_all(source, position=None):
    """Every row from a position on, and where that ends."""
    (name,) = source.partitions()
    seen, done = [], False
    while not done:
        batch = source.read(name, position)
        position, seen, done = batch.position, [*seen, *rows_of(batch)], batch.done
    return seen, position


def break_off(lake):
    """Write a release; killed when the catalog has it and its files are not synced."""
    iceberg_sink._sync = kill_this_process
    open_sink(lake.uri("out")).write("a", 0, 2, release("a", 0, 2))


def test_killed_beside_the_commit(lake):
    """The next run finds the release; it is there once."""
    sink = open_sink(lake.uri("out"))
    sink.write("a", 0, 1, release("a", 0, 1))
    assert run_in_new_process(break_off, lake) == -signal.SIGKILL
    assert published(lake, "a") == rows_seen(release("a", 0, 1), release("a", 0, 2))
    sink.write("a", 0, 2, release("a", 0, 2))

    assert published(lake, "a") == rows_seen(release("a", 0, 1), release("a", 0, 2))


def test_two_writers_of_one_release(lake):
    """Of two processes that commit at once one is refused; nothing is there twice."""
    open_sink(lake.uri("out")).write("a", 0, 0, release("a", 0, 0))
    refused = []

    def write():
        sink = open_sink(lake.uri("out"))
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

    assert published(lake, "a") == rows_seen(*(release("a", 0, t) for t in range(6)))


def test_answers_that_are_lost(served):
    """A commit, or the making of a table, that was made and not answered is not made again."""
    sink = open_sink(served.uri("out"))
    lost = []

    def losing(work):
        def call(*words, **named):
            work(*words, **named)
            lost.append(work.__name__)
            setattr(sink._catalog, work.__name__, work)
            raise requests.ConnectionError("the answer is lost")

        return call

    sink._catalog.create_table = losing(sink._catalog.create_table)
    for trigger in (1, 2):
        sink._catalog.commit_table = losing(sink._catalog.commit_table)
        sink.write("a", 0, trigger, release("a", 0, trigger))

    assert lost == ["create_table", "commit_table", "commit_table"]
    assert published(served, "a") == rows_seen(release("a", 0, 1), release("a", 0, 2))


def test_a_catalog_that_is_away(served, iceberg):
    """A live source waits for it, and goes on with the next row; a start without it says so."""
    put(served, clicks(0, 2))
    source = open_source(served.uri("logs/clicks"))
    seen, position = read_all(source)
    with iceberg.away():
        batch = source.read("clicks", position)
        assert batch.done
        assert not len(batch.table)
        for start in (open_sink, open_source):
            with pytest.raises(ServerUnreachable, match=r"does not answer: .*mend the address"):
                start(served.uri("logs/clicks" if start is open_source else "out"))
    put(served, clicks(2, 2))
    until(lambda: len(source.read("clicks", position).table))

    assert seen + read_all(source, position)[0] == [(f"u{n}", "home") for n in range(4)]


def test_credentials_that_a_catalog_refuses():
    """They are an error at once, with the place where others go."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever).start()
        with pytest.raises(InvalidInput, match=r"refuses the credentials: .*configuration"):
            open_sink(f"iceberg://local/out?uri=http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_columns_that_iceberg_lacks_are_widened(lake):
    """As in Delta tables; every commit says in the table which release it is."""
    sink = open_sink(lake.uri("out"))
    sink.check("my clicks", RELEASE.schema)
    sink.write("my clicks", 3, 17, RELEASE)
    table = lake.table("out.my@20clicks")

    found = table.scan().to_arrow()
    assert found.column_names == ["window", "release", *RELEASE.column_names]
    assert sorted(map(str, found["big"].to_pylist())) == sorted(["0", "None", str(2**64 - 1)])
    assert table.properties["dpstream release 3"] == "17"


def test_what_cannot_be_written_is_refused(lake, monkeypatch):
    """Other columns, another output, another run, and a package that is not there."""
    sink = open_sink(lake.uri("out"))
    sink.write("a", 0, 1, release("a", 0, 1))
    with pytest.raises(StateError, match=r"has the columns .* nothing is lost"):
        sink.write("a", 0, 2, release("a", 0, 2).drop_columns(["page"]))
    with pytest.raises(StateError, match="was written with output = 'append'"):
        sink.upsert("a", 0, 2, release("a", 0, 2), ["1", "2", "3"])
    with pytest.raises(StateError, match="another run"):
        sink.fence("a", "another run")
    assert published(lake, "a") == rows_seen(release("a", 0, 1))
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    with pytest.raises(MissingDependency, match=r"pip install 'dpstream\[iceberg\]'"):
        open_sink(lake.uri("out"))


def test_columns_that_are_added_are_null_before(filled):
    """Types are those of the newest version."""
    source = open_source(filled.uri("logs/clicks"))
    first = source.read("clicks", None)

    def add(table):
        with table.update_schema() as schema:
            schema.add_column("price", DoubleType())

    change(filled, add)
    row = pa.table({"user": ["u9"], "page": ["home"], "price": [1.5]})
    change(filled, lambda table: table.append(row))
    second = source.read("clicks", first.position)
    third = source.read("clicks", second.position)

    assert source.columns("clicks")["price"] == pa.float64()
    assert second.table["price"].to_pylist() == [None, None]
    assert third.table["price"].to_pylist() == [1.5]


@pytest.mark.parametrize(
    ("start", "users"), [("earliest", 4), ("latest", 0), ("1", 4), ("2", 2), ("3", 0)]
)
def test_where_it_starts(filled, start, users):
    """At the table's first version, behind its last one, or at one that is named."""
    source = open_source(filled.uri(f"logs/clicks?start={start}"))
    seen, position = read_all(source)

    assert len(seen) == users
    put(filled, clicks(10, 1))
    assert read_all(source, position)[0] == [("u10", "home")]


@pytest.mark.parametrize("what", ["delete", "overwrite"])
def test_a_version_that_changes_rows(filled, what):
    """It stops the run, with the option that goes on; others are read."""
    if what == "delete":
        change(filled, lambda table: table.delete("user == 'u1'"))
    else:
        rows = pa.Table.from_pylist(clicks(1, 1, page="news"), schema=SCHEMA)
        change(filled, lambda table: table.overwrite(rows, "user == 'u1'"))
    put(filled, clicks(7, 1))
    source = open_source(filled.uri("logs/clicks"))
    before = source.read("clicks", source.read("clicks", None).position)
    with pytest.raises(InvalidInput, match=r"version 3 .* (deletes|changes) .*changes=inserts"):
        source.read("clicks", before.position)

    passing = open_source(filled.uri("logs/clicks?changes=inserts"))
    seen, _ = read_all(passing, before.position)
    assert ("u7", "home") in seen
    assert ("u0", "home") not in seen  # a file that was written anew holds old rows, too


def test_rows_that_are_gone_are_an_error(filled):
    """Data that was removed, snapshots that expired, a table that was rolled back or made anew."""
    source = open_source(filled.uri("logs/clicks"))
    first = source.read("clicks", None).position
    _, last = read_all(source)
    put(filled, clicks(4, 1))
    snapshots = filled.table("logs.clicks").snapshots()
    change(
        filled,
        lambda t: t.manage_snapshots().rollback_to_snapshot(snapshots[0].snapshot_id).commit(),
    )
    with pytest.raises(RowsLost, match="ends at version 1 now, and was read up to 2"):
        source.read("clicks", last)
    put(filled, clicks(5, 1))
    with pytest.raises(RowsLost, match="has no version 2 any more"):
        source.read("clicks", last)
    assert read_all(source, first)[0] == [("u5", "home")]

    put(filled, clicks(6, 1))
    change(
        filled, lambda t: t.maintenance.expire_snapshots().by_id(snapshots[0].snapshot_id).commit()
    )
    with pytest.raises(RowsLost, match="has dropped the versions 1 to"):
        source.read("clicks", None)
    filled.catalog().drop_table((filled.name("logs"), "clicks"))
    with pytest.raises(RowsLost, match="is gone"):
        source.read("clicks", last)
    put(filled, clicks(0, 2))
    with pytest.raises(RowsLost, match="another table"):
        source.read("clicks", last)


def test_data_that_was_removed_is_an_error(filled):
    """A snapshot whose file is not there any more."""
    source = open_source(filled.uri("logs/clicks"))
    for file in Path(urlsplit(filled.table("logs.clicks").location()).path).rglob("*.parquet"):
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
def test_options_that_cannot_be(filled, path, error, words):
    """Each is refused with what it should be."""
    with pytest.raises(error, match=words):
        open_source(filled.uri(path))


def test_catalogs_that_cannot_be():
    """One that nobody has configured, and one whose password stands in the address."""
    with pytest.raises(InvalidParameter, match="there is no such catalog"):
        open_source("iceberg://nobody/logs/clicks")
    with pytest.raises(InvalidParameter, match="must not hold a password"):
        open_source("iceberg://local/logs/clicks?uri=postgresql://ana:secret@127.0.0.1/lake")


def publish(lake, killed=False):
    """Releases of the table's two versions; killed when the release is committed."""
    if killed:
        iceberg_sink._sync = kill_this_process
    list(
        dps.run(
            dps.sql(QUERY, name="pages"),
            source=lake.uri("logs/clicks?until=2"),
            sink=lake.uri("out"),
            state=f"{lake.folder}/state",
        )
    )


def test_from_table_to_table_through_a_kill(lake):
    """Killed when a release was committed and not acknowledged: it is there once, and the same."""
    put(lake, clicks(0, 400))
    put(lake, clicks(400, 300, page="news"))
    assert run_in_new_process(publish, lake, True) == -signal.SIGKILL
    before = lake.table("out.pages").scan().to_arrow().sort_by("page")
    publish(lake)

    after = lake.table("out.pages")
    assert len(after.snapshots()) == 1
    assert after.scan().to_arrow().sort_by("page") == before
    assert before["page"].to_pylist() == ["home", "news"]
    assert abs(before["visitors"][0].as_py() - 400) < 60  # 8 deviations and more
