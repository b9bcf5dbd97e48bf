"""Releases as messages of a Kafka topic, each release in one transaction.

A row is a message: a JSON object under the query's name as key, so that a query's rows stay in one
partition and in order. With a release's rows its entry in the index is written, in the same
transaction: the index is the compacted topic `<topic>.releases` with one message per release. Rows
without their entry were never committed, and nobody who reads committed messages sees them.

A sink that starts first ends what one before it has left open (the transactional id belongs to the
topic and the query, and whoever held it is shut out), then reads the index: so it knows exactly
what is there. When a commit's outcome is not known it does the same again.
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
from dpstream.connectors.kafka.client import (
    CONSUMER,
    Problems,
    client_settings,
    create_client,
    no_topic,
)
from dpstream.connectors.server_base import ServerAway, ServerOptions
from dpstream.errors import InvalidInput, StateError

_ASK, _FIRST_ASK = 10.0, 2.0  # seconds that the broker may take
_OTHERS = 60.0  # seconds until the broker ends a transaction that somebody has left open
_PRODUCER = {
    "transaction.timeout.ms": 30_000,
    "message.timeout.ms": 20_000,
    "message.max.bytes": 1_000_000_000,  # the topic says what is too large, and can be told more
    "queue.buffering.max.messages": 1_000_000,
    "linger.ms": 5,
}
_FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)
_TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE)


class KafkaSink:
    """The sink of kafka://HOST:PORT/TOPIC?...: each release once, in one transaction.

    Readers must set isolation.level=read_committed. `index_topic`: another name for the topic of
    entries; it is made if it is not there.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._topic = options.path_name("topic", "kafka://HOST:PORT/TOPIC")
        self._where = options.where
        self._problems = Problems(self._where)
        self._settings = client_settings(options) | {"error_cb": self._problems}
        self._retry = options.retry_policy()
        self._ask = min(_ASK, max(1.0, self._retry.seconds))
        self._index = options.text("index_topic") or f"{self._topic}.releases"
        self._admin: Any = None
        self._producers: dict[str, Any] = {}
        self._done: dict[str, dict[tuple[int, int], str]] = {}  # by query: releases and their runs

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Publish the rows, unless the release is in the index."""
        run = run_of(table)
        rows = jsonl(with_numbers(table, window, trigger)).splitlines()
        self._insist(name, lambda: self._once(name, window, trigger, run, rows))

    def check(self, name: str, schema: pa.Schema) -> None:
        """Refuse a topic that is not there; nobody who publishes there is shut out yet."""
        with_numbers(schema.empty_table(), 0, 1)
        self._insist(name, self._find_topics, open_first=False)

    def fence(self, name: str, run: str) -> None:
        """Refuse a query that is here with releases of another run."""
        self._insist(name, lambda: self._refuse_another(name, run))

    def close(self) -> None:
        """Leave the broker; nothing is on its way."""
        self._producers.clear()
        self._admin = None

    def _insist(self, query: str, work: Callable[[], Any], *, open_first: bool = True) -> None:
        """Do it until it is done, or the broker was away for too long."""

        def connected_work() -> None:
            try:
                if open_first:
                    self._open(query)
                work()
            except KafkaException as problem:
                # Whatever state the clients are in: begin anew, from the index.
                self._producers.pop(query, None)
                self._admin = None
                error = problem.args[0]
                self._raise_refusal(error, query)
                words = f"the broker did not take a release ({error.name()})"
                raise ServerAway(words) from problem

        self._retry.insist(connected_work)

    def _open(self, query: str) -> None:
        """A producer that owns the query, and what the index has of it."""
        if query in self._producers:
            return
        if self._admin is None:
            self._admin = self._open_index()
        digest = hashlib.sha256(f"{self._topic}\0{query}".encode()).hexdigest()[:32]
        own = _PRODUCER | {"transactional.id": f"dpstream-{digest}"}
        producer = create_client(Producer, self._settings | own, self._where)
        producer.init_transactions(self._ask)  # ends what another one has begun, and shuts it out
        self._done[query] = self._read_index(query)
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
        key, entry = [query, window, trigger], about | {"rows": len(rows)}
        index_key, index_value = (json.dumps(part).encode() for part in (key, entry))
        self._send(producer, self._index, index_key, index_value, headers)
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

    def _raise_refusal(self, error: KafkaError, query: str) -> None:
        """Raise what trying again cannot mend."""
        self._problems(error)
        self._problems.raise_refusal()
        if error.code() in _FENCED:
            raise StateError(
                f"{self._where}: another process has begun to publish {query!r}, and this one was "
                "shut out; run one at a time"
            ) from None
        if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
            raise no_topic(self._where, self._topic) from None
        if error.code() in _TOO_LARGE:
            raise InvalidInput(
                f"{self._where}: a row of {query!r} is larger than the topic's max.message.bytes"
            ) from None

    def _find_topics(self) -> tuple[Any, Any]:
        """A client, and the topics that it knows; that of the releases must be there."""
        admin = create_client(AdminClient, self._settings, self._where)
        try:
            known = admin.list_topics(timeout=_FIRST_ASK).topics
        finally:
            admin.poll(0)  # its callback tells what is wrong, if something is
        if self._topic not in known:
            raise no_topic(self._where, self._topic)
        return admin, known

    def _open_index(self) -> Any:
        """Make the index if it is not there."""
        admin, known = self._find_topics()
        if self._index not in known:
            self._create_index(admin)
        return admin

    def _read_index(self, query: str) -> dict[tuple[int, int], str]:
        """The releases of a query that are there, by (window, trigger), and their runs.

        Reads to the end of what is written now, also behind transactions that others have open: an
        entry of this query may stand there.
        """
        runs: dict[tuple[int, int], str] = {}
        settings = self._settings | CONSUMER | {"fetch.wait.max.ms": 50}
        consumer = create_client(Consumer, settings, self._where)
        try:
            ends = self._index_ends(consumer)
            left = {number for number, end in ends.items() if end}
            consumer.assign([TopicPartition(self._index, n, OFFSET_BEGINNING) for n in ends])
            deadline = time.monotonic() + _OTHERS
            while left:
                for message in consumer.consume(10_000, 0.05):
                    error = message.error()
                    if error is None:
                        key = json.loads(message.key())
                        if key[0] == query:
                            runs[key[1], key[2]] = json.loads(message.value())["run"]
                    elif error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    elif message.offset() >= ends[message.partition()]:
                        left.discard(message.partition())
                if time.monotonic() > deadline:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        finally:
            consumer.close()
        return runs

    def _index_ends(self, consumer: Any) -> dict[int, int]:
        """Where each partition ends now, transactions that are open included."""
        about = consumer.list_topics(self._index, timeout=_ASK).topics[self._index]
        places = {TopicPartition(self._index, n): OffsetSpec.latest() for n in about.partitions}
        asked = self._admin.list_offsets(
            places, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=_ASK
        )
        return {place.partition: int(answer.result().offset) for place, answer in asked.items()}

    def _create_index(self, admin: Any) -> None:
        topic = NewTopic(self._index, 1, config={"cleanup.policy": "compact"})
        try:
            admin.create_topics([topic], request_timeout=_ASK)[self._index].result()
        except KafkaException as problem:
            code = problem.args[0].code()
            if code in (
                KafkaError.TOPIC_AUTHORIZATION_FAILED,
                KafkaError.CLUSTER_AUTHORIZATION_FAILED,
            ):
                raise InvalidInput(
                    f"{self._where}: this user may not create the topic {self._index!r}; create "
                    "it, with one partition and cleanup.policy=compact, and let this user read "
                    "and write it"
                ) from None
            if code != KafkaError.TOPIC_ALREADY_EXISTS:
                raise


from_options = KafkaSink
