import errno
import io
import json
import os
import sqlite3
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from dpstream.connectors.encode import csv, jsonl, parquet
from dpstream.connectors.files.sink import DirectorySink, file_name
from dpstream.connectors.pipes import StdoutSink
from dpstream.connectors.registry import open_sink
from dpstream.connectors.shared import AllSinks
from dpstream.connectors.testing import ListSink
from dpstream.errors import InvalidInput, InvalidParameter, MissingDependency, StateError

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
RELEASE = pa.table(
    {
        "url": pa.array(['/a"b', "/ü\n", None]),
        "time": pa.array([NOON] * 3, pa.timestamp("us", "UTC")),
        "clicks": pa.array([1, -2, None], pa.int64()),
        "clicks_stddev": pa.array([0.5, float("nan"), 1e30]),
        "big": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "open": pa.array([True, False, None]),
    }
).replace_schema_metadata({b"dpstream": b'{"release_index": 4}'})
ROWS = [
    {"url": '/a"b', "time": "2024-05-01T12:00:00.000000Z", "clicks": 1, "clicks_stddev": 0.5}
    | {"big": 2**64 - 1, "open": True},
    {"url": "/ü\n", "time": "2024-05-01T12:00:00.000000Z", "clicks": -2, "clicks_stddev": None}
    | {"big": 0, "open": False},
    {"url": None, "time": "2024-05-01T12:00:00.000000Z", "clicks": None, "clicks_stddev": 1e30}
    | {"big": None, "open": None},
]


def same(one: pa.Table, other: pa.Table) -> bool:
    """Equal types and values; NaN equals NaN."""
    return one.schema.equals(other.schema) and str(one.to_pylist()) == str(other.to_pylist())


def lines(content: bytes) -> list[dict]:
    return [json.loads(line) for line in content.splitlines()]


@pytest.mark.parametrize("spec", ["iceberg:out", "cvs:out/", "postgres:table"])
def test_a_sink_that_nobody_knows_is_no_folder_of_that_name(spec, tmp_path, monkeypatch):
    """It is refused with those there are; a folder with a colon is named by its path."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidParameter, match=rf"there is no sink {spec.partition(':')[0]}:;"):
        open_sink(spec)
    assert not [*tmp_path.iterdir()]
    open_sink(f"./{spec}").write("q", 0, 1, RELEASE)
    assert (tmp_path / spec).is_dir()


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_a_release_is_one_file_that_stays(tmp_path, kind):
    """A second write of the same release does nothing, whatever table comes with it."""
    sink = open_sink(f"{kind}:{tmp_path}/out/")
    sink.write("clicks", 3, 17, RELEASE)
    sink.write("clicks", 3, 17, RELEASE.slice(0, 1))
    sink.write("clicks", 3, 18, RELEASE.slice(0, 0))

    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [f"clicks-w000003-t000017.{kind}", f"clicks-w000003-t000018.{kind}"]
    path = tmp_path / "out" / names[0]
    if kind == "parquet":
        assert same(pq.read_table(path), RELEASE)
        assert pq.read_schema(path).metadata[b"dpstream"] == b'{"release_index": 4}'
    elif kind == "csv":
        assert pyarrow.csv.read_csv(path).num_rows == 3
        assert '"/a""b","2024-05-01T12:00:00.000000Z",1,0.5' in path.read_text()
    else:
        assert lines(path.read_bytes()) == ROWS


def test_a_bare_directory_gets_parquet(tmp_path):
    """Also without the slash; the files may be read by whoever may read the directory."""
    sink = open_sink(tmp_path / "out")
    sink.write("q", 0, 0, RELEASE)

    (path,) = (tmp_path / "out").iterdir()
    assert path.suffix == ".parquet"
    assert path.stat().st_mode & 0o777 == (tmp_path / "out").stat().st_mode & 0o666


@pytest.mark.parametrize("encode", [parquet, csv, jsonl])
def test_the_bytes_depend_on_the_table_alone(encode):
    """Not on how it is chunked."""
    chunked = pa.concat_tables([RELEASE.slice(0, 1), RELEASE.slice(1)])

    assert encode(chunked) == encode(RELEASE)


def test_query_names_never_share_a_file():
    """Nor are they hidden, or leave the directory."""
    queries = ["a", "A", "a/b", "a%2Fb", "a.b", "_a", "%5Fa", "..", "", "a-w000001-t000001", "ü"]
    names = {file_name(query, 1, 1, "csv") for query in queries}

    assert len(names) == len(queries)
    assert not any("/" in name or name.startswith((".", "_")) for name in names)


def test_what_a_kill_left_is_removed_and_written_again(tmp_path):
    """A kill between the temporary file and its rename leaves no release."""
    name = file_name("q", 0, 1, "parquet")
    leftover = tmp_path / f".{name}.0123456789abcdef.new"
    leftover.write_bytes(b"half")
    other = tmp_path / ".keep.new"
    other.write_bytes(b"not ours")

    sink = open_sink(tmp_path)
    sink.write("q", 0, 1, RELEASE)

    assert not leftover.exists()
    assert other.exists()
    assert pq.read_table(tmp_path / name).num_rows == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_and_says_so(tmp_path, monkeypatch, number):
    """Once there is space, the same release is written."""
    sink = open_sink(tmp_path)

    def full(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("dpstream.privacy.state.durable_files.os.fsync", full)
        with pytest.raises(StateError, match=r"no space left to write .*free some and run again"):
            sink.write("q", 0, 1, RELEASE)
    assert list(tmp_path.iterdir()) == []
    sink.write("q", 0, 1, RELEASE)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_standard_output_says_so():
    """The real error of a device without space."""
    problem = pytest.raises(StateError, match="standard output cannot be written")
    with open("/dev/full", "wb", buffering=0) as full, problem:
        StdoutSink(full).write("q", 0, 1, RELEASE)


@pytest.mark.parametrize("spec", ["{0}/file/out/", "{0}/file", "{0}/file/x.sqlite"])
def test_a_place_that_cannot_be_a_directory_is_named(tmp_path, spec):
    """A file is in the way."""
    (tmp_path / "file").write_text("")

    with pytest.raises(StateError, match="file"):
        open_sink(spec.format(tmp_path))


def test_a_directory_that_may_not_be_written_is_named(tmp_path, monkeypatch):
    """At opening, before anything is paid for."""
    monkeypatch.setattr("dpstream.connectors.storage.os.access", lambda *_: False)

    with pytest.raises(StateError, match="may not be written by this user; grant permission"):
        open_sink(tmp_path)


def test_sqlite_has_a_table_per_query(tmp_path):
    """With the numbers of window and release; a release is inserted once."""
    path = tmp_path / "new" / "out.sqlite"
    for _ in range(2):
        sink = open_sink(path)
        sink.write('my "clicks"', 3, 17, RELEASE)
        sink.write('my "clicks"', 3, 18, RELEASE.slice(0, 0))
        sink.write("other", 0, 1, RELEASE.select(["clicks"]))
        sink.close()

    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute('SELECT * FROM "my ""clicks"""').fetchall()
        assert connection.execute("SELECT * FROM other").fetchall()[0] == (0, 4, 1)
        done = connection.execute("SELECT * FROM dpstream_releases ORDER BY 1, 3").fetchall()
    assert found[0] == (3, 4, '/a"b', ROWS[0]["time"], 1, 0.5, "18446744073709551615", 1)
    assert found[2][2:] == (None, ROWS[0]["time"], None, 1e30, None, None)
    assert done == [('my "clicks"', 3, 17), ('my "clicks"', 3, 18), ("other", 0, 1)]


def test_duckdb_keeps_types(tmp_path):
    """Times are times; a release is inserted once."""
    path = tmp_path / "out.duckdb"
    for _ in range(2):
        sink = open_sink(path)
        sink.write("clicks", 3, 17, RELEASE)
        sink.close()

    with duckdb.connect(str(path)) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        found = connection.sql("SELECT * FROM clicks").to_arrow_table()
    assert same(found.drop_columns(["window", "release"]), RELEASE)
    assert found["window"].to_pylist() == [3] * 3
    assert found["release"].to_pylist() == [4] * 3


@pytest.mark.parametrize("name", ["out.sqlite", "out.duckdb"])
def test_a_database_refuses_what_it_would_mix_up(tmp_path, name):
    """Another schema, a name that differs in case only, its own tables; nothing is written."""
    sink = open_sink(tmp_path / name)
    sink.write("clicks", 0, 1, RELEASE)

    with pytest.raises(StateError, match=r"has the columns .*url \(string\).* but this release"):
        sink.write("clicks", 0, 2, RELEASE.drop_columns(["url"]))
    with pytest.raises(InvalidParameter, match="another query of this sink is named like 'Clicks'"):
        sink.write("Clicks", 0, 1, RELEASE)
    with pytest.raises(InvalidParameter, match="are the sink's own"):
        sink.write("dpstream_releases", 0, 1, RELEASE)
    with pytest.raises(InvalidParameter, match="differ in more than case"):
        sink.write("cases", 0, 1, pa.table({"a": [1], "A": [2]}))
    sink.write("clicks", 0, 2, RELEASE)
    sink.close()


@pytest.mark.parametrize("name", ["out.sqlite", "out.duckdb"])
def test_a_failed_insert_leaves_no_half_release(tmp_path, name, monkeypatch):
    """Rows and the note that they are there come together."""
    sink = open_sink(tmp_path / name)
    sink.write("clicks", 0, 1, RELEASE)
    with monkeypatch.context() as patch:
        patch.setattr("dpstream.connectors.database.DatabaseSink.mark_done", _fail)
        with pytest.raises(ZeroDivisionError):
            sink.write("clicks", 0, 2, RELEASE)
    sink.write("clicks", 0, 2, RELEASE)
    sink.close()

    assert _count(tmp_path / name) == 6


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def _count(path: Path) -> int:
    connection = sqlite3.connect(path) if path.suffix == ".sqlite" else duckdb.connect(str(path))
    with closing(connection):
        return connection.execute("SELECT count(*) FROM clicks").fetchone()[0]


@pytest.mark.parametrize("name", ["out.sqlite", "out.db", "out.duckdb"])
def test_a_file_that_is_no_database_is_named(tmp_path, name):
    """It is left as it is."""
    path = tmp_path / name
    path.write_bytes(b"something else " * 1000)

    with pytest.raises(StateError, match=f"{name} cannot be written"):
        open_sink(path)
    assert path.read_bytes().startswith(b"something else")


def test_duckdb_is_optional(tmp_path, monkeypatch):
    """Without the package the message says how to get it."""
    monkeypatch.setitem(sys.modules, "duckdb", None)

    with pytest.raises(MissingDependency, match=r"pip install 'dpstream\[duckdb\]'"):
        open_sink(tmp_path / "out.duckdb")


def test_standard_output_gets_json_lines_once(tmp_path):
    """Across restarts with a journal, also one whose last line a kill has cut."""
    journal = tmp_path / "state" / "written"
    first = io.BytesIO()
    sink = StdoutSink(first, journal=journal)
    sink.write("q", 0, 1, RELEASE)
    sink.write("q", 0, 1, RELEASE)
    sink.write("q", 0, 2, RELEASE.slice(0, 0))
    with journal.open("ab") as file:
        file.write(b'["q", 0')
    second = io.BytesIO()
    sink = StdoutSink(second, journal=journal)
    sink.write("q", 0, 1, RELEASE)
    sink.write("q", 0, 3, RELEASE)

    numbers = {"query": "q", "window": 0, "release": 4}
    assert lines(first.getvalue()) == [numbers | row for row in ROWS]
    assert lines(second.getvalue()) == [numbers | row for row in ROWS]
    assert lines(journal.read_bytes()) == [["q", 0, 1], ["q", 0, 2], ["q", 0, 3]]


def test_a_foreign_journal_is_refused(tmp_path):
    """It is not overwritten."""
    (tmp_path / "notes").write_text("hello\n")

    with pytest.raises(StateError, match="is not a journal of releases"):
        StdoutSink(io.BytesIO(), journal=tmp_path / "notes")


def test_a_reader_that_went_away_is_told(tmp_path):
    """A closed pipe is no traceback of the interpreter."""
    out, into = os.pipe()
    os.close(out)

    with open(into, "wb", buffering=0) as stream, pytest.raises(StateError, match="has gone away"):
        StdoutSink(stream).write("q", 0, 1, RELEASE)


def test_columns_of_the_query_keep_their_names():
    """The sink's own numbers step aside; where they cannot, it says so."""
    stream = io.BytesIO()
    StdoutSink(stream).write("q", 5, 6, pa.table({"window": ["w"], "query": ["x"]}))

    assert lines(stream.getvalue()) == [
        {"window_number": 5, "release": 6, "window": "w", "query": "x"}
    ]
    with pytest.raises(InvalidInput, match="window_number"):
        StdoutSink(stream).write("q", 5, 7, pa.table({"window": [1], "window_number": [1]}))


def test_what_can_be_a_sink(tmp_path, capsysbinary):
    """None, an object with `write`, or several of them."""
    own = ListSink()
    several = open_sink([own, None, tmp_path / "out", "-"])
    assert isinstance(several, AllSinks)
    several.write("q", 0, 1, RELEASE)
    several.close()

    assert open_sink(None) is None
    assert open_sink(own) is own
    assert isinstance(open_sink(f"{tmp_path}/other.db/"), DirectorySink)
    assert own.tables == {("q", 0, 1): RELEASE}
    assert len(list((tmp_path / "out").iterdir())) == 1
    assert len(lines(capsysbinary.readouterr().out)) == 3
    with pytest.raises(InvalidParameter, match="a sink must be"):
        open_sink(3)
    with pytest.raises(InvalidParameter, match=r"for csv files write csv:.*/out/"):
        open_sink(tmp_path / "out.csv")


@pytest.mark.parametrize("spec", ["out/", "jsonl:out/", "out.sqlite", "out.duckdb"])
def test_releases_of_another_run_are_not_taken_for_old_ones(tmp_path, monkeypatch, spec):
    """A sink that has the same window and trigger from another run refuses, and loses nothing."""
    monkeypatch.chdir(tmp_path)
    first, second = (
        pa.table({"n": [number]}).replace_schema_metadata({"dpstream": f'{{"run": "{run}"}}'})
        for number, run in ((1, "a"), (2, "b"))
    )
    sink = open_sink(spec)
    assert sink is not None
    sink.write("clicks", 0, 1, first)
    sink.write("clicks", 0, 1, first)

    with pytest.raises(StateError, match="another run"):
        sink.write("clicks", 0, 1, second)
    sink.close()
