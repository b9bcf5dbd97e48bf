"""Releases as messages of a Kafka topic, each release in one transaction.

A row is a message: a JSON object under the query's name as key, so that a query's rows stay in one
partition and in order. With a release's rows its entry in the book is written, in the same
transaction: the book is the compacted topic `<topic>.releases` with one message per release. Rows
without their entry were never committed, and nobody who reads committed messages sees them.

A sink that starts first ends what one before it has left open (the transactional id belongs to the
topic and the query, and whoever held it is shut out), then reads the book: so it knows exactly what
is there. When a commit's outcome is not known it does the same again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer

from dpstream.connectors.kafka_client import Problems, client_settings, create, topic_of
from dpstream.connectors.options import Options
from dpstream.connectors.retry import SECONDS, RetryPolicy
from dpstream.connectors.sinks.encode import jsonl
from dpstream.connectors.sinks.kafka_book import Book
from dpstream.connectors.sinks.numbers import another_run, run_of, with_numbers
from dpstream.errors import InvalidInput, StateError

_ASK = 10.0  # seconds that the broker may take for a step of a transaction, if patience allows
_SETTINGS = {
    "transaction.timeout.ms": 30_000,
    "message.timeout.ms": 20_000,
    "queue.buffering.max.messages": 1_000_000,
    "linger.ms": 5,
}
_FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)
_TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE)


def from_options(options: Options) -> KafkaSink:
    """The sink of kafka://HOST:PORT/TOPIC?..."""
    return KafkaSink(
        topic=topic_of(options),
        settings=client_settings(options),
        where=options.where,
        patience=options.number("patience", SECONDS),
        book=options.text("book"),
    )


class KafkaSink:
    """Publishes each release once. Readers must set isolation.level=read_committed.

    `book`: another name for the topic of entries; it is made if it is not there.
    """

    def __init__(
        self,
        *,
        topic: str,
        settings: dict[str, Any],
        where: str,
        patience: float = SECONDS,
        book: str | None = None,
    ) -> None:
        self._topic, self._where = topic, where
        self._problems = Problems(where)
        self._settings = settings | {"error_cb": self._problems}
        self._retry = RetryPolicy(where, seconds=patience)
        self._ask = min(_ASK, max(1.0, patience))
        self._book = Book(book or f"{topic}.releases", topic, self._settings, where)
        self._producers: dict[str, Any] = {}
        self._done: dict[str, dict[tuple[int, int], str]] = {}  # by query: releases and their runs

    def write(self, query: str, window: int, trigger: int, table: pa.Table) -> None:
        """Publish the rows, unless the release is in the book."""
        run = run_of(table)
        rows = jsonl(with_numbers(table, window, trigger)).splitlines()
        self._try(query, lambda: self._once(query, window, trigger, run, rows))

    def fence(self, query: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        self._try(query, lambda: self._refuse_another(query, run))

    def close(self) -> None:
        """Leave the broker; nothing is on its way."""
        self._producers.clear()
        self._book.close()

    def _try(self, query: str, work: Callable[[], None]) -> None:
        """Until it is done, or the broker was away for too long."""
        while True:
            try:
                self._open(query)
                work()
                self._retry.well()
                return
            except KafkaException as problem:
                # Whatever state the clients are in: begin anew, from the book.
                self._producers.pop(query, None)
                self._book.close()
                error = problem.args[0]
                self._raise(error, query)
                self._retry.failed(f"the broker did not take a release ({error.name()})")
            self._retry.wait()

    def _open(self, query: str) -> None:
        """A producer that owns the query, and what the book has of it."""
        if query in self._producers:
            return
        self._book.open()
        digest = hashlib.sha256(f"{self._topic}\0{query}".encode()).hexdigest()[:32]
        own = _SETTINGS | {"transactional.id": f"dpstream-{digest}"}
        producer = create(Producer, self._settings | own, self._where)
        producer.init_transactions(self._ask)  # ends what another one has begun, and shuts it out
        self._done[query] = self._book.read(query)
        self._producers[query] = producer

    def _once(self, query: str, window: int, trigger: int, run: str, rows: list[bytes]) -> None:
        self._refuse_another(query, run)
        done = self._done[query]
        if (window, trigger) in done:
            return
        producer = self._producers[query]
        about = {"query": query, "window": window, "trigger": trigger, "run": run}
        headers = [(f"dpstream-{name}", str(value)) for name, value in about.items()]
        producer.begin_transaction()
        for row in rows:
            self._send(producer, self._topic, query.encode(), row, headers)
        key, entry = self._book.entry(about | {"rows": len(rows)})
        self._send(producer, self._book.name, key, entry, headers)
        producer.commit_transaction(self._ask)
        done[window, trigger] = run

    def _send(
        self, producer: Any, topic: str, key: bytes, value: bytes, headers: list[tuple[str, str]]
    ) -> None:
        while True:
            try:
                producer.produce(topic, value, key, headers=headers)
                return
            except BufferError:  # more rows than the client holds
                producer.poll(0.1)

    def _refuse_another(self, query: str, run: str) -> None:
        runs = set(self._done[query].values())
        if runs and run not in runs:
            raise another_run(f"the topic {self._topic}", query)

    def _raise(self, error: KafkaError, query: str) -> None:
        """Raise what trying again cannot mend."""
        self._problems(error)
        self._problems.raise_refusal()
        if error.code() in _FENCED:
            raise StateError(
                f"{self._where}: another process has begun to publish {query!r}, and this one was "
                "shut out; run one at a time"
            ) from None
        if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
            raise InvalidInput(
                f"{self._where}: the broker has no topic {self._topic!r}; create it first"
            ) from None
        if error.code() in _TOO_LARGE:
            raise InvalidInput(
                f"{self._where}: a row of {query!r} is larger than the topic's max.message.bytes"
            ) from None
