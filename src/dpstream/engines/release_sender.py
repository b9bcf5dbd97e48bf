"""Tables on their way to a sink, in order, while the next steps are worked on.

A `TwoPhaseSink` prepares several tables at a time and shows them in order; any other sink writes
one table after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from dpstream.errors import ServerUnreachable, StateError
from dpstream.group_by.flow import Publication
from dpstream.records import Sink, TwoPhaseSink
from dpstream.telemetry import span

Sent = Future[list[pa.Table]]

_AT_ONCE = 3  # tables that are prepared at the same time; most of it is waiting for the disk
MOST_PENDING = 6
"""Steps whose tables are not durable yet, before the engine waits."""


class Sender:
    """Sends the tables of one query to its sink; those of `pending` steps may be under way."""

    def __init__(
        self, sink: Sink | None, query: str, pending: int = MOST_PENDING, *, here: bool = False
    ) -> None:
        """`here`: who sends waits anyway; a sink of one phase is called in the same thread."""
        self._sink, self._query, self._most = sink, query, pending
        self._two_phase = sink if isinstance(sink, TwoPhaseSink) else None
        self._here = here and self._two_phase is None
        self._preparing = ThreadPoolExecutor(1 if self._two_phase is None else _AT_ONCE)
        self._publishing = ThreadPoolExecutor(1)
        self._waiting: deque[tuple[list[Future[Any]], list[pa.Table], Sent]] = deque()
        self._sent: deque[Sent] = deque()
        self._failure: BaseException | None = None

    def send(self, publications: Sequence[Publication]) -> Sent:
        """Begin to send a step's tables; the answer is there when the sink has them for good."""
        tables, done, begun = [p.table for p in publications], Sent(), []
        if self._here:
            return self._send_here(publications, tables)
        if self._sink is not None:
            begun = [self._preparing.submit(self._write, p) for p in publications]
        self._waiting.append((begun, tables, done))
        self._sent.append(done)
        self._publishing.submit(self._publish)
        return done

    def _send_here(self, publications: Sequence[Publication], tables: list[pa.Table]) -> Sent:
        done = Sent()
        self._sent.append(done)
        try:
            for publication in publications:
                self._write(publication)
            if self._failure is not None:
                raise self._failure
            done.set_result(tables)
        except BaseException as error:
            self._failure = explain_sink_error(error)
            done.set_exception(self._failure)
        return done

    def arrived(self, *, all_of_them: bool) -> list[list[pa.Table]]:
        """Steps whose tables are durable and were not asked for before; waits where it must."""
        steps: list[list[pa.Table]] = []
        most = 0 if all_of_them else self._most
        while self._sent and (len(self._sent) > most or self._sent[0].done()):
            steps.append(self._sent.popleft().result())
        return steps

    def close(self) -> None:
        """Stop the threads."""
        self._preparing.shutdown()
        self._publishing.shutdown()

    def _write(self, publication: Publication) -> Any:
        """Write a table, or prepare it if the sink has two phases: then give what to publish."""
        due = publication.due
        release = (self._query, due.window, due.release, publication.table)
        with span("sink", query=self._query, window=due.window, release=due.release):
            return self._write_one(release)

    def _write_one(self, release: tuple[str, int, int, pa.Table]) -> Any:
        if self._two_phase is not None:
            return self._two_phase.prepare(*release)
        if self._sink is not None and self._failure is None:  # nothing goes out after a failure
            try:
                self._sink.write(*release)
            except BaseException as error:
                self._failure = error
                raise
        return None

    def _publish(self) -> None:
        """Make visible what is prepared, as far as it is in order."""
        batch: list[tuple[list[Future[Any]], list[pa.Table], Sent]] = []
        while self._waiting and (not batch or _are_ready(self._waiting[0][0])):
            batch.append(self._waiting.popleft())
        if not batch:
            return  # an earlier call has taken it along
        try:
            if self._failure is not None:
                raise self._failure
            prepared = [future.result() for begun, _, _ in batch for future in begun]
            if self._two_phase is not None:
                self._two_phase.publish(prepared)
        except BaseException as error:
            self._failure = explain_sink_error(error)
            for _, _, done in batch:
                done.set_exception(self._failure)
            return
        for _, tables, done in batch:
            done.set_result(tables)


def _are_ready(futures: list[Future[Any]]) -> bool:
    return all(future.done() and future.exception() is None for future in futures)


def explain_sink_error(error: BaseException) -> BaseException:
    """A failed write in words; a server that is away says enough itself."""
    if not isinstance(error, OSError) or isinstance(error, ServerUnreachable):
        return error
    explained = StateError(
        f"the sink cannot be written: {error}; mend that and run again: nothing is lost"
    )
    explained.__cause__ = error
    return explained
