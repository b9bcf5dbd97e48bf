"""What every sink must do: a release is there once and whole, whatever happened meanwhile."""

from __future__ import annotations

import json
from abc import abstractmethod
from contextlib import AbstractContextManager
from functools import partial
from threading import Timer
from typing import Any

import pyarrow as pa

from dpstream.connectors.testing.source_suite import raised
from dpstream.errors import DpstreamError, ServerUnreachable
from dpstream.records import FencingSink, Sink

Seen = list[tuple[str, float]]


def release(
    query: str, window: int, trigger: int, *, run: str = "run 1", rows: int = 3
) -> pa.Table:
    """A release as the engine makes it; its counts tell which one it is."""
    told = {"query": query, "run": run, "window": window, "release_index": trigger}
    values = [1000.0 * window + 10 * trigger + n for n in range(rows)]
    pages = pa.array([f"/{n}" for n in range(rows)], pa.string())
    table = pa.table({"page": pages, "count": pa.array(values, pa.float64())})
    return table.replace_schema_metadata({"dpstream": json.dumps(told)})


def seen_of(*tables: pa.Table) -> Seen:
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
    def published(self, name: str) -> Seen:
        """`page` and `count` of every row that a reader sees of a query, sorted."""

    def test_releases_are_published(self) -> None:
        """Those of several windows, triggers and queries."""
        sink = self.open()
        tables = {(q, w, t): release(q, w, t) for q in "ab" for w in (0, 1) for t in (1, 2)}
        for (query, window, trigger), table in tables.items():
            sink.write(query, window, trigger, table)
        sink.close()
        for query in "ab":
            mine = [table for (q, _, _), table in tables.items() if q == query]
            assert self.published(query) == seen_of(*mine)

    def test_a_release_is_published_once(self) -> None:
        """By one sink, and by one that starts later; what is there stays as it is."""
        first, other = release("a", 0, 1), release("a", 0, 1, rows=5)
        sink = self.open()
        sink.write("a", 0, 1, first)
        sink.write("a", 0, 1, other)
        sink.close()
        sink = self.open()
        sink.write("a", 0, 1, other)
        sink.write("a", 0, 2, release("a", 0, 2))
        sink.close()
        assert self.published("a") == seen_of(first, release("a", 0, 2))

    def test_a_release_without_rows(self) -> None:
        """It is a release like any other."""
        sink = self.open()
        sink.write("a", 0, 1, release("a", 0, 1, rows=0))
        sink.write("a", 0, 1, release("a", 0, 1))
        sink.write("a", 0, 2, release("a", 0, 2))
        sink.close()
        assert self.published("a") == seen_of(release("a", 0, 2))

    def test_another_run_is_refused(self) -> None:
        """Its releases would be taken for those that are there."""
        sink = self.open()
        sink.write("a", 0, 1, release("a", 0, 1))
        sink.close()
        sink = self.open()
        assert isinstance(sink, FencingSink), "a sink must refuse another run: it needs `fence`"
        sink.fence("a", "run 1")
        other = release("a", 0, 2, run="run 2")
        for refused in (partial(sink.fence, "a", "run 2"), partial(sink.write, "a", 0, 2, other)):
            assert "another run" in str(raised(DpstreamError, refused))
        sink.close()
        assert self.published("a") == seen_of(release("a", 0, 1))


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
        sink = self.open()
        sink.write("a", 0, 1, release("a", 0, 1))
        sink.close()
        self.break_off("a", 0, 2, release("a", 0, 2, rows=50))
        assert self.published("a") in (
            seen_of(release("a", 0, 1)),
            seen_of(release("a", 0, 1), release("a", 0, 2, rows=50)),
        )
        sink = self.open()
        sink.write("a", 0, 2, release("a", 0, 2, rows=50))
        sink.write("a", 0, 3, release("a", 0, 3))
        sink.close()
        assert self.published("a") == seen_of(
            release("a", 0, 1), release("a", 0, 2, rows=50), release("a", 0, 3)
        )

    def test_a_server_that_goes_away_and_comes_back(self) -> None:
        """The write waits; what is published then is there once."""
        sink = self.open()
        sink.write("a", 0, 1, release("a", 0, 1))
        gone = self.away()
        gone.__enter__()
        back = Timer(1.0, gone.__exit__, (None, None, None))
        back.start()
        for trigger in (2, 3):
            sink.write("a", 0, trigger, release("a", 0, trigger))
        back.join()
        sink.close()
        assert self.published("a") == seen_of(*(release("a", 0, t) for t in (1, 2, 3)))

    def test_patience_ends(self) -> None:
        """A server that stays away is an error that says so; nothing is lost or doubled by it."""
        sink = self.impatient()
        sink.write("a", 0, 1, release("a", 0, 1))
        with self.away():
            error = raised(ServerUnreachable, lambda: sink.write("a", 0, 2, release("a", 0, 2)))
            assert "patience" in str(error)
        sink.close()
        sink = self.open()
        sink.write("a", 0, 2, release("a", 0, 2))
        sink.close()
        assert self.published("a") == seen_of(release("a", 0, 1), release("a", 0, 2))
