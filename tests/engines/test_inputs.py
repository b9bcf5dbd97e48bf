"""Reading and making rows are two stages: what waits between them is bounded."""

import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.connectors.files.source import Files
from dpstream.connectors.memory import TableSource
from dpstream.engines.chunks import ChunkReader, OperatorCounts
from dpstream.engines.embedded import step_rows
from dpstream.engines.embedded.step_rows import FileInput
from dpstream.privacy.state import Secret
from dpstream.rows.row_reader import RowReader
from tests.support.fixed import RUN, SECRET
from tests.support.runs import query, table

CHUNKS = 30


class Watched(ChunkReader):
    """Makes rows more slowly than it reads, and notes how many chunks are in between."""

    def __init__(self, broken=-1):
        source = TableSource(table(), rows=600 // CHUNKS)
        super().__init__(source, RowReader(query(), Secret(SECRET), RUN), OperatorCounts())
        self.read, self.made, self.most, self._broken = 0, 0, 0, broken

    def batch(self, *place, **named):
        self.read += 1
        if self.read == self._broken:
            raise OSError("the disk is broken")
        return super().batch(*place, **named)

    def rows(self, *place, **named):
        time.sleep(0.005)
        self.most = max(self.most, self.read - self.made)
        self.made += 1
        return super().rows(*place, **named)


def test_a_slow_second_stage_does_not_let_all_files_into_memory():
    """Rows in no order: every chunk is needed at once, and what is read may be wide."""
    chunks = Watched()
    files = FileInput(chunks, memory=1 << 20)
    pieces = files.take(3)
    files.close()

    assert chunks.read == chunks.made == CHUNKS
    assert chunks.most <= 3
    assert {int(rows.steps[first]) for rows, first, _ in pieces} == {3}


@pytest.mark.parametrize("broken", [1, 2, 9, CHUNKS])
def test_an_error_of_the_first_stage_comes_out_and_nobody_waits_for_ever(broken):
    files = FileInput(Watched(broken), memory=1 << 20)
    with pytest.raises(OSError, match="the disk is broken"):
        files.take(3)
    files.close()


class Unequal(ChunkReader):
    """Of two chunks the first takes longer: later ones are read and made before it."""

    def batch(self, partition, position, **named):
        time.sleep(0.03 * (partition[-9] in "02"))
        return super().batch(partition, position, **named)

    def rows(self, partition, *place, **named):
        time.sleep(0.03 * (partition[-9] in "13"))
        return super().rows(partition, *place, **named)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_several_readers_tell_of_their_chunks_in_order(tmp_path, threads):
    """Four files of three row groups, a bad row in each: one letter after the other, each once."""
    rows = table(1200)
    for number in range(4):
        part = rows.slice(300 * number, 300)
        users = ["", *part["user"].to_pylist()[1:]]
        part = part.set_column(0, "user", pa.array(users))
        pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=100)
    told, counts = [], OperatorCounts()
    counts.keep_rejected = lambda chunk, rows: told.append((chunk, len(rows)))
    source = Files(sorted(tmp_path.glob("*.parquet")))
    chunks = Unequal(source, RowReader(query(), Secret(SECRET), RUN), counts)
    files = FileInput(chunks, memory=1, threads=threads)  # chunks are read again at every step
    taken = [sum(end - first for _, first, end in files.take(step)) for step in range(10)]
    files.close()

    assert len(files._readers) == min(threads, step_rows._MOST_READERS)
    assert [(name.rsplit("/")[-1], n) for name, n in told] == [
        (f"{number}.parquet None", 1) for number in range(4)
    ]
    assert counts.read == 1200
    assert sum(taken) == 1200 - 4 - counts.outside - counts.late


def test_slices_of_a_row_group_are_left_to_one_reader(tmp_path):
    """A reader that takes the second slice goes through the first one, too."""
    pq.write_table(table(), tmp_path / "rows.parquet", row_group_size=300)
    source = Files([tmp_path / "rows.parquet"])
    [name] = source.partitions()
    one, two = source.stretch(name, None), source.stretch(name, [0, 100])

    assert one == two != source.stretch(name, [1, 0])
    assert source.reader()._open is not source._open


def test_a_time_that_python_lacks_costs_its_own_row(tmp_path):
    """A file's statistics are in Python's times; one far row must not stop all the others."""
    times = [*range(0, 8 * 3600, 60), 1_714_521_600_000_000]  # one clock counts microseconds
    rows = pa.table({"user": range(len(times)), "page": ["/"] * len(times), "at": times})
    rows = rows.set_column(2, "at", pa.array(times).cast(pa.timestamp("s")))
    pq.write_table(rows, tmp_path / "far.parquet")
    asked = query(time_unit=None, arrival_column=None, aggregates=(dps.Count("n"),))
    run = dps.run(asked, source=str(tmp_path / "far.parquet"))

    assert len(list(run)) == 12
    assert [one.reason for one in run.operator.latest] == ["unparsable time"]


@pytest.mark.parametrize(
    ("each", "buckets"), [(1000, 1), (45, 1), (20, 3), (5, 12), (0.5, step_rows._MOST_BUCKETS)]
)
def test_rows_per_trigger_say_how_many_buckets_there_are(tmp_path, monkeypatch, each, buckets):
    """600 rows in 10 triggers, in a file or a table; not the cores of the machine."""
    monkeypatch.setattr(step_rows, "_ROWS_OF_BUCKET", each)
    rows = table()
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=100)
    for source in (rows, tmp_path / "rows.parquet"):
        run = dps.run(query(), source=source, options=dps.EngineOptions(threads=3))
        assert run._default_buckets() == buckets
    run = dps.run(query(), source=rows, options=dps.EngineOptions(buckets=5))
    assert run._default_buckets() == 5


def test_a_text_tells_its_rows_by_its_size(tmp_path, monkeypatch):
    """About: nobody reads it for that."""
    monkeypatch.setattr(step_rows, "_ROWS_OF_BUCKET", 10)
    path = tmp_path / "rows.csv"
    path.write_text("user,page,at,came,seconds\n" + ("x" * 63 + "\n") * 600)
    run = dps.run(query(), source=path, anyway=True)

    assert run._default_buckets() == 6


def test_threads_do_not_change_what_is_published_from_files(tmp_path):
    """Files whose rows are in no order, read again and again by one thread or by many."""
    rows = table(1200)
    for number in range(4):
        part = rows.slice(300 * number, 300)
        pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=100)
    found = []
    for threads in (1, 2, 3, 8, 16):
        options = dps.EngineOptions(threads=threads, memory=1, run_id=RUN, buckets=threads)
        run = dps.run(query(), source=str(tmp_path / "*.parquet"), secret=SECRET, options=options)
        found.append((list(run), run.operator.counts()))

    assert sum(map(len, found[0][0])) > 40
    assert all(one == found[0] for one in found[1:])
