import gc
import io
import os
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.connectors.files.parquet import ParquetFile
from dpstream.connectors.files.size_limits import SizeLimits
from dpstream.connectors.files.source import Files, GrowingDirectory
from dpstream.connectors.memory import TableSource
from dpstream.connectors.pipes import StandardInput
from dpstream.connectors.registry import open_source
from dpstream.connectors.shared import SharedSource
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.records import Batch, Source
from tests.support.reading import read_all, rows

CLICKS = pa.table(
    {
        "ts": pa.array(np.arange(1000) * 10**6, pa.timestamp("us", "UTC")),
        "user": pa.array([f"user-{i}" for i in range(1000)]),
        "page": pa.array(["home", "about"] * 500),
        "seconds": pa.array(np.arange(1000) / 4),
    }
)


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.parquet"
    pq.write_table(CLICKS, path, row_group_size=300)
    return path


def test_parquet_keeps_its_types_and_comes_by_row_group(clicks):
    """Types are declared before anything is read."""
    source = open_source(clicks)
    batches = read_all(source)

    assert [batch.table.num_rows for batch in batches] == [300, 300, 300, 100]
    assert rows(batches) == CLICKS.to_pylist()
    assert source.columns(str(clicks)) == {field.name: field.type for field in CLICKS.schema}
    assert [batch.done for batch in batches] == [False, False, False, True]


def test_a_large_row_group_comes_in_slices_that_can_be_read_again(clicks, monkeypatch):
    """A position is a row group and an offset into it; projections have the same positions."""
    monkeypatch.setattr(
        "dpstream.connectors.files.source.ParquetFile", partial(ParquetFile, rows=128)
    )
    batches = read_all(open_source(clicks))
    positions = [None, *(batch.position for batch in batches)]

    assert [batch.table.num_rows for batch in batches[:3]] == [128, 128, 44]
    for position, first in reversed(list(zip(positions, batches, strict=False))):
        assert open_source(clicks).read(str(clicks), position).table == first.table
        narrow = open_source(clicks).read(str(clicks), position, columns=["ts"])
        assert narrow.table == first.table.select(["ts"])
        assert narrow.position == first.position


def test_repeated_strings_of_parquet_come_as_a_dictionary(clicks):
    """Those that hardly repeat come plain; large strings and categories do not show."""
    table = CLICKS.set_column(1, "user", CLICKS["user"].cast(pa.large_string()))
    table = table.append_column("kind", CLICKS["page"].dictionary_encode())
    pq.write_table(table, clicks)

    batch = open_source(clicks).read(str(clicks), None)

    dictionary = pa.dictionary(pa.int32(), pa.string())
    kinds = {field.name: field.type for field in batch.table.schema}
    assert (kinds["user"], kinds["page"], kinds["kind"]) == (pa.string(), dictionary, dictionary)
    assert batch.table["page"].to_pylist() == CLICKS["page"].to_pylist()
    assert open_source(clicks).columns(str(clicks))["kind"] == pa.string()


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "lz4"])
@pytest.mark.parametrize(
    "encoding",
    [
        {"use_dictionary": False},
        {"use_dictionary": True},
        {"dictionary_pagesize_limit": 900},
        {"data_page_version": "2.0"},
        {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"},
    ],
    ids=["plain", "dictionary", "dictionary until it is large", "pages of version 2", "deltas"],
)
def test_text_of_parquet_is_read_in_every_encoding(tmp_path, encoding, compression):
    """Short and long, empty and NULL, few and many strings, in many pages."""
    odd = ["", "caf\u00e9", "x" * 15, "y" * 16, "long " * 500, None, "\u4e2d\u6587"]
    values = [*(f"user-{n * 7919 % 401:05d}" for n in range(600)), *(odd * 5), *(["same"] * 99)]
    small = {"data_page_size": 1024, "write_batch_size": 64, "compression": compression}
    pq.write_table(pa.table({"text": values}), tmp_path / "f.parquet", **(small | encoding))

    batch = ParquetFile(tmp_path / "f.parquet", name="f").read(None, None)

    assert batch.table["text"].to_pylist() == values


@pytest.mark.parametrize("wanted", [None, ["t", "n", "list", "text"]])
def test_columns_of_parquet_keep_their_places_and_types(tmp_path, wanted):
    """Those that are wanted come in the order of the file."""
    table = pa.table(
        {"n": [1, 2], "text": ["a", "b"], "list": [["x"], ["y", "z"]], "t": ["c", "d"]}
    )
    stored = table.append_column("more", pa.array([3, 4]))
    pq.write_table(stored, tmp_path / "f.parquet", use_dictionary=False)

    batch = ParquetFile(tmp_path / "f.parquet", name="f").read(None, wanted)

    assert batch.table.equals(stored if wanted is None else table)


def test_a_row_group_is_read_in_slices_that_go_on_anywhere(tmp_path):
    """From any row to any other, as one read of all has them; going back is possible, too."""
    values = [f"user-{n * 7919 % 401:05d}" for n in range(1000)]
    pq.write_table(pa.table({"text": values, "n": range(1000)}), tmp_path / "f.parquet")
    file = ParquetFile(tmp_path / "f.parquet", name="f", rows=128)
    for start, stop in ((0, 1000), (130, 131), (5, 700), (256, 384), (900, 999), (0, 1)):
        position, found, until = [0, start], [], [0, stop] if stop < 1000 else [1, 0]
        while position != until:
            batch = file.read(position, ["text"], until)
            found += batch.table["text"].to_pylist()
            position = batch.position
        assert found == values[start:stop]
    file.close()


@pytest.mark.parametrize("rows", [1 << 20, 1000], ids=["whole", "in slices"])
def test_a_long_value_of_many_rows_stays_in_its_dictionary(tmp_path, rows):
    """A file of some kilobytes that has 8 GiB of text takes the memory of one value."""
    value, count = "x" * (1 << 20), 8192
    indices = pa.array(np.zeros(count, np.int32))
    column = pa.DictionaryArray.from_arrays(indices, pa.array([value]))
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"text": column}), path, dictionary_pagesize_limit=1 << 26)
    assert path.stat().st_size < 1 << 18

    file, position, done, seen = ParquetFile(path, name="f", rows=rows), None, False, 0
    while not done:
        batch = file.read(position, ["text"])
        assert batch.table.nbytes < 1 << 22
        position, done, seen = batch.position, batch.done, seen + len(batch.table)
    file.close()
    assert seen == count


def test_a_parquet_file_that_unpacks_to_too_much_is_refused(tmp_path):
    """As its own head says; the limit is an option."""
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"n": pa.array(np.zeros(50_000))}), path, use_dictionary=False)
    assert path.stat().st_size < 50_000
    with pytest.raises(InvalidInput, match="more than max_unpacked_bytes = 100000 bytes when"):
        read_all(open_source(path, options={"max_unpacked_bytes": 100_000}))


def test_a_column_with_a_dot_in_its_name_is_not_a_path_into_a_struct(tmp_path):
    """Arrow takes `a.b` for both; only the column that has the name comes."""
    table = pa.table({"a": [{"b": 1}, {"b": 2}], "a.b": ["x", "y"]})
    pq.write_table(table, tmp_path / "f.parquet")

    batch = ParquetFile(tmp_path / "f.parquet", name="f").read(None, ["a.b"])

    assert batch.table.column_names == ["a.b"]
    assert batch.table["a.b"].to_pylist() == ["x", "y"]


def test_a_wanted_column_that_parquet_lacks_is_named(clicks):
    """With the columns that there are, the nearest first."""
    wanted = r"no column 'usr'; did you mean 'user'\? its columns are ts, user, page"
    with pytest.raises(InvalidInput, match=wanted):
        open_source(clicks).read(str(clicks), None, columns=["usr"])


def test_a_damaged_parquet_file_is_named(clicks):
    """The message says what to do."""
    clicks.write_bytes(clicks.read_bytes()[:-10])

    with pytest.raises(InvalidInput, match=r"clicks\.parquet cannot be read as Parquet"):
        open_source(clicks).read(str(clicks), None)


def test_an_empty_parquet_file_has_no_rows(tmp_path):
    """With or without row groups."""
    path = tmp_path / "none.parquet"
    pq.write_table(CLICKS.slice(0, 0), path)

    (batch,) = read_all(open_source(path), columns=["user"])

    assert batch.done
    assert batch.table.schema == pa.schema([("user", pa.string())])


@pytest.mark.parametrize(
    "data", [CLICKS, CLICKS.to_batches()[0], CLICKS.to_pandas(), pl.from_arrow(CLICKS)]
)
def test_tables_in_memory_are_sources(data):
    """Arrow, pandas and Polars."""
    source = open_source(data)

    assert isinstance(source, TableSource)
    assert rows(read_all(source)) == CLICKS.to_pylist()


def test_a_pandas_index_is_no_column():
    """Only named columns are data."""
    frame = pd.DataFrame({"a": [1]}, index=[7])

    assert open_source(frame).read("table", None).table.column_names == ["a"]


def test_a_table_is_read_in_chunks_from_any_row():
    """A position is a row number."""
    source = TableSource(CLICKS, rows=300)

    assert [batch.position for batch in read_all(source)] == [300, 600, 900, 1000]
    assert source.read("table", 900, columns=["user"]).table == CLICKS.slice(900).select(["user"])
    with pytest.raises(InvalidInput, match="no column 'x'"):
        source.read("table", None, columns=["x"])


def test_directories_globs_and_lists_name_files_in_order(tmp_path):
    """Hidden files are left out."""
    for name in ("b.csv", "a.csv", "c.csv", "_x.csv", ".y.csv", "notes.txt"):
        (tmp_path / name).write_text("n\n1\n")
    every = [str(tmp_path / name) for name in ("a.csv", "b.csv", "c.csv")]

    assert open_source(tmp_path).partitions() == every
    assert open_source(str(tmp_path / "[ab].csv")).partitions() == every[:2]
    assert open_source([tmp_path / "c.csv", f"{tmp_path}/[ab].csv"]).partitions() == [
        every[2],
        *every[:2],
    ]
    source = open_source(every[0])
    assert isinstance(source, Source)
    assert open_source(source) is source


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{0}/none.csv", "there is no file"),
        ("{0}/*.csv", "no file matches"),
        ("{0}", "has no file that ends in"),
        ("{0}/x.xml", "must end in"),
    ],
)
def test_a_source_that_is_not_there_is_named(tmp_path, spec, message):
    """Before anything is read."""
    with pytest.raises(InvalidInput, match=message):
        open_source(spec.format(tmp_path))


@pytest.mark.parametrize("spec", [17, [], [1], object()])
def test_what_is_no_source_is_refused(spec):
    """With what could have been meant."""
    with pytest.raises(InvalidParameter, match="a source must be"):
        open_source(spec)


def test_a_directory_of_several_formats_is_refused(tmp_path):
    """A glob says which ones are meant."""
    (tmp_path / "a.csv").write_text("n\n1\n")
    (tmp_path / "b.jsonl").write_text('{"n": 1}\n')

    with pytest.raises(InvalidInput, match=r"several formats .* glob such as .*\*\.csv"):
        open_source(tmp_path)


def test_a_file_that_went_away_or_may_not_be_read_is_named(tmp_path, monkeypatch):
    """It names the file and the fix."""
    path = tmp_path / "a.csv"
    path.write_text("n\n1\n")
    source = Files([path])

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", forbidden)
        with pytest.raises(InvalidInput, match=r"a\.csv may not be read by this user"):
            source.read(str(path), None)
    path.unlink()
    with pytest.raises(InvalidInput, match=r"there is no file .*a\.csv"):
        source.read(str(path), None)


def test_many_files_do_not_need_many_descriptors(tmp_path):
    """A file is closed when it was read, and the oldest one when many are open."""
    for i in range(100):
        (tmp_path / f"{i:03d}.csv").write_text(f"n\n{i}\n")
    source = open_source(tmp_path)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for name in source.partitions():
        source.columns(name)

    assert len(os.listdir("/proc/self/fd")) - before <= 32
    assert [row["n"] for row in rows(read_all(source))] == [str(i) for i in range(100)]
    source.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_growing_directory_shows_complete_files(tmp_path):
    """Newer files come behind; what is being written is not seen."""
    source = open_source(tmp_path, growing=True)
    assert isinstance(source, GrowingDirectory)
    assert not source.bounded
    assert source.partitions() == []
    (tmp_path / "b.csv").write_text("n\n1\n")
    for name in (".c.csv", "_c.csv", "c.csv.tmp", "c.csv.part", "c.txt"):
        (tmp_path / name).write_text("n\n1\n")
    assert source.partitions() == ["b.csv"]
    end = source.read("b.csv", None, columns=["n"])
    (tmp_path / "a.csv").write_text("n\n2\n")

    assert source.partitions() == ["b.csv", "a.csv"]
    again = source.read("b.csv", end.position, columns=["n"])
    assert (again.table.num_rows, again.done, again.position) == (0, True, end.position)
    assert rows(read_all(source)) == [{"n": "1"}, {"n": "2"}]
    assert GrowingDirectory(tmp_path).read("a.csv", end.position).done


def test_a_file_of_a_growing_directory_must_stay(tmp_path):
    """One that goes away is missed by who has to read it again."""
    path = tmp_path / "a.csv"
    path.write_text("n\n1\n")
    source = GrowingDirectory(tmp_path)
    source.partitions()
    position = source.read("a.csv", None).position

    path.unlink()
    assert source.partitions() == ["a.csv"]
    with pytest.raises(InvalidInput, match="is gone; move it back"):
        source.read("a.csv", position)
    with pytest.raises(InvalidInput, match="there is no directory"):
        GrowingDirectory(tmp_path / "none")


def test_a_file_that_was_read_and_grows_is_told_to_the_operator_once(tmp_path, caplog):
    """What was appended is not counted; a file that was not read yet may still be replaced."""
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("n\n1\n")
    source = GrowingDirectory(tmp_path)
    source.partitions()
    assert source.read("a.csv", None, columns=["n"]).done
    assert source.partitions() == ["a.csv", "b.csv"]
    assert not caplog.records
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("n\n1\n2\n")
    for _ in range(3):
        source.partitions()

    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        f"{tmp_path}/a.csv was written to after it was read (4 bytes then, 6 now)"
    )
    assert "write new rows to a new file" in told


@pytest.mark.parametrize(
    ("name", "said"),
    [("a.csv", "is a file, and live reads whole files as they come"), ("*.csv", "the pattern")],
)
def test_what_cannot_grow_file_by_file_is_refused_with_what_can(tmp_path, name, said):
    """A single file or a glob cannot be live; a directory, a pipe or posts can."""
    (tmp_path / "a.csv").write_text("n\n1\n")
    with pytest.raises(InvalidInput, match=said) as refusal:
        GrowingDirectory(tmp_path / name)

    for part in ("a directory", "'-'", "'http:'"):
        assert part in str(refusal.value)


def poll(source: StandardInput, position: object, enough: int) -> tuple[list[Batch], object]:
    """Read until `enough` rows came or the input has ended."""
    batches: list[Batch] = []
    limit = monotonic() + 30
    while sum(batch.table.num_rows for batch in batches) < enough and not source.ended:
        assert monotonic() < limit
        batches.append(source.read("stdin", position))
        position = batches[-1].position
    return batches, position


def pipe() -> tuple[StandardInput, io.FileIO]:
    out, into = os.pipe()
    return StandardInput(out), os.fdopen(into, "wb", buffering=0)


def test_standard_input_gives_whole_lines_and_never_waits():
    """A line that is half there stays until its end comes."""
    source, into = pipe()
    assert source.read("stdin", None, columns=["a"]).table.num_rows == 0
    into.write(b"a,b\n1,2\n3,")
    first, position = poll(source, None, 1)
    assert rows(first) == [{"a": "1", "b": "2"}]
    quiet = source.read("stdin", position)
    assert (quiet.table.num_rows, quiet.done, source.ended) == (0, True, False)
    into.write(b"4\nbad\n5,6")
    into.close()

    rest, position = poll(source, position, 3)

    assert rows(rest) == [{"a": "3", "b": "4"}, {"a": "5", "b": "6"}]
    (bad,) = [one for batch in rest for one in batch.rejected]
    assert (bad.where, bad.row) == ("stdin, line 4", "bad")
    assert source.ended
    source.close()


@pytest.mark.parametrize("size", [1 << 20, 5 << 20], ids=["just too long", "much too long"])
@pytest.mark.parametrize("end", [b"", b"\n"], ids=["at the end", "in between"])
def test_a_long_line_of_standard_input_is_dropped_as_it_comes(size, end):
    """It is rejected alone, whole lines beside it are read, and no more than a line is held."""
    out, into = os.pipe()
    source = StandardInput(out, limits=SizeLimits(max_row_bytes=1 << 20))
    after = b"2\n" if end else b""

    def feed() -> None:
        with os.fdopen(into, "wb") as file:
            file.write(b"a\n1\n" + b"x" * size + end + after)

    feeder = Thread(target=feed)
    feeder.start()
    batches, position = [], None
    while not source.ended:
        batches.append(source.read("stdin", position))
        position = batches[-1].position
    feeder.join()
    source.close()
    os.close(out)

    assert rows(batches) == [{"a": "1"}, {"a": "2"}][: 1 + len(end)]
    (bad,) = [one for batch in batches for one in batch.rejected]
    assert (bad.where, len(bad.row)) == ("stdin, line 3", 4096)
    assert bad.reason == f"it has {size + len(end)} bytes, more than max_row_bytes = {1 << 20}"
    assert position == 4 + size + len(end + after)


def test_standard_input_reads_json_lines_too():
    """A first brace tells."""
    source, into = pipe()
    into.write(b'{"a": 1}\n{"a": 2}\n')
    into.close()

    batches, _ = poll(source, None, 2)

    assert rows(batches) == [{"a": "1"}, {"a": "2"}]
    assert not source.replayable


def test_standard_input_cannot_be_read_twice():
    """The message names what can."""
    source, into = pipe()
    into.write(b"a\n1\n")
    _, position = poll(source, None, 1)

    assert position == 4
    with pytest.raises(InvalidInput, match="WriteAhead"):
        source.read("stdin", None)
    into.close()


def test_a_silent_pipe_does_not_hold_up_the_exit(tmp_path):
    """Nor does the thread that waits for it break the interpreter's end, or leak a database."""
    code = (
        "from dpstream.connectors.registry import open_sink, open_source\n"
        "source, sink = open_source('-'), open_sink('out.duckdb')\n"
        "assert source.read('stdin', None).done\n"
        "source.close()\n"
        "sink.close()\n"
    )
    out, into = os.pipe()
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code],
        stdin=out,
        capture_output=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
    )
    os.close(into)

    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_time_zone_survives(clicks):
    """Times stay instants."""
    batch = open_source(clicks).read(str(clicks), None, columns=["ts"])

    assert batch.table["ts"][0].as_py() == datetime(1970, 1, 1, tzinfo=UTC)


def test_queries_over_one_source_share_what_is_parsed_of_a_chunk(clicks):
    """Ids are made once for all; a chunk is kept until each query has it, and can be read again."""
    wanted = [["user", "page"], ["user", "seconds"]]
    source = SharedSource(open_source(clicks), wanted)
    (partition,) = source.partitions()
    first, second = (source.read(partition, None, columns=names) for names in wanted)
    again = source.read(partition, None, columns=wanted[0])

    assert first.parsed is second.parsed is not None
    assert again.parsed is not first.parsed
    assert again.table.equals(first.table)
