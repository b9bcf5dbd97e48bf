"""Releases as messages of a Kafka topic, each release in one transaction.

A row is a message: a JSON object under the query's name as key, so that a query's rows stay in one
partition and in order. With a release's rows its entry in the index is written, in the same
transaction: the index is the compacted topic `<topic>.releases` with one message per release. Rows
without their entry were never committed, and nobody who reads committed messages sees them.

A sink that starts first ends what one before it has left open (the transactional id belongs to the
topic and the query, and whoever held it is shut out), then reads the index: so it knows exactly
what is there. When a commit's outcome is not known it does the same again.

With `upsert` a row has a key of its own, and a release also deletes, by messages without a value,
the rows of its window that it has no more: which ones, the topic says. So the topic is a table:
whoever reads it to its end has the newest release of each window, compacted or not.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
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
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec

from dpstream.connectors.encode import another_run, release_facts, run_of, with_numbers
from dpstream.connectors.kafka.client import (
    CONSUMER,
    Problems,
    client_settings,
    create_client,
    no_topic,
)
from dpstream.connectors.kafka.registry import message_encoder
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
        self._encoder = message_encoder(options, self._topic, self._retry.seconds)
        self._admin: Any = None
        self._producers: dict[str, Any] = {}
        self._done: dict[str, dict[tuple[int, int], tuple[str, str]]] = {}
        """By query: its releases, with their run and output."""
        self._shown: dict[str, dict[int, set[bytes]]] = {}
        """By query: the keys of the rows of each window, where they are upserted."""
        self._over: dict[str, set[int]] = {}
        """By query: windows whose last release is there, of which no row goes any more."""

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Publish the rows, unless the release is in the index."""
        key = name.encode()
        rows: list[tuple[bytes, bytes | None]]
        rows = [(key, row) for row in self._rows(name, window, trigger, table)]
        about = self._about(name, window, trigger, table)
        self._insist(name, lambda: self._once(about, lambda: rows))

    def upsert(
        self, name: str, window: int, trigger: int, table: pa.Table, row_keys: Sequence[str]
    ) -> None:
        """Publish the rows under keys of their own, and tombstones of those that are gone."""
        rows = self._rows(name, window, trigger, table)
        new = dict(zip((key.encode() for key in row_keys), rows, strict=True))
        facts = release_facts(table)
        last = facts.get("release_index", 0) == facts.get("releases", -1)
        about = self._about(name, window, trigger, table) | {"output": "upsert", "last": last}

        def messages() -> list[tuple[bytes, bytes | None]]:
            gone = self._shown_keys(name).get(window, set()) - new.keys()
            return [*((key, None) for key in sorted(gone)), *new.items()]

        def replace() -> None:
            if self._once(about, messages):
                shown = self._shown_keys(name)
                shown[window] = set(new)
                if last:
                    del shown[window]

        self._insist(name, replace)

    def check(self, name: str, schema: pa.Schema) -> None:
        """Refuse a topic that is not there; nobody who publishes there is shut out yet."""
        self._encoder.check(name, with_numbers(schema.empty_table(), 0, 1))
        self._insist(name, self._find_topics, open_first=False)

    def check_upsert(self, name: str, schema: pa.Schema) -> None:
        """The same; and the topic must keep the newest message of every key."""
        self.check(name, schema)
        self._insist(name, self._refuse_uncompacted, open_first=False)

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
        self._shown.pop(query, None)
        self._producers[query] = producer

    def _rows(self, query: str, window: int, trigger: int, table: pa.Table) -> list[bytes]:
        return self._encoder.encode(query, with_numbers(table, window, trigger))

    def _about(self, query: str, window: int, trigger: int, table: pa.Table) -> dict[str, Any]:
        return {"query": query, "window": window, "trigger": trigger, "run": run_of(table)}

    def _once(
        self,
        about: dict[str, Any],
        make_messages: Callable[[], list[tuple[bytes, bytes | None]]],
    ) -> bool:
        """Send keys and values in one transaction; False: they, or newer ones, are there."""
        query, window, trigger, run = (about[n] for n in ("query", "window", "trigger", "run"))
        output = about.get("output", "append")
        self._refuse_another(query, run, output)
        done = self._done[query]
        if (window, trigger) in done or (
            output == "upsert" and any(w == window and t > trigger for w, t in done)
        ):
            return False
        messages = make_messages()
        producer = self._producers[query]
        named = ("query", "window", "trigger", "run")
        headers = [(f"dpstream-{name}", str(about[name])) for name in named]
        producer.begin_transaction()
        for message_key, value in messages:
            self._send(producer, self._topic, message_key, value, headers)
        rows = sum(value is not None for _, value in messages)
        key, entry = [query, window, trigger], about | {"rows": rows}
        index_key, index_value = (json.dumps(part).encode() for part in (key, entry))
        self._send(producer, self._index, index_key, index_value, headers)
        producer.commit_transaction(self._ask)
        done[window, trigger] = run, output
        return True

    def _send(
        self,
        producer: Any,
        topic: str,
        key: bytes,
        value: bytes | None,
        headers: list[tuple[str, str]],
    ) -> None:
        while True:
            try:
                producer.produce(topic, value, key, headers=headers)
                return
            except BufferError:  # more rows than the client holds
                producer.poll(0.1)

    def _refuse_another(self, query: str, run: str, output: str | None = None) -> None:
        known = set(self._done[query].values())
        if known and run not in {run for run, _ in known}:
            raise another_run(f"the topic {self._topic}", query)
        was = {output for _, output in known}
        if output is not None and was and output not in was:
            raise StateError(
                f"the topic {self._topic} has releases of {query!r} with output = "
                f"{was.pop()!r}, and this run has {output!r}; use another topic"
            )

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

    def _read_index(self, query: str) -> dict[tuple[int, int], tuple[str, str]]:
        """The releases of a query that are there, by (window, trigger): their run and output."""
        runs: dict[tuple[int, int], tuple[str, str]] = {}
        over = self._over[query] = set()
        for message in self._read(self._index):
            key = json.loads(message.key())
            if key[0] == query:
                entry = json.loads(message.value())
                runs[key[1], key[2]] = entry["run"], entry.get("output", "append")
                if entry.get("last"):
                    over.add(key[1])
        return runs

    def _shown_keys(self, query: str) -> dict[int, set[bytes]]:
        """The keys of a query's rows, by window, as the topic has them."""
        if query not in self._shown:
            shown: dict[int, set[bytes]] = {}
            for message in self._read(self._topic):
                headers = dict(message.headers() or [])
                if headers.get("dpstream-query") == query.encode():
                    window = int(headers["dpstream-window"])
                    if window in self._over[query]:
                        continue
                    keys = shown.setdefault(window, set())
                    change = keys.discard if message.value() is None else keys.add
                    change(message.key())
            self._shown[query] = shown
        return self._shown[query]

    def _read(self, topic: str) -> Iterator[Any]:
        """All committed messages of a topic.

        Reads to the end of what is written now, also behind transactions that others have open: an
        entry of this query may stand there.
        """
        settings = self._settings | CONSUMER | {"fetch.wait.max.ms": 50}
        consumer = create_client(Consumer, settings, self._where)
        try:
            ends = self._ends_of(topic, consumer)
            left = {number for number, end in ends.items() if end}
            consumer.assign([TopicPartition(topic, n, OFFSET_BEGINNING) for n in ends])
            deadline = time.monotonic() + _OTHERS
            while left:
                for message in consumer.consume(10_000, 0.05):
                    error = message.error()
                    if error is None:
                        deadline = time.monotonic() + _OTHERS
                        yield message
                    elif error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    elif message.offset() >= ends[message.partition()]:
                        left.discard(message.partition())
                if time.monotonic() > deadline:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        finally:
            consumer.close()

    def _ends_of(self, topic: str, consumer: Any) -> dict[int, int]:
        """Where each partition ends now, transactions that are open included."""
        about = consumer.list_topics(topic, timeout=_ASK).topics[topic]
        places = {TopicPartition(topic, n): OffsetSpec.latest() for n in about.partitions}
        asked = self._admin.list_offsets(
            places, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=_ASK
        )
        return {place.partition: int(answer.result().offset) for place, answer in asked.items()}

    def _refuse_uncompacted(self) -> None:
        admin, _ = self._find_topics()
        resource = ConfigResource(ConfigResource.Type.TOPIC, self._topic)
        try:
            asked = admin.describe_configs([resource], request_timeout=_ASK)[resource].result()
        except KafkaException as problem:
            if problem.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return  # this user may not ask
            raise
        policy = asked["cleanup.policy"].value
        if policy != "compact":
            raise InvalidInput(
                f"{self._where}: a topic of upserts keeps the newest message of every key, and "
                f"this one has cleanup.policy={policy}; set it to compact"
            )

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
