"""A Kafka topic as a source: each of its partitions is one, read by offset.

A position is [topic id, first offset, next offset]: where the partition was begun and where it goes
on; of changes (`debezium-json`) also the place in the database's log. The broker keeps none:
partitions are assigned, no group is joined, nothing is committed. So a replay reads what was read,
whatever other consumers do, and finds out if it cannot: offsets that retention has removed, a topic
that was deleted and made again, messages that compaction took away.

Offsets may have gaps (transactions, compaction), so a position always follows a message.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from typing import TypeAlias

import pyarrow as pa
from confluent_kafka import Message

from dpstream.connectors.changes import UnwantedChange, refusal
from dpstream.connectors.kafka.client import (
    MESSAGES,
    PartitionBuffer,
    Topic,
    another_topic,
    client_settings,
)
from dpstream.connectors.kafka.debezium import DebeziumDecoder
from dpstream.connectors.kafka.registry import message_decoder
from dpstream.connectors.server_base import ServerOptions
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost
from dpstream.records import Batch, Columns, Position

Payloads: TypeAlias = Sequence[bytes | None]
_BYTES = 32 << 20  # of one chunk
_PAUSE = 0.1  # seconds between two tries of a bounded source
_log = logging.getLogger("dpstream")


class KafkaSource:
    """The source of kafka://HOST:PORT/TOPIC?...: partitions "topic/0", "topic/1", ...

    New partitions are found while the stream runs. `start=latest`: a partition that was there when
    the run began is read from its end on; one that is added later is always read from its first
    message. `timestamp_column` and `key_column` add a message's own time and key to its rows,
    under these names. With `until`, offsets before which the partitions end, it is bounded.
    """

    replayable = True

    def __init__(self, options: ServerOptions) -> None:
        topic = options.path_name("topic", "kafka://HOST:PORT/TOPIC")
        settings = client_settings(options)
        self._latest, self._retry = options.starts_latest(), options.retry_policy()
        self._decoder = message_decoder(options, self._retry.seconds)
        self._where = options.where
        timestamp_column, key_column = options.text("timestamp_column"), options.text("key_column")
        self._extra = {"timestamp": timestamp_column, "key": key_column}
        self._ends = _parse_until(options)  # by partition; None: all others
        self.bounded = bool(self._ends)
        if timestamp_column is not None and timestamp_column == key_column:
            raise InvalidParameter(f"{self._where}: timestamp_column and key_column must differ")
        self._topic = Topic(topic, settings, where=self._where, retry=self._retry)
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

    def behind(self, positions: Mapping[str, Position]) -> dict[str, int]:
        """Messages that the broker has after these positions."""
        lags = {
            partition: self._topic.behind(int(partition.rpartition("/")[2]), position[2])
            for partition, position in positions.items()
            if position is not None
        }
        return {partition: lag for partition, lag in lags.items() if lag is not None}

    def until_now(self) -> str:
        """The offsets at which the partitions end now, as `until` takes them."""
        self.partitions()
        ranges = {number: self._topic.range_of(number) for number in self._topic.numbers}
        ends = [f"{number}:{both[1]}" for number, both in ranges.items() if both is not None]
        return ",".join(ends) if len(ends) == len(ranges) else ""

    def ends(self) -> dict[int, tuple[int, int]]:
        """By partition: where `until` says that it ends, and where it ends now."""
        found = {}
        for number in self._topic.numbers:
            end, both = self._ends.get(number, self._ends.get(None)), self._topic.range_of(number)
            if end is not None:
                found[number] = (end, 0 if both is None else both[1])
        return found

    def columns(self, partition: str) -> None:
        """Messages declare no types."""

    def read(
        self, partition: str, position: Position, *, columns: Columns = None, until: Position = None
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
        log = [] if position is None else position[3:]
        last = self._ends.get(number, self._ends.get(None))
        if end is None and last is not None and at >= last:
            return self._batch(partition, [], [self._topic.id, first, at, *log], columns, done=True)
        buffer = self._topic.fetch(number, at, patiently=end is not None or self.bounded)
        messages, payloads = _take(buffer, last if end is None else end)
        self._refuse_lost(partition, buffer, end)
        self._topic.resume(buffer)
        if end is not None:
            done = buffer.at == end
        elif last is not None:
            done = buffer.at >= last or (_next_offset(buffer) or 0) >= last
        else:
            done = not buffer.messages and (buffer.end is not None or self._retry.failing)
        stand = [self._topic.id, first, buffer.at, *log]
        return self._batch(partition, messages, stand, columns, done, payloads)

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
        offsets = self._topic.range_of(number)
        if offsets is None:
            return None
        first, following = offsets
        if self._latest and number in (self._begun_with or ()):
            return following, following
        if first:
            _log.warning(
                "%s, partition %d begins at offset %d: what was at the %d offsets before was "
                "removed (by retention or by hand) before the first read and is in no release; "
                "keep messages for longer",
                *(self._where, number, first, first),
            )
        return first, first

    def _span(self, position: Position) -> tuple[int, int]:
        """The first and the next offset of a position, which must be one of this topic."""
        self._begun_with = set()  # the run goes on: a partition without position was added since
        match position:
            case [str(topic), int(first), int(following), *places] if (
                0 <= first <= following
                and (not places or isinstance(self._decoder, DebeziumDecoder))
                and all(isinstance(place, list) and len(place) == 2 for place in places)
                and len(places) <= 1
            ):
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

    def _refuse_lost(self, partition: str, buffer: PartitionBuffer, end: int | None) -> None:
        """A replay must find the message before `end`."""
        if end is None or buffer.at == end:
            return
        beyond = _next_offset(buffer)
        if beyond is not None:
            raise RowsLost(
                f"{partition} was read up to offset {end - 1} before, but that message is gone: "
                f"{'it was compacted' if beyond >= end else f'the partition ends at {beyond}'}; "
                "restore the topic, or start anew with another state directory"
            )

    def _batch(
        self,
        partition: str,
        messages: list[Message],
        position: Position,
        columns: Columns,
        done: bool,
        payloads: Payloads = (),
    ) -> Batch:
        """The messages as rows, with the columns that are not in their payload."""
        added = {name: kind for kind, name in self._extra.items() if name is not None}
        inside = None if columns is None else [name for name in columns if name not in added]
        if isinstance(self._decoder, DebeziumDecoder):
            place = next(iter(position[3:]), None) if messages else None
            try:
                changes = self._decoder.changes(payloads, place, inside)
            except UnwantedChange as problem:
                where = f"offset {messages[problem.at].offset()} of {partition} in {self._where}"
                raise refusal(where, problem.operation) from None
            decoded = changes.decoded
            if changes.place is not None:
                position = [*position[:3], changes.place]
        else:
            decoded = self._decoder.decode(payloads, inside)
        arrays = {name: decoded.table[name] for name in decoded.table.column_names}
        for name, kind in added.items():
            if columns is not None and name not in columns:
                continue
            if name in arrays:
                raise InvalidParameter(
                    f"{self._where}: the messages have a column {name!r} of their own; choose "
                    f"another {kind}_column"
                )
            arrays[name] = _own_column(messages, kind).take(pa.array(decoded.origin))
        table = pa.table(arrays)
        span = f", offsets {messages[0].offset()} to {messages[-1].offset()}" if messages else ""
        return Batch(
            table=table if columns is None else table.select(list(columns)),
            position=position,
            done=done,
            rejected=decoded.rejected(
                payloads, lambda at: f"{partition}, offset {messages[at].offset()}"
            ),
            where=f"{partition}{span}",
        )


def _next_offset(buffer: PartitionBuffer) -> int | None:
    """Where the next message is, as far as that is known: there may be a gap before it."""
    return buffer.messages[0].offset() if buffer.messages else buffer.end


def _take(buffer: PartitionBuffer, end: int | None) -> tuple[list[Message], Payloads]:
    """The messages of a chunk and what they hold, none of them at `end` or behind it."""
    messages = list(islice(buffer.messages, MESSAGES))
    if end is not None:
        messages = messages[: bisect_left(messages, end, key=Message.offset)]
    payloads: Payloads = [message.value() for message in messages]
    sizes = [len(payload or b"") for payload in payloads]
    count = len(messages)
    if sum(sizes) >= _BYTES:
        count = bisect_left(list(accumulate(sizes)), _BYTES) + 1
    if count:
        buffer.at = (messages[count - 1].offset() or 0) + 1
    for _ in range(count):
        buffer.messages.popleft()
    return messages[:count], payloads[:count]


def _own_column(messages: list[Message], kind: str) -> pa.Array:
    """Each message's own time or key, as text; null if it has none."""
    if kind == "timestamp":
        stamps = [message.timestamp() for message in messages]
        times = [stamp if known else None for known, stamp in stamps]
        return pa.array(times, pa.timestamp("ms", "UTC")).cast(pa.string())
    keys = [message.key() for message in messages]
    texts = [key.decode(errors="replace") if isinstance(key, bytes) else key for key in keys]
    return pa.array(texts, pa.string())


def _parse_until(options: ServerOptions) -> dict[int | None, int]:
    """An offset for every partition, or one for each: "0:500,1:480"."""
    text, ends = options.text("until"), dict[int | None, int]()
    for word in () if text is None else text.split(","):
        partition, colon, offset = word.rpartition(":")
        if not offset.isdecimal() or (colon and not partition.isdecimal()):
            raise InvalidParameter(
                f"{options.where}: until must be an offset, or partition:offset with commas "
                f"between; got {text!r:.80}"
            )
        ends[int(partition) if colon else None] = int(offset)
    return ends


from_options = KafkaSource
