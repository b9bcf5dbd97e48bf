"""A topic's partitions as a Kafka client fetches them: what is there, and what is gone.

One consumer fetches all partitions ahead of their readers; what has come is sorted by partition.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from dpstream.connectors.kafka_client import Problems, create
from dpstream.connectors.retry import RetryPolicy
from dpstream.errors import DpstreamError, InvalidInput, RowsLost

_POLL = 0.1  # seconds that a fetch waits for messages
_ASK, _FIRST_ASK = 0.5, 3.0  # seconds that a question to the broker may take
_LOOK_EVERY = 5.0  # seconds between looks for new partitions
MESSAGES = 50_000
"""Messages that are taken from the client at once; twice as many may wait for a reader."""
_SILENT = "no broker answers"
_OUT_OF_RANGE = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
_NOT_YET = (  # a partition that is new, or whose leader changes
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
)
_SETTINGS = {
    "group.id": "dpstream",  # the client wants one; it is not joined
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    "fetch.wait.max.ms": 100,
    "queued.max.messages.kbytes": 16 << 10,
    "max.poll.interval.ms": 86_400_000,
    "topic.metadata.refresh.interval.ms": 10_000,
}


class Fetched(NamedTuple):
    """A message."""

    offset: int
    value: bytes | None
    key: Any
    time: int | None
    """Milliseconds since 1970."""


@dataclass(kw_only=True)
class Held:
    """What was fetched of a partition and is not read yet."""

    number: int
    at: int
    """Messages from this offset on."""
    messages: deque[Fetched] = field(default_factory=deque)
    end: int | None = None
    """The partition's end, if everything before it was fetched."""
    paused: bool = False


class Topic:
    """A topic's id and partitions, and what is fetched of them."""

    def __init__(
        self, name: str, settings: dict[str, Any], *, where: str, retry: RetryPolicy
    ) -> None:
        self.name, self._where, self._retry = name, where, retry
        self.id: str | None = None
        self.numbers: list[int] = []
        self._next_look = 0.0
        self._held: dict[int, Held] = {}
        self._problems = Problems(where)
        callback = {"error_cb": self._problems}
        self._consumer = create(Consumer, settings | _SETTINGS | callback, where)
        self._admin: Any = create(AdminClient, settings | callback, where)

    @property
    def failing(self) -> bool:
        """Is no broker answering now?"""
        return self._retry.failing

    def look(self) -> None:
        """Ask for the topic's partitions, every few seconds; wait for the very first answer."""
        try:
            while self.id is None:
                self._retry.wait()
                self._look(_FIRST_ASK)
            if time.monotonic() >= self._next_look and not self._retry.too_early:
                self._look(_ASK)
        except DpstreamError:
            self.close()
            raise

    def range_of(self, number: int) -> tuple[int, int] | None:
        """The first offset of a partition and the one that its next message gets."""
        if self._retry.too_early:
            return None
        place = TopicPartition(self.name, number)
        try:
            low, high = self._consumer.get_watermark_offsets(place, timeout=_ASK, cached=False)
        except KafkaException as problem:
            if problem.args[0].code() not in _NOT_YET:
                self._retry.failed(_SILENT)
            return None
        self._answered()
        return int(low), int(high)

    def fetch(self, number: int, at: int, *, patiently: bool) -> Held:
        """What is there of a partition from an offset on; `patiently` waits for a broker, too."""
        held = self._held.get(number)
        if held is None or held.at != at:
            place = TopicPartition(self.name, number, at)
            if held is not None:
                self._consumer.incremental_unassign([place])
            self._consumer.incremental_assign([place])
            held = self._held[number] = Held(number=number, at=at)
        if not held.messages:
            self._poll(0.0)
        if not held.messages and held.end is None and (patiently or not self.failing):
            self._poll(_POLL)
        if self._problems.down and not held.messages and not self._retry.too_early:
            self._look(_ASK)  # does it answer again?
        return held

    def taken(self, held: Held) -> None:
        """Its messages were read: more may be fetched."""
        if held.paused and not held.messages:
            self._consumer.resume([TopicPartition(self.name, held.number)])
            held.paused = False

    def close(self) -> None:
        """Leave the broker; a second time does nothing."""
        if self._admin is not None:
            self._consumer.close()
        self._admin = None

    def _poll(self, wait: float) -> None:
        """Sort what has come by partition."""
        first = self._consumer.poll(wait) if wait else None
        found = ([] if first is None else [first]) + self._consumer.consume(MESSAGES, 0)
        for message in found:
            error, held = message.error(), self._held.get(message.partition() or 0)
            if held is None:
                continue
            if error is None:
                kind, stamp = message.timestamp()
                told = stamp if kind else None
                offset = message.offset() or 0
                held.messages.append(Fetched(offset, message.value(), message.key(), told))
                held.end = None
            elif error.code() == KafkaError._PARTITION_EOF:
                held.end = message.offset()
            elif error.code() in _OUT_OF_RANGE:
                raise self._gone(held)
            else:
                self._problems(error)
                continue
            self._answered()
        for held in self._held.values():
            if len(held.messages) > 2 * MESSAGES and not held.paused:
                self._consumer.pause([TopicPartition(self.name, held.number)])
                held.paused = True
        self._problems.raise_refusal()

    def _look(self, seconds: float) -> None:
        self._next_look = time.monotonic() + _LOOK_EVERY
        topics = TopicCollection([self.name])
        asked = self._admin.describe_topics(topics, request_timeout=seconds)[self.name]
        try:
            while not asked.done():
                wait([asked], timeout=_POLL)
                self._admin.poll(0)  # its callback tells why there is no answer
                self._problems.raise_refusal()
            found = asked.result()
        except KafkaException as problem:
            error = problem.args[0]
            if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise self._missing() from None
            self._problems(error)
            self._problems.raise_refusal()
            self._retry.failed(_SILENT)
            return
        self._answered()
        if self.id not in (None, str(found.topic_id)):
            raise another_topic(self.name, str(self.id), str(found.topic_id))
        numbers = sorted(one.id for one in found.partitions)
        if self.id is not None and numbers != self.numbers:
            self._tell_consumer()
        self.id, self.numbers = str(found.topic_id), numbers

    def _tell_consumer(self) -> None:
        """The consumer has a view of the topic of its own, which it seldom looks after."""
        try:
            self._consumer.list_topics(self.name, timeout=_ASK)
        except KafkaException:
            self._next_look = 0.0

    def _missing(self) -> InvalidInput:
        if self.id is None:
            return InvalidInput(
                f"{self._where}: the broker has no topic {self.name!r}; create it first"
            )
        return RowsLost(
            f"{self._where}: the topic was deleted; make a new one, and start anew with another "
            "checkpoint location"
        )

    def _gone(self, held: Held) -> RowsLost:
        told = self.range_of(held.number)
        now = "others" if told is None else f"{told[0]} to {told[1] - 1}"
        return RowsLost(
            f"{self.name}/{held.number} has to be read from offset {held.at} on, but its offsets "
            f"are {now} now: retention has removed messages that are needed, or the topic was cut "
            "off; keep messages for longer (retention.ms, retention.bytes), and start anew with "
            "another checkpoint location"
        )

    def _answered(self) -> None:
        self._problems.down = False
        self._retry.well()


def another_topic(name: str, was: str, now: str) -> RowsLost:
    """A topic of the same name is not the one whose offsets are known."""
    return RowsLost(
        f"the topic {name} was deleted and made again, or is that of another cluster: its id was "
        f"{was} and is {now}; start anew with another checkpoint location"
    )
