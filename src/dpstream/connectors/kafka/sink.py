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
import json
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from dpstream.connectors.encode import another_run, jsonl, run_of, with_numbers
from dpstream.connectors.kafka.client import Problems, client_settings, create, topic_of
from dpstream.connectors.options import ServerOptions
from dpstream.connectors.retry import SECONDS, RetryPolicy
from dpstream.errors import InvalidInput, StateError

# The book of a Kafka sink: a compacted topic with one message for each release that is there.

_BOOK_ASK, _FIRST_ASK = 10.0, 2.0  # seconds that the broker may take
_OTHERS = 60.0  # seconds until the broker ends a transaction that somebody has left open
_BOOK_SETTINGS = {
    "group.id": "dpstream",  # the client wants one; it is not joined
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    "fetch.wait.max.ms": 50,
}


class ReleaseTopic:
    """Entries of all queries of one topic; key and value are JSON."""

    def __init__(self, name: str, topic: str, settings: dict[str, Any], where: str) -> None:
        self.name, self._topic, self._settings, self._where = name, topic, settings, where
        self._admin: Any = None

    def open(self) -> None:
        """Make the book if it is not there; the topic itself must be."""
        if self._admin is not None:
            return
        admin = create(AdminClient, self._settings, self._where)
        try:
            known = admin.list_topics(timeout=_FIRST_ASK).topics
        finally:
            admin.poll(0)  # its callback tells what is wrong, if something is
        if self._topic not in known:
            raise InvalidInput(
                f"{self._where}: the broker has no topic {self._topic!r}; create it first"
            )
        if self.name not in known:
            kept = {"cleanup.policy": "compact"}
            made = admin.create_topics(
                [NewTopic(self.name, 1, config=kept)], request_timeout=_BOOK_ASK
            )
            try:
                made[self.name].result()
            except KafkaException as problem:
                self._explain(problem)
        self._admin = admin

    def entry(self, about: dict[str, Any]) -> tuple[bytes, bytes]:
        """Key and value of a release's entry."""
        key = [about["query"], about["window"], about["trigger"]]
        return json.dumps(key).encode(), json.dumps(about).encode()

    def read(self, query: str) -> dict[tuple[int, int], str]:
        """The releases of a query that are there, by (window, trigger), and their runs.

        Reads to the end of what is written now, also behind transactions that others have open: an
        entry of this query may stand there.
        """
        found: dict[tuple[int, int], str] = {}
        consumer = create(Consumer, self._settings | _BOOK_SETTINGS, self._where)
        try:
            ends = self._ends(consumer)
            left = {number for number, end in ends.items() if end}
            consumer.assign([TopicPartition(self.name, n, OFFSET_BEGINNING) for n in ends])
            deadline = time.monotonic() + _OTHERS
            while left:
                for message in consumer.consume(10_000, 0.05):
                    error = message.error()
                    if error is None:
                        key = json.loads(message.key())
                        if key[0] == query:
                            found[key[1], key[2]] = json.loads(message.value())["run"]
                    elif error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    elif message.offset() >= ends[message.partition()]:
                        left.discard(message.partition())
                if time.monotonic() > deadline:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        finally:
            consumer.close()
        return found

    def close(self) -> None:
        """Leave the broker."""
        self._admin = None

    def _ends(self, consumer: Any) -> dict[int, int]:
        """Where each partition ends now, transactions that are open included."""
        about = consumer.list_topics(self.name, timeout=_BOOK_ASK).topics[self.name]
        places = {TopicPartition(self.name, n): OffsetSpec.latest() for n in about.partitions}
        asked = self._admin.list_offsets(
            places, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=_BOOK_ASK
        )
        return {place.partition: int(told.result().offset) for place, told in asked.items()}

    def _explain(self, problem: KafkaException) -> None:
        code = problem.args[0].code()
        if code == KafkaError.TOPIC_ALREADY_EXISTS:
            return
        if code in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED):
            raise InvalidInput(
                f"{self._where}: this user may not create the topic {self.name!r}; create it, with "
                "one partition and cleanup.policy=compact, and let this user read and write it"
            ) from None
        raise problem


_ASK = 10.0  # seconds that the broker may take for a step of a transaction, if patience allows
_SETTINGS = {
    "transaction.timeout.ms": 30_000,
    "message.timeout.ms": 20_000,
    "queue.buffering.max.messages": 1_000_000,
    "linger.ms": 5,
}
_FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)
_TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE)


def from_options(options: ServerOptions) -> KafkaSink:
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
        self._book = ReleaseTopic(book or f"{topic}.releases", topic, self._settings, where)
        self._producers: dict[str, Any] = {}
        self._done: dict[str, dict[tuple[int, int], str]] = {}  # by query: releases and their runs

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Publish the rows, unless the release is in the book."""
        run = run_of(table)
        rows = jsonl(with_numbers(table, window, trigger)).splitlines()
        self._try(name, lambda: self._once(name, window, trigger, run, rows))

    def fence(self, name: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        self._try(name, lambda: self._refuse_another(name, run))

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
