"""What every source and every sink must do, as suites that pytest runs.

A source gives the same rows again, ends where told, and loses nothing quietly. A release is in a
sink once and whole, whatever happened meanwhile.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from threading import Timer
from typing import Any

import pyarrow as pa

from dpstream.connectors.encode import release_facts
from dpstream.connectors.shared import UpsertSink
from dpstream.errors import (
    DpstreamError,
    InvalidInput,
    InvalidParameter,
    RowsLost,
    ServerUnreachable,
)
from dpstream.records import (
    Batch,
    Columns,
    FencingSink,
    Position,
    Rejected,
    Sink,
    Source,
    check_schema,
    is_reached,
)

Row = dict[str, str]
_DEADLINE = 30.0
_SOON = 1.5
"""Seconds within which a live read must return, on a machine that is busy."""


@dataclass(kw_only=True)
class Read:
    """What was read of one partition: the chunks, and the positions between them."""

    positions: list[Position] = field(default_factory=lambda: [None])
    batches: list[Batch] = field(default_factory=list)

    def rows(self, start: int = 0, stop: int | None = None) -> Counter[str]:
        """The rows of some of the chunks as texts, in any order, with how often each comes."""
        rows = (row for batch in self.batches[start:stop] for row in batch.table.to_pylist())
        return Counter(json.dumps({k: str(v) for k, v in sorted(row.items())}) for row in rows)

    def rejected(self) -> list[Rejected]:
        """What could not be read."""
        return [row for batch in self.batches for row in batch.rejected]


def drain(source: Source, reads: dict[str, Read], *, rows: int) -> None:
    """Read every partition on to its end, and further until there are so many rows."""
    deadline = time.monotonic() + _DEADLINE
    while True:
        for name in source.partitions():
            read, done = reads.setdefault(name, Read()), False
            while not done:
                batch = source.read(name, read.positions[-1])
                done = batch.done
                if len(batch.table) or batch.rejected or batch.position != read.positions[-1]:
                    read.batches.append(batch)
                    read.positions.append(json.loads(json.dumps(batch.position)))
                assert time.monotonic() < deadline, f"{name} does not come to an end"
        if all_rows(reads).total() >= rows:
            return
        assert time.monotonic() < deadline, f"rows are missing; got {all_rows(reads)}"


def all_rows(reads: dict[str, Read]) -> Counter[str]:
    """The rows of all partitions."""
    return sum((read.rows() for read in reads.values()), Counter())


def replay(
    source: Source, name: str, start: Position, until: Position, columns: Columns = None
) -> Read:
    """One partition from a position until another, as a recovery reads it."""
    read, deadline = Read(positions=[start]), time.monotonic() + _DEADLINE
    while True:
        batch = source.read(name, read.positions[-1], columns=columns, until=until)
        read.batches.append(batch)
        read.positions.append(batch.position)
        if batch.done:
            return read
        assert time.monotonic() < deadline, f"{name} does not come to {until}"


class SourceSuite:
    """For any source: say how to fill and open it.

    `open` gives a fresh source over what was `put`; all of them see the same rows. Rows have the
    columns `user` and `page`, and are text. A source that is not `growing` is filled before it is
    opened.
    """

    growing = False

    @abstractmethod
    def open(self) -> Source:
        """A source, as another process would open it."""

    @abstractmethod
    def put(self, rows: list[Row]) -> None:
        """Add rows; they are there when this returns."""

    def read_in_rounds(self) -> tuple[dict[str, Read], list[Row]]:
        """Everything, read while it was put there if the source grows."""
        rounds = [_rows(0, 40), _rows(40, 41), _rows(41, 120)]
        reads: dict[str, Read] = {}
        if not self.growing:
            for rows in rounds:
                self.put(rows)
            rounds = [[row for rows in rounds for row in rows]]
        source, seen = self.open(), 0
        for rows in rounds:
            if self.growing:
                self.put(rows)
            seen += len(rows)
            drain(source, reads, rows=seen)
        source.close()
        return reads, [row for rows in rounds for row in rows]

    def test_every_row_comes_once(self) -> None:
        """None is lost, none comes twice, and the columns are those asked for."""
        reads, rows = self.read_in_rounds()
        assert all_rows(reads) == Counter(json.dumps(row, sort_keys=True) for row in rows)
        with closing(self.open()) as source:
            for name in reads:
                batch = source.read(name, None, columns=["page"], until=reads[name].positions[1])
                assert batch.table.column_names == ["page"]

    def test_replay_from_any_position(self) -> None:
        """Another process, from each position until each later one: those rows and no others."""
        reads, _ = self.read_in_rounds()
        with closing(self.open()) as source:
            for name, read in reads.items():
                places = [*range(len(read.positions))]
                places = places if len(places) < 12 else [*places[:6], *places[-6:]]
                for i in places:
                    for j in (j for j in places if j > i):
                        again = replay(source, name, read.positions[i], read.positions[j])
                        assert again.rows() == read.rows(i, j), (name, i, j)
                        assert again.positions[-1] == read.positions[j]

    def test_positions_rise(self) -> None:
        """So that a query that lags can tell how far it is."""
        reads, _ = self.read_in_rounds()
        for read in reads.values():
            for before, after in pairwise(read.positions):
                assert is_reached(after, before), (before, after)
                assert before == after or not is_reached(before, after), (before, after)

    def test_at_until_nothing_follows(self) -> None:
        """A read that begins where it is to end gives no rows and is done."""
        reads, _ = self.read_in_rounds()
        with closing(self.open()) as source:
            for name, read in reads.items():
                for position in read.positions[1:]:
                    batch = source.read(name, position, until=position)
                    assert batch.done
                    assert not len(batch.table)
                    assert not batch.rejected
                    assert batch.position == position

    def test_a_foreign_position_is_refused(self) -> None:
        """Rather than rows from somewhere."""
        self.put(_rows(0, 5))
        with closing(self.open()) as source:
            name = source.partitions()[0]
            for position in self.foreign_positions():
                expect_error(InvalidInput, partial(source.read, name, position))

    @abstractmethod
    def foreign_positions(self) -> list[Position]:
        """Positions that this source cannot have given."""


class ServerSourceSuite(SourceSuite):
    """For a source that a server keeps, and that messages are put into while it runs."""

    growing = True

    @abstractmethod
    def spoil(self) -> None:
        """Add one message that is no row, among others."""

    @abstractmethod
    def lose(self) -> None:
        """Remove every row that is there, as retention does."""

    @abstractmethod
    def away(self) -> AbstractContextManager[Any]:
        """The server is killed; it is back after the `with`."""

    @abstractmethod
    def impatient(self) -> Source:
        """A source that waits for its server for less than a second."""

    def test_what_has_come_since_is_not_replayed(self) -> None:
        """A replay ends at its position, whatever follows."""
        reads, _ = self.read_in_rounds()
        self.put(_rows(200, 300))
        with closing(self.open()) as source:
            for name, read in reads.items():
                again = replay(source, name, None, read.positions[-1])
                assert again.rows() == read.rows()

    def test_poison_is_set_aside(self) -> None:
        """With its place and a reason, once, also in a replay; the rows around it come."""
        reads: dict[str, Read] = {}
        self.put(_rows(0, 5))
        self.spoil()
        self.put(_rows(5, 10))
        with closing(self.open()) as source:
            drain(source, reads, rows=10)
            bad = [row for read in reads.values() for row in read.rejected()]
            assert len(bad) == 1, bad
            assert bad[0].where
            assert bad[0].reason
            again = {n: replay(source, n, None, read.positions[-1]) for n, read in reads.items()}
            assert [row for read in again.values() for row in read.rejected()] == bad

    def test_rows_that_are_gone_are_an_error(self) -> None:
        """Those of a replay, and those that were never read."""
        source, reads = self.open(), dict[str, Read]()
        self.put(_rows(0, 30))
        drain(source, reads, rows=30)
        source.close()
        self.put(_rows(30, 60))
        self.lose()
        for name, read in reads.items():
            last = read.positions[-1]
            for start, until in ((None, last), (last, None)):
                source = self.open()
                expect_error(RowsLost, partial(_read_on, source, name, start, until))
                source.close()

    def test_an_idle_read_returns_soon(self) -> None:
        """The engine has a trigger to keep."""
        reads, _ = self.read_in_rounds()
        with closing(self.open()) as source:
            for name, read in reads.items():
                replay(source, name, None, read.positions[-1])
                began = time.monotonic()
                batch = source.read(name, read.positions[-1])
                assert time.monotonic() - began < _SOON
                assert not len(batch.table)

    def test_a_server_that_goes_away_and_comes_back(self) -> None:
        """Meanwhile there are no rows, and no error; then all of them come, once."""
        source, reads = self.open(), dict[str, Read]()
        self.put(_rows(0, 30))
        drain(source, reads, rows=30)
        fresh = self.open()
        fresh.partitions()
        with self.away():
            for name, read in reads.items():
                deadline = time.monotonic() + _DEADLINE
                while not (idle := source.read(name, read.positions[-1])).done:
                    assert time.monotonic() < deadline
                assert not len(idle.table)
                early = fresh.read(name, None, until=read.positions[-1])
                assert not early.done or early.position == read.positions[-1]
        self.put(_rows(30, 60))
        drain(source, reads, rows=60)
        assert all_rows(reads) == Counter(json.dumps(r, sort_keys=True) for r in _rows(0, 60))
        for name, read in reads.items():
            again = replay(fresh, name, None, read.positions[-1])
            assert again.rows() == read.rows()
        source.close()
        fresh.close()

    def test_patience_ends(self) -> None:
        """A server that stays away is an error that says so."""
        self.put(_rows(0, 3))
        source = self.impatient()
        names = source.partitions()
        with self.away():
            error = expect_error(ServerUnreachable, lambda: _read_on(source, names[0], None, None))
            assert "patience" in str(error)
        source.close()


def _read_on(source: Source, name: str, position: Position, until: Position) -> Position:
    """Read for a few seconds, or until an error comes."""
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline:
        batch = source.read(name, position, until=until)
        position = batch.position
        if batch.done and until is not None:
            break
        time.sleep(0.05)
    return position


def expect_error(kind: type[DpstreamError], work: Callable[[], object]) -> DpstreamError:
    """The error that some work must end in."""
    try:
        result = work()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised but there is {result!r:.200}")


def _rows(start: int, stop: int) -> list[Row]:
    return [{"page": f"/{n % 7}", "user": f"u{n}"} for n in range(start, stop)]


# What every sink must do: a release is there once and whole, whatever happened meanwhile.

Seen = list[tuple[str, float]]


def release(
    query: str, window: int, trigger: int, *, run: str = "run 1", rows: int = 3
) -> pa.Table:
    """A release as the engine makes it; its counts tell which one it is."""
    facts = {"query": query, "run": run, "window": window, "release_index": trigger}
    values = [1000.0 * window + 10 * trigger + n for n in range(rows)]
    pages = pa.array([f"/{n}" for n in range(rows)], pa.string())
    table = pa.table({"page": pages, "count": pa.array(values, pa.float64())})
    return table.replace_schema_metadata({"dpstream": json.dumps(facts)})


def rows_seen(*tables: pa.Table) -> Seen:
    """The rows that a reader must see."""
    return sorted((r["page"], r["count"]) for table in tables for r in table.to_pylist())


class SinkSuite:
    """For any sink: say how it is opened, and what a reader sees.

    All sinks that `open` gives within a test write to the same place.
    """

    @abstractmethod
    def open(self) -> Sink:
        """A sink, as another process would open it."""

    @abstractmethod
    def visible_rows(self, name: str) -> Seen:
        """`page` and `count` of every row that a reader sees of a query, sorted."""

    def publish(self, *releases: pa.Table) -> None:
        """Write releases, as another process would that opens the sink anew."""
        with closing(self.open()) as sink:
            for table in releases:
                facts = release_facts(table)
                sink.write(facts["query"], facts["window"], facts["release_index"], table)

    def test_releases_are_published(self) -> None:
        """Those of several windows, triggers and queries."""
        tables = {q: [release(q, w, t) for w in (0, 1) for t in (1, 2)] for q in "ab"}
        self.publish(*tables["a"], *tables["b"])
        for query, mine in tables.items():
            assert self.visible_rows(query) == rows_seen(*mine)

    def test_a_release_is_published_once(self) -> None:
        """By one sink, and by one that starts later; what is there stays as it is."""
        first, other = release("a", 0, 1), release("a", 0, 1, rows=5)
        self.publish(first, other)
        self.publish(other, release("a", 0, 2))
        assert self.visible_rows("a") == rows_seen(first, release("a", 0, 2))

    def test_a_release_without_rows(self) -> None:
        """It is a release like any other."""
        self.publish(release("a", 0, 1, rows=0), release("a", 0, 1), release("a", 0, 2))
        assert self.visible_rows("a") == rows_seen(release("a", 0, 2))

    def test_keys_at_the_edges(self) -> None:
        """Whatever a row may bring as a key is written: the run was charged for it."""
        texts = ["", "\0", "\u2028\x85", '\r\n",\t\\', "\U0010ffff"]
        edges = {
            "page": pa.array(texts),
            "day": pa.array([-719_162, 2_932_896, None] * 2, pa.int32()).view(pa.date32()),
            "at": pa.array([-62_135_596_800, 253_402_300_799, None] * 2).cast(pa.timestamp("s")),
            "number": pa.array([-(2**63), 2**63 - 1, None] * 2),
            "unsigned": pa.array([2**64 - 1, 0, None] * 2, pa.uint64()),
            "real": pa.array([float("nan"), float("inf"), -float("inf")] * 2),
            "raw": pa.array([b"", b"\xff\0", None] * 2),
        }
        table = release("a", 0, 1, rows=len(texts))
        columns = {name: values[: len(texts)] for name, values in edges.items()}
        full = pa.table(columns | {"count": table["count"]})
        self.publish(full.replace_schema_metadata(table.schema.metadata))
        seen = sorted(count for _, count in self.visible_rows("a"))
        assert seen == table["count"].to_pylist()

    def test_a_check_leaves_nothing(self) -> None:
        """It may be made again, and what is written after it is all that is there."""
        with closing(self.open()) as sink:
            for _ in range(2):
                check_schema(sink, "a", release("a", 0, 1).schema)
        self.publish(release("a", 0, 1))
        assert self.visible_rows("a") == rows_seen(release("a", 0, 1))

    def test_another_run_is_refused(self) -> None:
        """Its releases would be taken for those that are there."""
        self.publish(release("a", 0, 1))
        with closing(self.open()) as sink:
            assert isinstance(sink, FencingSink), "a sink must refuse another run: it needs `fence`"
            sink.fence("a", "run 1")
            other = partial(sink.write, "a", 0, 2, release("a", 0, 2, run="run 2"))
            for refused in (partial(sink.fence, "a", "run 2"), other):
                assert "another run" in str(expect_error(DpstreamError, refused))
        assert self.visible_rows("a") == rows_seen(release("a", 0, 1))


class UpsertSinkSuite:
    """For a sink that keeps the newest release of each window alone: `open` as for `SinkSuite`."""

    @abstractmethod
    def open(self) -> Any:
        """A sink, as another process would open it."""

    @abstractmethod
    def visible_rows(self, name: str) -> Seen:
        """`page` and `count` of every row that a reader sees of a query, sorted."""

    def publish(self, *releases: pa.Table) -> None:
        """Replace what the windows have, as another process would that opens the sink anew."""
        with closing(UpsertSink(self.open())) as sink:
            for table in releases:
                facts = release_facts(table)
                sink.tell_keys(facts["query"], ["page"])
                sink.check(facts["query"], table.schema)
                sink.write(facts["query"], facts["window"], facts["release_index"], table)

    def test_the_newest_release_of_each_window_stays(self) -> None:
        """Keys that it has no more are deleted, also those that an earlier process has written."""
        long, short = (release("a", 0, t, rows=n) for t, n in ((1, 5), (2, 2)))
        self.publish(long, release("a", 1, 1), release("b", 0, 1))
        assert self.visible_rows("a") == rows_seen(long, release("a", 1, 1))
        self.publish(short)
        assert self.visible_rows("a") == rows_seen(short, release("a", 1, 1))
        self.publish(release("a", 0, 3, rows=4), release("a", 1, 2, rows=0))
        assert self.visible_rows("a") == rows_seen(release("a", 0, 3, rows=4))
        assert self.visible_rows("b") == rows_seen(release("b", 0, 1))

    def test_an_older_release_changes_nothing(self) -> None:
        """A replay brings what was replaced since, and the newest again."""
        tables = [release("a", 0, t, rows=n) for t, n in ((1, 5), (2, 2), (3, 4))]
        self.publish(*tables)
        self.publish(*tables[:2], release("a", 0, 3, rows=9))
        assert self.visible_rows("a") == rows_seen(tables[2])
        self.publish(release("a", 0, 4, rows=2))
        assert self.visible_rows("a") == rows_seen(release("a", 0, 4, rows=2))

    def test_keys_at_the_edges(self) -> None:
        """Keys that differ are different rows, however alike the sink makes them."""
        pages = ["", "\0", "\ufffd", "x" * 9_999, "\u2028\x85", '\r\n",\t\\', "x" * 10_000]
        reals = [float("nan"), None, float("inf"), -float("inf"), 0.5, 1e300, 2.0]
        for trigger, keep in ((1, 7), (2, 5), (3, 7)):
            table = release("a", 0, trigger, rows=keep)
            columns = {"page": pa.array(pages[:keep]), "real": pa.array(reals[:keep])}
            full = pa.table(columns | {"count": table["count"]})
            with closing(UpsertSink(self.open())) as sink:
                sink.tell_keys("a", ["page", "real"])
                sink.write("a", 0, trigger, full.replace_schema_metadata(table.schema.metadata))
                sink.tell_keys("r", ["real"])
                facts = table.schema.metadata
                only = full.select(["real", "count", "page"]).replace_schema_metadata(facts)
                sink.write("r", 0, trigger, only)
            for query in ("a", "r"):
                seen = sorted(count for _, count in self.visible_rows(query))
                assert seen == table["count"].to_pylist()

    def test_other_output_and_another_run_are_refused(self) -> None:
        """Every release beside the newest ones would be no table; a run numbers windows anew."""
        self.publish(release("a", 0, 1))
        with closing(self.open()) as plain:
            every = partial(plain.write, "a", 0, 2, release("a", 0, 2))
            expect_error(DpstreamError, every)
        other = release("a", 0, 2, run="run 2")
        assert "another run" in str(expect_error(DpstreamError, partial(self.publish, other)))
        assert self.visible_rows("a") == rows_seen(release("a", 0, 1))

    def test_a_release_without_its_keys_is_refused(self) -> None:
        """Its rows could not be told apart; before anything is charged."""
        with closing(UpsertSink(self.open())) as sink:
            sink.tell_keys("a", ["page", "day"])
            schema = release("a", 0, 1).schema
            error = expect_error(InvalidParameter, partial(sink.check, "a", schema))
            assert "'day'" in str(error)


class ServerSinkSuite(SinkSuite):
    """For a sink that a server keeps."""

    @abstractmethod
    def away(self) -> AbstractContextManager[Any]:
        """The server is killed; it is back after the `with`."""

    @abstractmethod
    def impatient(self) -> Sink:
        """A sink that waits for its server for less than a second."""

    @abstractmethod
    def break_off(self, query: str, window: int, trigger: int, table: pa.Table) -> None:
        """Write as a process does that is killed with half of the release sent."""

    def test_half_a_release_is_never_seen(self) -> None:
        """It is completed by the next run, which brings the same release."""
        first, second, third = (release("a", 0, t, rows=n) for t, n in ((1, 3), (2, 50), (3, 3)))
        self.publish(first)
        self.break_off("a", 0, 2, second)
        assert self.visible_rows("a") in (rows_seen(first), rows_seen(first, second))
        self.publish(second, third)
        assert self.visible_rows("a") == rows_seen(first, second, third)

    def test_a_server_that_goes_away_and_comes_back(self) -> None:
        """The write waits; what is published then is there once."""
        with closing(self.open()) as sink:
            sink.write("a", 0, 1, release("a", 0, 1))
            gone = self.away()
            gone.__enter__()
            back = Timer(1.0, gone.__exit__, (None, None, None))
            back.start()
            for trigger in (2, 3):
                sink.write("a", 0, trigger, release("a", 0, trigger))
            back.join()
        assert self.visible_rows("a") == rows_seen(*(release("a", 0, t) for t in (1, 2, 3)))

    def test_patience_ends(self) -> None:
        """A server that stays away is an error that says so; nothing is lost or doubled by it."""
        first, second = release("a", 0, 1), release("a", 0, 2)
        with closing(self.impatient()) as sink:
            sink.write("a", 0, 1, first)
            with self.away():
                error = expect_error(ServerUnreachable, lambda: sink.write("a", 0, 2, second))
                assert "patience" in str(error)
        self.publish(second)
        assert self.visible_rows("a") == rows_seen(first, second)
