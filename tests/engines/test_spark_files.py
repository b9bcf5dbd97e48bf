"""Which frames are read by our own reader, and that it finds the rows that Spark finds."""

import datetime
import itertools
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.connectors.files.source import Files
from dpstream.engines.spark import SparkEngine
from dpstream.engines.spark.jobs import Jobs

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three files with columns of many types."""
    place = tmp_path_factory.mktemp("files") / "in"
    place.mkdir()
    for number in range(3):
        rows = pa.table(
            {
                "user": ["a", "b", None, "\u00e9"],
                "n": pa.array([1, None, -3, number], pa.int32()),
                "long": pa.array([2**60, 0, None, 1]),
                "real": [0.5, float("nan"), None, -0.0],
                "day": [datetime.date(year, 1, 2) for year in (1890, 2024, 9999)] + [None],
                "at": pa.array([0, 1, None, 1_714_521_600_000_001], pa.timestamp("us", "UTC")),
                "local": pa.array([0, 1, None, 5], pa.timestamp("us")),
                "price": pa.array([Decimal("1.25"), None, Decimal("-3.10"), Decimal("0.00")]),
                "yes": [True, False, None, True],
            }
        )
        pq.write_table(rows, place / f"part {number}.parquet", row_group_size=3)
    return place


def rows_of(paths, frame):
    """All rows of a frame's files, by text: NaN is equal to itself so."""
    from dpstream.engines.spark.frame_files import FrameFiles
    from dpstream.engines.spark.spark_engine import arrow_schema

    files, columns = FrameFiles(Files(map(Path, paths)), arrow_schema(frame)), frame.columns
    assert files.columns("") == {field.name: field.type for field in arrow_schema(frame)}
    found = []
    for partition in files.partitions():
        position, done = None, False
        while not done:
            batch = files.read(partition, position, columns=columns)
            found += map(str, batch.table.select(columns).to_pylist())
            position, done = batch.position, batch.done
    files.close()
    return sorted(found)


def test_the_same_rows(session, folder):
    from dpstream.engines.spark.frame_files import frame_files

    frame = session.read.parquet(str(folder)).select("price", "user", "n", "long", "real", "day")
    frame = frame.select("user", "day", "real", "price", "n", "long")
    files = frame_files(frame)

    assert files is not None
    assert len(files) == 3
    assert rows_of(files, frame) == sorted(map(str, frame.toArrow().to_pylist()))


def test_times_are_instants(session, folder):
    from dpstream.engines.spark.frame_files import frame_files

    frame = session.read.parquet(str(folder)).select("at", "local", "yes")
    theirs = sorted(map(str, frame.toArrow().to_pylist()))
    files = frame_files(frame)

    assert files is not None
    assert rows_of(files, frame) == theirs


FRAMES = {
    "another name": lambda s, f: s.read.parquet(f).selectExpr("user as unit"),
    "a sum": lambda s, f: s.read.parquet(f).selectExpr("user", "n + 1 as n"),
    "a filter": lambda s, f: s.read.parquet(f).where("n > 0"),
    "a limit": lambda s, f: s.read.parquet(f).limit(5),
    "distinct rows": lambda s, f: s.read.parquet(f).distinct(),
    "a join": lambda s, f: s.read.parquet(f).join(s.range(2)),
    "a sample": lambda s, f: s.read.parquet(f).sample(0.5, seed=1),
    "rows of its own": lambda s, f: s.createDataFrame([("a",)], "user string"),
    "rows of files": lambda s, f: s.read.parquet(f).select("user").rdd.toDF("user string"),
    "another type": lambda s, f: s.read.schema("user string, n long").parquet(f),
    "a column that is not there": lambda s, f: s.read.schema("user string, m int").parquet(f),
    "other letters": lambda s, f: s.read.schema("USER string").parquet(f),
    "an option": lambda s, f: s.read.option("modifiedAfter", "2020-01-01T00:00:00").parquet(f),
    "columns of paths": lambda s, f: s.read.option("basePath", f"{f}/..").parquet(f"{f}/../by"),
    "files named twice": lambda s, f: s.read.parquet(f, f"{f}/part 1.parquet").select("user"),
    "text": lambda s, f: s.read.text(f),
    "where rows come from": lambda s, f: s.read.parquet(f).select("user", "_metadata.file_name"),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_what_spark_reads(session, folder, kind):
    """All that is more than a projection of files, or that may give other rows."""
    from dpstream.engines.spark.frame_files import batch_files, frame_files

    by = folder.parent / "by" / "day=1"
    by.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"user": ["a"]}), by / "one.parquet")
    frame = FRAMES[kind](session, str(folder))

    assert frame_files(frame) is None
    if kind != "rows of files":
        assert batch_files(frame) is None


def test_damaged_files_are_left_to_spark(session, folder, tmp_path):
    from dpstream.engines.spark.frame_files import frame_files

    (tmp_path / "one.parquet").write_bytes((folder / "part 0.parquet").read_bytes())
    frame = session.read.parquet(str(tmp_path)).select("user")
    assert frame_files(frame) is not None
    (tmp_path / "one.parquet").write_bytes(b"PAR1")
    assert frame_files(frame) is None


def test_settings_that_change_what_is_read(session, folder):
    from dpstream.engines.spark.frame_files import frame_files

    other = session.newSession()
    frame = other.read.parquet(str(folder)).select("user")
    assert frame_files(frame) is not None
    for name, value, usual in [
        ("spark.sql.files.ignoreCorruptFiles", "true", "false"),
        ("spark.sql.parquet.datetimeRebaseModeInRead", "LEGACY", "CORRECTED"),
        ("spark.sql.parquet.int96RebaseModeInRead", "EXCEPTION", "CORRECTED"),
    ]:
        other.conf.set(name, value)
        assert frame_files(frame) is None
        other.conf.set(name, usual)
    assert frame_files(frame) is not None


def test_a_folder_that_grows_after_a_kill(session, tmp_path, monkeypatch):
    """A job that is killed before it has published goes on with the files that it began with."""

    def put(day):
        at = [datetime.datetime(2024, 5, day, n % 24) for n in range(600)]
        rows = {"user": [f"u{n}" for n in range(600)], "page": ["/"] * 600}
        place = tmp_path / "in" / f"{day}.parquet"
        pq.write_table(pa.table(rows | {"ts": pa.array(at, pa.timestamp("us"))}), place)

    def go(state):
        query = dps.Query(
            privacy_unit_column="user", keys=["page"], epsilon=2, delta=1e-6, time_column="ts",
            start="2024-05-01", end="2024-05-04", window=dps.Tumble("1 day"),
            privacy_unit_period="1 day", max_groups_contributed=1, remember_keys=False,
        )  # fmt: skip
        frame, engine = session.read.parquet(str(tmp_path / "in")), SparkEngine(session, buckets=2)
        return [each.num_rows for each in dps.run(query, source=frame, state=state, engine=engine)]

    (tmp_path / "in").mkdir()
    put(1)
    with monkeypatch.context() as broken:
        broken.delattr(Jobs, "publish")
        with pytest.raises(AttributeError, match="publish"):
            go(tmp_path / "state")
    put(2)

    assert go(tmp_path / "state") == [1, 0, 0]
    assert go(tmp_path / "other") == [1, 1, 0]


def test_streams(session, folder, tmp_path):
    """A stream's files now; those of a batch, when it comes; nothing of one that does more."""
    from dpstream.engines.spark.frame_files import batch_files, files_now, projects_files

    read = session.readStream.schema(session.read.parquet(str(folder)).schema)
    plain = read.option("maxFilesPerTrigger", 2).parquet(str(folder)).select("user", "n")
    assert files_now(plain) is not None
    whole = session.read.parquet(str(folder)).select("user", "n")
    assert rows_of(files_now(plain), whole) == sorted(map(str, whole.toArrow().to_pylist()))
    seen = []
    writer = plain.writeStream.foreachBatch(lambda b, n: seen.append(batch_files(b)))
    writer.trigger(availableNow=True).option(
        "checkpointLocation", str(tmp_path)
    ).start().awaitTermination()
    assert sorted(map(len, seen)) == [1, 2]
    assert sorted(itertools.chain(*seen)) == sorted(map(str, folder.glob("*.parquet")))

    others = [plain.where("n > 0"), plain.selectExpr("n as user")]
    others += [
        read.option("cleanSource", "archive").option("sourceArchiveDir", "/x").parquet(str(folder))
    ]
    others += [read.json(str(folder)), session.readStream.format("rate").load()]
    for other in others:
        assert not projects_files(other)
        assert files_now(other) is None
