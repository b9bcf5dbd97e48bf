"""The book of a Kafka sink: a compacted topic with one message for each release that is there."""

from __future__ import annotations

import json
import time
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from dpstream.connectors.kafka_client import create
from dpstream.errors import InvalidInput

_ASK, _FIRST_ASK = 10.0, 2.0  # seconds that the broker may take
_OTHERS = 60.0  # seconds until the broker ends a transaction that somebody has left open
_SETTINGS = {
    "group.id": "dpstream",  # the client wants one; it is not joined
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    "fetch.wait.max.ms": 50,
}


class Book:
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
            made = admin.create_topics([NewTopic(self.name, 1, config=kept)], request_timeout=_ASK)
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
        consumer = create(Consumer, self._settings | _SETTINGS, self._where)
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
        about = consumer.list_topics(self.name, timeout=_ASK).topics[self.name]
        places = {TopicPartition(self.name, n): OffsetSpec.latest() for n in about.partitions}
        asked = self._admin.list_offsets(
            places, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=_ASK
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
