"""Tables on their way to a sink, in order, while the next steps are worked on.

A sink that divides its work (`prepare`: everything slow, several at a time; `publish`: what is
prepared becomes visible, in order) is used that way; others write one table after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from dpstream.errors import ServerUnreachable, StateError
from dpstream.records import Sink
from dpstream.stages.flow import Publication

Sent = Future[list[pa.Table]]

_AT_ONCE = 3  # tables that are prepared at the same time; most of it is waiting for the disk
MOST_ON_THE_WAY = 6
"""Steps whose tables are not durable yet, before the engine waits."""


class Sender:
    """Sends the tables of one query to its sink; those of `on_the_way` steps may be under way."""

    def __init__(self, sink: Sink | None, query: str, on_the_way: int = MOST_ON_THE_WAY) -> None:
        self._sink, self._query, self._most = sink, query, on_the_way
        self._divided = hasattr(sink, "prepare") and hasattr(sink, "publish")
        self._preparing = ThreadPoolExecutor(_AT_ONCE if self._divided else 1)
        self._publishing = ThreadPoolExecutor(1)
        self._waiting: deque[tuple[list[Future[Any]], list[pa.Table], Sent]] = deque()
        self._sent: deque[Sent] = deque()
        self._failure: BaseException | None = None

    def send(self, publications: Sequence[Publication]) -> Sent:
        """Begin to send a step's tables; the answer is there when the sink has them for good."""
        tables, done = [p.table for p in publications], Sent()
        work = self._prepare if self._divided else self._write
        begun = [self._preparing.submit(work, p) for p in publications if self._sink is not None]
        self._waiting.append((begun, tables, done))
        self._sent.append(done)
        self._publishing.submit(self._publish)
        return done

    def arrived(self, *, all_of_them: bool) -> list[list[pa.Table]]:
        """Steps whose tables are durable and were not asked for before; waits where it must."""
        found: list[list[pa.Table]] = []
        most = 0 if all_of_them else self._most
        while self._sent and (len(self._sent) > most or self._sent[0].done()):
            found.append(self._sent.popleft().result())
        return found

    def close(self) -> None:
        """Stop the threads."""
        self._preparing.shutdown()
        self._publishing.shutdown()

    def _prepare(self, publication: Publication) -> Any:
        due, sink = publication.due, self._sink
        return sink.prepare(self._query, due.window, due.release, publication.table)  # type: ignore[union-attr]

    def _write(self, publication: Publication) -> None:
        due, sink = publication.due, self._sink
        if self._failure is None:  # in order: nothing goes out after one that did not
            try:
                sink.write(self._query, due.window, due.release, publication.table)  # type: ignore[union-attr]
            except BaseException as error:
                self._failure = error
                raise

    def _publish(self) -> None:
        """Make visible what is prepared, as far as it is in order."""
        batch: list[tuple[list[Future[Any]], list[pa.Table], Sent]] = []
        while self._waiting and (not batch or all(map(_went_well, self._waiting[0][0]))):
            batch.append(self._waiting.popleft())
        if not batch:
            return  # an earlier call has taken it along
        try:
            if self._failure is not None:
                raise self._failure
            prepared = [future.result() for begun, _, _ in batch for future in begun]
            if self._divided:
                self._sink.publish(prepared)  # type: ignore[union-attr]
        except BaseException as error:
            self._failure = _explained(error)
            for _, _, done in batch:
                done.set_exception(self._failure)
            return
        for _, tables, done in batch:
            done.set_result(tables)


def _went_well(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None


def _explained(error: BaseException) -> BaseException:
    if not isinstance(error, OSError) or isinstance(error, ServerUnreachable):
        return error
    words = f"the sink cannot be written: {error}; mend that and run again: nothing is lost"
    explained = StateError(words)
    explained.__cause__ = error
    return explained
