"""Kafka clients: their settings, what their errors mean, and a topic's messages by partition.

Settings with secrets come from files and the environment and are handed to the client alone. What
a broker or the client says is not repeated, only the name of its error.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from dpstream.connectors.server_base import RetryPolicy, ServerOptions
from dpstream.errors import DpstreamError, InvalidInput, InvalidParameter, RowsLost

_log = logging.getLogger("dpstream.kafka")
_log.addHandler(logging.NullHandler())  # for who wants it; RetryPolicy tells what matters

_FILES = {
    "ca_file": "ssl.ca.location",
    "cert_file": "ssl.certificate.location",
    "key_file": "ssl.key.location",
}
_POLL = 0.1  # seconds that a fetch waits for messages
_ASK, _FIRST_ASK = 0.5, 3.0  # seconds that a question to the broker may take
_LOOK_EVERY = 5.0  # seconds between looks for new partitions
_ENDS_EVERY = 2.0  # seconds between questions for how much is unread
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
CONSUMER = {
    "group.id": "dpstream",  # the client wants one; it is not joined
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
}
"""Settings of every consumer: it reads committed messages to the end, and leaves no trace."""
_SETTINGS = CONSUMER | {
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "fetch.wait.max.ms": 100,
    "queued.max.messages.kbytes": 16 << 10,
    "max.poll.interval.ms": 86_400_000,
    "topic.metadata.refresh.interval.ms": 10_000,
}
_REFUSED = {
    KafkaError._AUTHENTICATION: "refuses the user name or password",
    KafkaError.SASL_AUTHENTICATION_FAILED: "refuses the user name or password",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "does not allow this user to use the topic",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "does not allow this user transactions",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "does not allow this user to do that",
}


def client_settings(options: ServerOptions) -> dict[str, Any]:
    """The client's settings; `config_file` may hold any, in the form name=value a line."""
    settings: dict[str, Any] = {
        "bootstrap.servers": options.servers,
        "client.id": "dpstream",
        "log.connection.close": False,
        "reconnect.backoff.ms": 100,
        "reconnect.backoff.max.ms": 2000,
        "allow.auto.create.topics": False,
        "logger": _log,
    }
    path = options.text("config_file")
    if path is not None:
        settings |= _properties(options.file(path, "config_file"), f"{options.where}: {path}")
    given = {
        "sasl.username": options.text("username", options.user),
        "sasl.password": options.secret("password"),
        "ssl.key.password": options.secret("key_password"),
        **{name: options.text(option) for option, name in _FILES.items()},
    }
    settings |= {name: value for name, value in given.items() if value is not None}
    tls = any(name.startswith("ssl.") for name in settings)
    sasl = "sasl.username" in settings
    protocol = ("sasl_" if sasl else "") + ("ssl" if tls else "plaintext")
    settings["security.protocol"] = options.text(
        "security_protocol", settings.get("security.protocol", protocol)
    )
    mechanism = options.text("sasl_mechanism", settings.get("sasl.mechanism"))
    if sasl or mechanism is not None:
        settings["sasl.mechanism"] = mechanism or "SCRAM-SHA-512"
    if not options.servers:
        raise InvalidParameter(f"{options.where} names no broker; write kafka://HOST:PORT/TOPIC")
    return settings


def no_topic(where: str, topic: str) -> InvalidInput:
    """The error for a topic that the broker does not have."""
    return InvalidInput(f"{where}: the broker has no topic {topic!r}; create it first")


def create_client(kind: type, settings: dict[str, Any], where: str) -> Any:
    """A client; a setting that it does not take is named, never its value."""
    try:
        return kind(settings)
    except (KafkaException, ValueError, TypeError) as problem:
        named = [name for name in settings if name in str(problem)]
        which = f" ({', '.join(named)})" if named else ""
        raise InvalidParameter(
            f"{where}: the client does not take its settings{which}; look at the options, "
            "config_file and the files that they name"
        ) from None


class Problems:
    """What a client tells of by its callback; most of it the client mends itself.

    It knows nothing of the client: a cycle of references would leave the client to whichever
    thread collects it, and a client that ends in a thread of its own takes the process with it.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._refused: str | None = None
        self.down = False
        """No broker can be reached."""

    def __call__(self, error: KafkaError) -> None:
        """Note it."""
        self._refused = _REFUSED.get(error.code()) or self._refused
        self.down = self.down or error.code() == KafkaError._ALL_BROKERS_DOWN

    def raise_refusal(self) -> None:
        """Raise what trying again cannot mend."""
        if self._refused is not None:
            raise InvalidParameter(f"{self._where}: the broker {self._refused}")


def _properties(text: str, where: str) -> dict[str, str]:
    properties = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = line.partition("=")
        if line.strip() and not line.lstrip().startswith(("#", "!")):
            if not equals:
                raise InvalidParameter(f"{where}, line {number} must be name=value")
            properties[name.strip()] = value.strip()
    return properties


@dataclass(kw_only=True)
class PartitionBuffer:
    """What was fetched of a partition and is not read yet."""

    number: int
    at: int
    """Messages from this offset on."""
    messages: deque[Message] = field(default_factory=deque)
    end: int | None = None
    """The partition's end, if everything before it was fetched."""
    paused: bool = False


class Topic:
    """A topic's id and partitions, and what is fetched of them.

    One consumer fetches all partitions ahead of their readers; what has come is sorted by
    partition.
    """

    def __init__(
        self, name: str, settings: dict[str, Any], *, where: str, retry: RetryPolicy
    ) -> None:
        self.name, self._where, self._retry = name, where, retry
        self.id: str | None = None
        self.numbers: list[int] = []
        self._next_look = self._next_ends = 0.0
        self._asked_ends: dict[TopicPartition, Future[Any]] = {}
        self._ends: dict[int, int] = {}
        self._buffers: dict[int, PartitionBuffer] = {}
        self._problems = Problems(where)
        callback = {"error_cb": self._problems}
        self._consumer = create_client(Consumer, settings | _SETTINGS | callback, where)
        self._admin: Any = create_client(AdminClient, settings | callback, where)

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
                self._retry.report_failure(_SILENT)
            return None
        self._answered()
        return int(low), int(high)

    def behind(self, number: int, at: int) -> int | None:
        """Messages of a partition from an offset on, as the broker told last; it is not waited for.

        Marks of transactions count where nothing was fetched behind them yet.
        """
        done = {place: asked for place, asked in self._asked_ends.items() if asked.done()}
        for place, asked in done.items():
            del self._asked_ends[place]
            if asked.exception() is None:
                self._ends[place.partition] = asked.result().offset
        if time.monotonic() >= self._next_ends and not self._asked_ends and self._admin is not None:
            self._next_ends = time.monotonic() + _ENDS_EVERY
            ends = {TopicPartition(self.name, each): OffsetSpec.latest() for each in self.numbers}
            level = IsolationLevel.READ_COMMITTED
            self._asked_ends = self._admin.list_offsets(ends, isolation_level=level) if ends else {}
        buffer, end = self._buffers.get(number), self._ends.get(number)
        if buffer is not None and buffer.at == at and not buffer.messages:
            at = max(at, buffer.end or 0)
        return None if end is None else max(0, end - at)

    def fetch(self, number: int, at: int, *, patiently: bool) -> PartitionBuffer:
        """What is there of a partition from an offset on; `patiently` waits for a broker, too."""
        buffer = self._buffers.get(number)
        if buffer is None or buffer.at != at:
            place = TopicPartition(self.name, number, at)
            if buffer is not None:
                self._consumer.incremental_unassign([place])
            self._consumer.incremental_assign([place])
            buffer = self._buffers[number] = PartitionBuffer(number=number, at=at)
        if not buffer.messages:
            self._poll(0.0)
        if not buffer.messages and buffer.end is None and (patiently or not self._retry.failing):
            self._poll(_POLL)
        if self._problems.down and not buffer.messages and not self._retry.too_early:
            self._look(_ASK)  # does it answer again?
        return buffer

    def resume(self, buffer: PartitionBuffer) -> None:
        """Fetch more, once the messages of a partition were read."""
        if buffer.paused and not buffer.messages:
            self._consumer.resume([TopicPartition(self.name, buffer.number)])
            buffer.paused = False

    def close(self) -> None:
        """Leave the broker; a second time does nothing."""
        if self._admin is not None:
            self._consumer.close()
        self._admin = None

    def _poll(self, wait: float) -> None:
        """Sort what has come by partition, many messages at a time."""
        first = self._consumer.poll(wait) if wait else None
        come = ([] if first is None else [first]) + self._consumer.consume(MESSAGES, 0)
        errors = [message.error() for message in come]
        begin = 0
        for at in [place for place, error in enumerate(errors) if error is not None]:
            self._sort(come[begin:at])
            self._take_in(come[at], errors[at])
            begin = at + 1
        self._sort(come[begin:])
        for buffer in self._buffers.values():
            if len(buffer.messages) > 2 * MESSAGES and not buffer.paused:
                self._consumer.pause([TopicPartition(self.name, buffer.number)])
                buffer.paused = True
        self._problems.raise_refusal()

    def _sort(self, messages: list[Message]) -> None:
        """Messages without errors, in the order in which they came."""
        if not messages:
            return
        partitions = [message.partition() for message in messages]
        for number in set(partitions):
            buffer = self._buffers.get(number or 0)
            if buffer is None:
                continue
            mine = messages
            if partitions.count(number) < len(messages):
                pairs = zip(messages, partitions, strict=True)
                mine = [message for message, partition in pairs if partition == number]
            buffer.messages.extend(mine)
            buffer.end = None
            self._answered()

    def _take_in(self, message: Message, error: KafkaError) -> None:
        """What stands in a message's place: the end of a partition, or a problem."""
        buffer = self._buffers.get(message.partition() or 0)
        if buffer is None:
            return
        if error.code() in _OUT_OF_RANGE:
            raise self._out_of_range(buffer)
        if error.code() == KafkaError._PARTITION_EOF:
            buffer.end = message.offset()
            self._answered()
        else:
            self._problems(error)

    def _look(self, seconds: float) -> None:
        self._next_look = time.monotonic() + _LOOK_EVERY
        topics = TopicCollection([self.name])
        asked = self._admin.describe_topics(topics, request_timeout=seconds)[self.name]
        try:
            while not asked.done():
                wait([asked], timeout=_POLL)
                self._admin.poll(0)  # its callback tells why there is no answer
                self._problems.raise_refusal()
            about = asked.result()
        except KafkaException as problem:
            error = problem.args[0]
            if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                if self.id is None:
                    raise no_topic(self._where, self.name) from None
                raise RowsLost(
                    f"{self._where}: the topic was deleted; make a new one, and start anew with "
                    "another state directory"
                ) from None
            self._problems(error)
            self._problems.raise_refusal()
            self._retry.report_failure(_SILENT)
            return
        self._answered()
        if self.id not in (None, str(about.topic_id)):
            raise another_topic(self.name, str(self.id), str(about.topic_id))
        numbers = sorted(partition.id for partition in about.partitions)
        if self.id is not None and numbers != self.numbers:
            try:  # the consumer has a view of the topic of its own, which it seldom looks after
                self._consumer.list_topics(self.name, timeout=_ASK)
            except KafkaException:
                self._next_look = 0.0
        self.id, self.numbers = str(about.topic_id), numbers

    def _out_of_range(self, buffer: PartitionBuffer) -> RowsLost:
        offsets = self.range_of(buffer.number)
        now = "others" if offsets is None else f"{offsets[0]} to {offsets[1] - 1}"
        return RowsLost(
            f"{self.name}/{buffer.number} has to be read from offset {buffer.at} on, but its "
            f"offsets are {now} now: retention has removed messages that are needed, or the topic "
            "was cut off; keep messages for longer (retention.ms, retention.bytes), and start anew "
            "with another state directory"
        )

    def _answered(self) -> None:
        self._problems.down = False
        self._retry.report_success()


def another_topic(name: str, was: str, now: str) -> RowsLost:
    """A topic of the same name is not the one whose offsets are known."""
    return RowsLost(
        f"the topic {name} was deleted and made again, or is that of another cluster: its id was "
        f"{was} and is {now}; start anew with another state directory"
    )
