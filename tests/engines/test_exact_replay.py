"""A step that is taken again reads exactly the rows it has read, however its reads fall now."""

from threading import Event

import pyarrow as pa
import pytest

from dpstream.engines.chunks import ChunkReader, OperatorCounts
from dpstream.engines.embedded.live_reader import Arrivals
from dpstream.engines.embedded.step_rows import LiveInput
from dpstream.errors import NoiseReuse
from dpstream.privacy.state import Secret
from dpstream.query.query import Query
from dpstream.query.windows import Tumble
from dpstream.records import Batch, Rejected
from dpstream.rows.row_reader import RowReader

HOUR = 3_600_000_000


class Messages:
    """Numbered messages of several partitions; a read takes what is there, or `most` of it."""

    bounded = False
    replayable = True

    def __init__(self, counts, *, most=1000, away=0):
        self.counts, self.most, self.away = dict(counts), most, away

    def partitions(self):
        return list(self.counts)

    def columns(self, partition):
        return None

    def read(self, partition, position, *, columns=None, until=None):
        start = position or 0
        if self.away:
            self.away -= 1
            return self._batch(partition, start, start, position, until is None)
        end = min(self.counts[partition], start + self.most, until or 1 << 40)
        done = end == (self.counts[partition] if until is None else until)
        return self._batch(partition, start, end, end, done or end == start)

    def _batch(self, partition, start, end, position, done):
        numbers = [n for n in range(start, end) if n % 10]
        table = pa.table(
            {
                "user": pa.array([f"{partition} {n}" for n in numbers], pa.string()),
                "at": pa.array(["1970-01-01T00:00:01Z"] * len(numbers), pa.string()),
            }
        )
        bad = [n for n in range(start, end) if n % 10 == 0]
        rejected = [Rejected(where=f"{partition}, {n}", reason="poison", row="") for n in bad]
        return Batch(table=table, position=position, done=done, rejected=rejected)

    def close(self):
        pass


class Letters(OperatorCounts):
    def __init__(self):
        super().__init__()
        self.files = {}

    def reject(self, chunk, rows):
        self.files[chunk] = [row.where for row in rows]


class Ticking:
    """Each look at the clock takes a minute, so that a step has many reads of busy partitions."""

    real_time = False

    def __init__(self, tick=HOUR // 60):
        self.time, self.tick = 0, tick

    def now(self):
        self.time += self.tick
        return self.time

    def wait(self, until, stop):
        self.time = until


def live(source, clock=None, letters=None, stop=None):
    query = Query(
        privacy_unit_column="user",
        epsilon=1,
        delta=1e-6,
        time_column="at",
        start="1970-01-01",
        end="1970-01-02",
        window=Tumble("1 day"),
        every="1 hour",
        max_groups_contributed=1,
    )
    reader = RowReader(query, Secret(bytes(32)), bytes(16))
    clock = clock or Ticking()
    (view,) = Arrivals(source, clock).views
    chunks = ChunkReader(view, reader, letters or Letters())
    return LiveInput(chunks, view, clock, stop or Event())


def digests(pieces):
    return sorted(tuple(rows.digests[i]) for rows, start, end in pieces for i in range(start, end))


@pytest.mark.parametrize("most", [7, 64, 100_000])
def test_other_chunks_the_same_rows(most):
    """More has come by then, and reads are longer or shorter: the step's rows are the same."""
    letters = Letters()
    messages = Messages({"a": 500, "b": 30}, most=50)
    first = live(messages, letters=letters)
    taken = [digests(first.take(0))]
    logged = [first.moved()]
    messages.counts["b"] = 70
    taken.append(digests(first.take(1)))
    logged.append(first.moved())

    later = Letters()
    second = live(Messages({"a": 9000, "b": 9000, "c": 9000}, most=most), letters=later)
    again = [digests(second.replay(step, logged[step])) for step in (0, 1)]

    assert again == taken
    assert second.positions == first.positions
    assert later.files == letters.files
    assert sum(map(len, letters.files.values())) == sum(at // 10 for at in first.positions.values())


def test_a_busy_partition_does_not_keep_the_others_out():
    """Every partition is read in turn, though the first has more than a step can read."""
    reading = live(Messages({"a": 1_000_000, "b": 10, "c": 10}, most=10))
    reading.take(0)

    assert reading.positions["b"] == reading.positions["c"] == 10
    assert reading.positions["a"] > 10


def test_a_server_that_is_away_delays_a_replay():
    """A read that gives nothing and is not done is tried again."""
    reading = live(Messages({"a": 500}, away=5))

    assert len(digests(reading.replay(0, {"a": 500}))) == 450


def test_a_stop_ends_a_replay_that_waits():
    """Nothing is taken, and the next run begins where this one did."""
    stop = Event()
    reading = live(Messages({"a": 500}, away=1 << 40), stop=stop)
    reading.positions = {"a": 100}
    stop.set()

    assert reading.replay(0, {"a": 500}) is None
    assert reading.positions == {"a": 100}


def test_rows_that_are_gone_stop_the_run():
    """A source that ends before the logged position has lost rows."""
    reading = live(Messages({"a": 300}))

    with pytest.raises(NoiseReuse, match="ends at 300 now"):
        reading.replay(0, {"a": 500})


def test_a_flood_is_kept_in_files_of_one_size(monkeypatch):
    """The same files, also when a step is taken again with other reads."""
    monkeypatch.setattr("dpstream.engines.embedded.step_rows._LETTERS", 8)
    found = []
    for most in (13, 1000):
        letters = Letters()
        live(Messages({"a": 250}, most=most), letters=letters).replay(3, {"a": 250})
        found.append(letters.files)

    assert found[0] == found[1]
    assert [len(rows) for rows in found[0].values()] == [8, 8, 8, 1]
