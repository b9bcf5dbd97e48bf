"""A Kafka topic as a source: each of its partitions is one, read by offset.

A position is [topic id, first offset, next offset]: where the partition was begun and where it goes
on. The broker keeps none: partitions are assigned, no group is joined, nothing is committed. So a
replay reads what was read, whatever other consumers do, and finds out if it cannot: offsets that
retention has removed, a topic that was deleted and made again, messages that compaction took away.

Offsets may have gaps (transactions, compaction), so a position always follows a message.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from dpstream.connectors.kafka.client import Problems, client_settings, create, topic_of
from dpstream.connectors.messages import FORMATS, MAX_BYTES, Decoder, messages_of
from dpstream.connectors.options import ServerOptions
from dpstream.connectors.retry import SECONDS, RetryPolicy
from dpstream.errors import DpstreamError, InvalidInput, InvalidParameter, RowsLost
from dpstream.records import Batch, Position

# A topic's partitions as a Kafka client fetches them: what is there, and what is gone.
#
# One consumer fetches all partitions ahead of their readers; what has come is sorted by partition.

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


class PartitionMessages(NamedTuple):
    """A message."""

    offset: int
    value: bytes | None
    key: Any
    time: int | None
    """Milliseconds since 1970."""


@dataclass(kw_only=True)
class PartitionBuffer:
    """What was fetched of a partition and is not read yet."""

    number: int
    at: int
    """Messages from this offset on."""
    messages: deque[PartitionMessages] = field(default_factory=deque)
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
        self._held: dict[int, PartitionBuffer] = {}
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

    def fetch(self, number: int, at: int, *, patiently: bool) -> PartitionBuffer:
        """What is there of a partition from an offset on; `patiently` waits for a broker, too."""
        held = self._held.get(number)
        if held is None or held.at != at:
            place = TopicPartition(self.name, number, at)
            if held is not None:
                self._consumer.incremental_unassign([place])
            self._consumer.incremental_assign([place])
            held = self._held[number] = PartitionBuffer(number=number, at=at)
        if not held.messages:
            self._poll(0.0)
        if not held.messages and held.end is None and (patiently or not self.failing):
            self._poll(_POLL)
        if self._problems.down and not held.messages and not self._retry.too_early:
            self._look(_ASK)  # does it answer again?
        return held

    def taken(self, held: PartitionBuffer) -> None:
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
                held.messages.append(
                    PartitionMessages(offset, message.value(), message.key(), told)
                )
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
            "state directory"
        )

    def _gone(self, held: PartitionBuffer) -> RowsLost:
        told = self.range_of(held.number)
        now = "others" if told is None else f"{told[0]} to {told[1] - 1}"
        return RowsLost(
            f"{self.name}/{held.number} has to be read from offset {held.at} on, but its offsets "
            f"are {now} now: retention has removed messages that are needed, or the topic was cut "
            "off; keep messages for longer (retention.ms, retention.bytes), and start anew with "
            "another state directory"
        )

    def _answered(self) -> None:
        self._problems.down = False
        self._retry.well()


def another_topic(name: str, was: str, now: str) -> RowsLost:
    """A topic of the same name is not the one whose offsets are known."""
    return RowsLost(
        f"the topic {name} was deleted and made again, or is that of another cluster: its id was "
        f"{was} and is {now}; start anew with another state directory"
    )


_BYTES = 32 << 20  # of one chunk
_PAUSE = 0.1  # seconds between two tries of a bounded source
_log = logging.getLogger("dpstream")


def from_options(options: ServerOptions) -> KafkaSource:
    """The source of kafka://HOST:PORT/TOPIC?..."""
    kind = options.choice("format", FORMATS, "json")
    header = options.text("header")
    decoder = messages_of(kind, header=None if header is None else header.split(","))
    decoder.max_bytes = int(options.number("max_message_bytes", MAX_BYTES, least=1))
    return KafkaSource(
        topic=topic_of(options),
        settings=client_settings(options),
        decoder=decoder,
        where=options.where,
        start=options.choice("start", ("earliest", "latest"), "earliest"),
        patience=options.number("patience", SECONDS),
        timestamp_column=options.text("timestamp_column"),
        key_column=options.text("key_column"),
        until=_until(options),
    )


def _until(options: ServerOptions) -> dict[int | None, int] | None:
    """An offset for every partition, or one for each: "0:500,1:480"."""
    text = options.text("until")
    if text is None:
        return None
    found: dict[int | None, int] = {}
    for word in text.split(","):
        partition, colon, offset = word.rpartition(":")
        if not offset.isdecimal() or (colon and not partition.isdecimal()):
            raise InvalidParameter(
                f"{options.where}: until must be an offset, or partition:offset with commas "
                f"between; got {text!r:.80}"
            )
        found[int(partition) if colon else None] = int(offset)
    return found


class KafkaSource:
    """Partitions "topic/0", "topic/1", ...; new ones are found while the stream runs.

    `start`: where a partition is begun that was there when the run began; one that is added later
    is read from its first message. `timestamp_column` and `key_column` add a message's own time
    and key to its rows, under these names. `until`: the offsets before which the partitions end,
    by number, or None for all others; such a source is bounded.
    """

    replayable = True

    def __init__(
        self,
        *,
        topic: str,
        settings: dict[str, Any],
        decoder: Decoder,
        where: str,
        start: str = "earliest",
        patience: float = SECONDS,
        timestamp_column: str | None = None,
        key_column: str | None = None,
        until: dict[int | None, int] | None = None,
    ) -> None:
        self.bounded, self._ends = until is not None, until or {}
        if timestamp_column is not None and timestamp_column == key_column:
            raise InvalidParameter(f"{where}: timestamp_column and key_column must differ")
        self._decoder, self._where, self._latest = decoder, where, start == "latest"
        self._extra = {"timestamp": timestamp_column, "key": key_column}
        self._topic = Topic(
            topic, settings, where=where, retry=RetryPolicy(where, seconds=patience)
        )
        self._begun_with: set[int] | None = None  # partitions that `start` is said of

    def partitions(self) -> list[str]:
        """Those known; the broker is asked again every few seconds."""
        self._topic.look()
        if self._begun_with is None:
            self._begun_with = set(self._topic.numbers)
        numbers = self._topic.numbers
        if self.bounded and None not in self._ends:
            numbers = [number for number in numbers if number in self._ends]
        return [f"{self._topic.name}/{number}" for number in numbers]

    def start_offset(self, position: Position) -> Position:
        """Where reading started in a position's partition: topic and first offset."""
        return None if position is None else position[:2]

    def columns(self, partition: str) -> None:
        """Messages declare no types."""

    def read(
        self,
        partition: str,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        until: Position = None,
    ) -> Batch:
        """The messages that are there, up to 50,000."""
        number = self._number(partition)
        span = self._begin(number, position, until)
        if span is None:
            if self.bounded:
                time.sleep(_PAUSE)
            return self._batch(partition, [], None, columns, done=not self.bounded)
        first, at = span
        end = None if until is None else self._span(until)[1]
        if end is not None and at >= end:
            if at > end:
                raise InvalidInput(f"{partition} cannot be read from offset {at} back to {end}")
            return self._batch(partition, [], until, columns, done=True)
        last = self._ends.get(number, self._ends.get(None))
        if end is None and last is not None and at >= last:
            return self._batch(partition, [], [self._topic.id, first, at], columns, done=True)
        held = self._topic.fetch(number, at, patiently=end is not None or self.bounded)
        messages = _taken(held, last if end is None else end)
        self._refuse_lost(partition, held, end)
        self._topic.taken(held)
        if end is not None:
            done = held.at == end
        elif last is not None:
            done = held.at >= last or _next_offset(held) >= last
        else:
            done = not held.messages and (held.end is not None or self._topic.failing)
        return self._batch(partition, messages, [self._topic.id, first, held.at], columns, done)

    def close(self) -> None:
        """Leave the broker."""
        self._topic.close()

    def _begin(self, number: int, position: Position, until: Position) -> tuple[int, int] | None:
        """The partition's first offset and the one to go on from; None if no broker tells."""
        if position is not None:
            return self._span(position)
        if until is not None:
            first = self._span(until)[0]
            return first, first
        told = self._topic.range_of(number)
        if told is None:
            return None
        if self._latest and number in (self._begun_with or ()):
            return told[1], told[1]
        if told[0]:
            _log.warning(
                "%s, partition %d begins at offset %d: what was at the %d offsets before was "
                "removed (by retention or by hand) before the first read and is in no release; "
                "keep messages for longer",
                *(self._where, number, told[0], told[0]),
            )
        return told[0], told[0]

    def _span(self, position: Position) -> tuple[int, int]:
        """The first and the next offset of a position, which must be one of this topic."""
        self._begun_with = set()  # the run goes on: a partition without position was added since
        match position:
            case [str(topic), int(first), int(following)] if 0 <= first <= following:
                pass
            case _:
                raise InvalidInput(
                    f"{position!r:.80} is no position in the topic {self._topic.name}; the "
                    "state belongs to another source"
                )
        if topic != self._topic.id:
            raise another_topic(self._topic.name, topic, str(self._topic.id))
        return first, following

    def _number(self, partition: str) -> int:
        if self._topic.id is None:
            self.partitions()
        topic, _, number = partition.rpartition("/")
        known = number.isdecimal() and int(number) in self._topic.numbers
        if topic != self._topic.name or not known:
            raise InvalidInput(
                f"the topic {self._topic.name} has no partition {partition!r} but "
                f"{len(self._topic.numbers)} others; the state belongs to another source"
            )
        return int(number)

    def _refuse_lost(self, partition: str, held: PartitionBuffer, end: int | None) -> None:
        """A replay must find the message before `end`."""
        if end is None or held.at == end:
            return
        beyond = held.messages[0].offset if held.messages else held.end
        if beyond is not None:
            raise RowsLost(
                f"{partition} was read up to offset {end - 1} before, but that message is gone: "
                f"{'it was compacted' if beyond >= end else f'the partition ends at {beyond}'}; "
                "restore the topic, or start anew with another state directory"
            )

    def _batch(
        self,
        partition: str,
        messages: list[PartitionMessages],
        position: Position,
        columns: Sequence[str] | None,
        done: bool,
    ) -> Batch:
        """The messages as rows, with the columns that are not in their payload."""
        added = {name: kind for kind, name in self._extra.items() if name is not None}
        inside = None if columns is None else [name for name in columns if name not in added]
        payloads = [message.value for message in messages]
        decoded = self._decoder.decode(payloads, inside)
        found = {name: decoded.table[name] for name in decoded.table.column_names}
        for name, kind in added.items():
            if columns is not None and name not in columns:
                continue
            if name in found:
                raise InvalidParameter(
                    f"{self._where}: the messages have a column {name!r} of their own; choose "
                    f"another {kind}_column"
                )
            told = _times(messages) if kind == "timestamp" else _keys(messages)
            found[name] = told.take(pa.array(decoded.origin))
        table = pa.table(found)
        places = [f"{partition}, offset {message.offset}" for message in messages]
        span = f", offsets {messages[0].offset} to {messages[-1].offset}" if messages else ""
        return Batch(
            table=table if columns is None else table.select(list(columns)),
            position=position,
            done=done,
            rejected=decoded.rejected(payloads, places),
            where=f"{partition}{span}",
        )


def _next_offset(held: PartitionBuffer) -> int:
    """Where the next message is, as far as that is known: there may be a gap before it."""
    return held.messages[0].offset if held.messages else (held.end or 0)


def _taken(held: PartitionBuffer, end: int | None) -> list[PartitionMessages]:
    """The messages of a chunk, none of them at `end` or behind it."""
    found: list[PartitionMessages] = []
    size = 0
    while held.messages and len(found) < MESSAGES and size < _BYTES:
        if end is not None and held.messages[0].offset >= end:
            break
        found.append(held.messages.popleft())
        size += len(found[-1].value or b"")
        held.at = found[-1].offset + 1
    return found


def _times(messages: list[PartitionMessages]) -> pa.Array:
    """Each message's own time, as text; null if it has none."""
    told = pa.array([message.time for message in messages], pa.timestamp("ms", "UTC"))
    return told.cast(pa.string())


def _keys(messages: list[PartitionMessages]) -> pa.Array:
    keys = [message.key for message in messages]
    texts = [key.decode(errors="replace") if isinstance(key, bytes) else key for key in keys]
    return pa.array(texts, pa.string())
